// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/table/spill_store.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/memtablerep.h>
#include <rocksdb/slice_transform.h>
#include <rocksdb/table.h>
#include <rocksdb/utilities/checkpoint.h>
#include <rocksdb/write_batch.h>
#include <vector>

#include "cohort/base/atomic_file.h"
#include "cohort/base/error.h"

namespace cohort::ps {
namespace {

namespace fs = std::filesystem;

// Beside the rows, whose keys have 8 bytes.
constexpr const char* kFacts = "rows";

// Ids as bytes that sort as numbers do.
uint64_t big_endian(uint64_t id) {
  return __builtin_bswap64(id);
}

// What precedes the floats in a value.
struct Head {
  uint32_t last_push;
  uint32_t pushes;
};

// What a store says of itself.
struct Facts {
  int64_t rows = 0;
  int64_t width = 0;
  int64_t state_width = 0;
};

rocksdb::Options options_of(int64_t memory_bytes) {
  rocksdb::BlockBasedTableOptions blocks;
  blocks.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  blocks.block_cache = rocksdb::NewLRUCache(static_cast<size_t>(memory_bytes / 2));
  rocksdb::Options options;
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(blocks));
  options.compression = rocksdb::kNoCompression;  // Weights look like noise.
  options.write_buffer_size = static_cast<size_t>(memory_bytes / 6);
  options.max_write_buffer_number = 3;
  // Rows come and go one by one, without an order: a hash table of them in memory takes twice as
  // many a second as the usual sorted list, and is sorted when it is written.
  options.prefix_extractor.reset(rocksdb::NewCappedPrefixTransform(sizeof(uint64_t)));
  options.memtable_factory.reset(
      rocksdb::NewHashSkipListRepFactory(options.write_buffer_size / 256));
  options.allow_concurrent_memtable_write = false;  // Which it cannot; there is one writer.
  options.memtable_whole_key_filtering = true;
  options.memtable_prefix_bloom_size_ratio = 0.1;
  options.max_background_jobs = 2;
  options.avoid_flush_during_shutdown = true;  // Only checkpoints are ever opened again.
  options.keep_log_file_num = 2;
  return options;
}

}  // namespace

struct SpillStore::Database {
  std::string folder;
  Facts facts;
  std::unique_ptr<rocksdb::DB> db;

  void check(const rocksdb::Status& status, const char* doing) const {
    TORCH_CHECK(status.ok(), "spill store ", folder, ": ", doing, ": ", status.ToString());
  }

  void write(rocksdb::WriteBatch& batch) const {
    rocksdb::WriteOptions options;
    options.disableWAL = true;  // The server's update log has every change.
    check(db->Write(options, &batch), "writing");
  }

  size_t value_bytes() const {
    return sizeof(Head) + sizeof(float) * static_cast<size_t>(facts.width + facts.state_width);
  }

  // Calls `visit` with the row that is stored as `key` and `value`; `floats` is its memory.
  template <class Visit>
  void show(const rocksdb::Slice& key, const rocksdb::Slice& value, std::vector<float>& floats,
            const Visit& visit) const {
    TORCH_CHECK(value.size() == value_bytes(), "spill store ", folder, ": expected rows of ",
                value_bytes(), " bytes, found one of ", value.size());
    uint64_t id = 0;
    std::memcpy(&id, key.data(), sizeof(id));
    Head head{};
    std::memcpy(&head, value.data(), sizeof(head));
    floats.resize(static_cast<size_t>(facts.width + facts.state_width));
    std::memcpy(floats.data(), value.data() + sizeof(head), floats.size() * sizeof(float));
    const std::span all(floats);
    visit(RowView{big_endian(id), head.last_push, head.pushes,
                  all.first(static_cast<size_t>(facts.width)),
                  all.subspan(static_cast<size_t>(facts.width))});
  }
};

SpillStore::SpillStore(const std::string& folder, const Options& options)
    : database_(std::make_unique<Database>()) {
  static_assert(std::endian::native == std::endian::little, "values hold little-endian numbers");
  Database& database = *database_;
  database.folder = folder;
  rocksdb::Options its_options = options_of(options.memory_bytes);
  its_options.create_if_missing = !fs::exists(folder);
  make_folder(folder);
  rocksdb::DB* db = nullptr;
  database.check(rocksdb::DB::Open(its_options, folder, &db), "opening");
  database.db.reset(db);
  std::string text;
  const auto status = db->Get({}, kFacts, &text);
  if (status.IsNotFound()) {
    if (!its_options.create_if_missing)
      throw ConfigError("spill store " + folder +
                        ": expected a checkpoint, it does not say how many rows it has");
    database.facts = {0, options.width, options.state_width};
    return;
  }
  database.check(status, "opening");
  TORCH_CHECK(text.size() == sizeof(Facts), "spill store ", folder, ": its facts are damaged");
  std::memcpy(&database.facts, text.data(), sizeof(Facts));
  const Facts& facts = database.facts;
  if (facts.width != options.width || facts.state_width != options.state_width) {
    throw ConfigError("spill store " + folder + ": expected rows of " +
                      std::to_string(options.width) + " weights and " +
                      std::to_string(options.state_width) + " floats of state, found " +
                      std::to_string(facts.width) + " and " + std::to_string(facts.state_width));
  }
}
SpillStore::~SpillStore() = default;
SpillStore::SpillStore(SpillStore&&) noexcept = default;

int64_t SpillStore::rows() const {
  return database_->facts.rows;
}

void SpillStore::put(std::span<const RowView> rows) {
  if (rows.empty()) return;
  rocksdb::WriteBatch batch;
  std::vector<char> value(database_->value_bytes());
  for (const RowView& row : rows) {
    const uint64_t key = big_endian(row.id);
    const Head head{row.last_push, row.pushes};
    char* to = value.data();
    std::memcpy(to, &head, sizeof(head));
    const auto weights = std::as_bytes(row.weights);
    const auto state = std::as_bytes(row.state);
    auto* floats = reinterpret_cast<std::byte*>(to + sizeof(head));
    std::copy(state.begin(), state.end(), std::copy(weights.begin(), weights.end(), floats));
    batch.Put({reinterpret_cast<const char*>(&key), sizeof(key)}, {to, value.size()});
  }
  database_->write(batch);
  database_->facts.rows += static_cast<int64_t>(rows.size());
}

void SpillStore::get(std::span<const uint64_t> ids,
                     const std::function<void(size_t, const RowView&)>& visit) const {
  constexpr size_t kBatch = 1024;
  std::vector<size_t> order(ids.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return ids[a] < ids[b]; });
  std::vector<uint64_t> keys(kBatch);
  std::vector<rocksdb::Slice> slices(kBatch);
  std::vector<rocksdb::PinnableSlice> values(kBatch);
  std::vector<rocksdb::Status> statuses(kBatch);
  std::vector<float> floats;
  rocksdb::DB& db = *database_->db;
  for (size_t begin = 0; begin < order.size(); begin += kBatch) {
    const size_t count = std::min(kBatch, order.size() - begin);
    for (size_t i = 0; i < count; ++i) {
      keys[i] = big_endian(ids[order[begin + i]]);
      slices[i] = {reinterpret_cast<const char*>(&keys[i]), sizeof(uint64_t)};
    }
    db.MultiGet({}, db.DefaultColumnFamily(), count, slices.data(), values.data(), statuses.data(),
                /*sorted_input=*/true);
    for (size_t i = 0; i < count; ++i) {
      if (!statuses[i].IsNotFound()) {
        database_->check(statuses[i], "reading");
        database_->show(slices[i], values[i], floats,
                        [&](const RowView& row) { visit(order[begin + i], row); });
      }
      values[i].Reset();
    }
  }
}

void SpillStore::erase(std::span<const uint64_t> ids) {
  if (ids.empty()) return;
  rocksdb::WriteBatch batch;
  for (const uint64_t id : ids) {
    const uint64_t key = big_endian(id);
    batch.Delete({reinterpret_cast<const char*>(&key), sizeof(key)});
  }
  database_->write(batch);
  database_->facts.rows -= static_cast<int64_t>(ids.size());
}

void SpillStore::for_each(const std::function<void(const RowView&)>& visit) const {
  rocksdb::ReadOptions options;
  options.fill_cache = false;
  options.total_order_seek = true;
  options.readahead_size = size_t{1} << 20;
  const std::unique_ptr<rocksdb::Iterator> all(database_->db->NewIterator(options));
  std::vector<float> floats;
  for (all->SeekToFirst(); all->Valid(); all->Next()) {
    if (all->key().size() == sizeof(uint64_t)) {
      database_->show(all->key(), all->value(), floats, visit);
    }
  }
  database_->check(all->status(), "reading");
}

void SpillStore::checkpoint(const std::string& copy) {
  Database& database = *database_;
  rocksdb::WriteBatch batch;
  batch.Put(kFacts, {reinterpret_cast<const char*>(&database.facts), sizeof(Facts)});
  database.write(batch);
  // Without a log of its own the store must flush what it has in memory: a checkpoint that finds no
  // log would leave that out.
  database.check(database.db->Flush({}), "flushing");
  rocksdb::Checkpoint* maker = nullptr;
  database.check(rocksdb::Checkpoint::Create(database.db.get(), &maker), "checkpoint");
  const std::unique_ptr<rocksdb::Checkpoint> owner(maker);
  database.check(maker->CreateCheckpoint(copy), ("checkpoint to " + copy).c_str());
}

void SpillStore::restore(const std::string& checkpoint, const std::string& folder) {
  if (!fs::is_directory(checkpoint)) {
    throw ConfigError("spill store: expected a checkpoint, found no folder " + checkpoint);
  }
  if (fs::exists(folder)) throw ConfigError("spill store " + folder + ": is there already");
  make_folder(folder);
  for (const auto& entry : fs::directory_iterator(checkpoint)) {
    const fs::path to = fs::path(folder) / entry.path().filename();
    std::error_code failed = std::make_error_code(std::errc::cross_device_link);
    // Files of rows never change; all others might.
    if (entry.path().extension() == ".sst") fs::create_hard_link(entry.path(), to, failed);
    if (failed) fs::copy_file(entry.path(), to, failed);
    TORCH_CHECK(!failed, "spill store ", folder, ": copying ", entry.path().string(), ": ",
                failed.message());
  }
}

}  // namespace cohort::ps
