// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/shard.h"

#include <algorithm>
#include <c10/util/Exception.h>
#include <cstring>
#include <filesystem>

#include "cohort/base/atomic_file.h"
#include "cohort/base/error.h"
#include "cohort/ps/id_hash.h"
#include "cohort/ps/server/saved_state.h"
#include "cohort/ps/table/spill_store.h"
#include "cohort/ps/table/table_file.h"
#include "cohort/ps/table/table_threads.h"
#include "cohort/ps/wire/bfloat16.h"
#include "cohort/ps/work_folder.h"

namespace cohort::ps {

namespace {

namespace fs = std::filesystem;

// What RocksDB may hold for a table that spills, beside the table's cap. Less than half of the cap
// costs a third of the pushes; less than 8 MiB writes many small files.
int64_t spill_memory(const TableOptions& table) {
  return std::clamp(table.memory_cap_bytes / 2, int64_t{8} << 20, int64_t{256} << 20);
}

struct BlockHeader {
  uint32_t number = 0;
  uint32_t reserved = 0;
  uint64_t weights = 0;
  uint64_t state = 0;
};

// A block as it lies in a record.
struct StoredBlock {
  uint32_t number = 0;
  std::span<const float> weights;
  std::span<const float> state;
};

StoredBlock block_of(const std::string& path, const Record& record) {
  BlockHeader header;
  if (record.payload.size() < sizeof(header)) throw ConfigError(path + ": a block is cut off");
  std::memcpy(&header, record.payload.data(), sizeof(header));
  const size_t floats = (record.payload.size() - sizeof(header)) / sizeof(float);
  if (header.weights > floats || header.state != floats - header.weights)
    throw ConfigError(path + ": block " + std::to_string(header.number) + " is cut off");
  const auto* values = reinterpret_cast<const float*>(record.payload.data() + sizeof(BlockHeader));
  return {header.number, {values, header.weights}, {values + header.weights, header.state}};
}

// How many elements each parameter has. Blocks are of all servers.
std::map<std::string, int64_t> parameter_sizes(const JobOptions& job) {
  std::map<std::string, int64_t> sizes;
  for (const BlockOptions& block : job.blocks) {
    int64_t& size = sizes[block.parameter];
    size = std::max(size, block.end);
  }
  return sizes;
}

void check_same_parameters(const std::string& path, const JobOptions& stored,
                           const JobOptions& job) {
  const auto before = parameter_sizes(stored);
  for (const auto& [name, size] : parameter_sizes(job)) {
    const auto found = before.find(name);
    if (found != before.end() && found->second != size)
      throw ConfigError(path + ": parameter '" + name + "': expected " + std::to_string(size) +
                        " elements as in the job, found " + std::to_string(found->second));
  }
}

// State of elements [begin, end) of a block out of that of a block with `width` elements: rules
// keep some floats for the whole block first, then so many for each element, one kind after the
// other.
void copy_state(Rule rule, std::span<const float> from, int64_t width, int64_t begin,
                std::span<float> to, int64_t to_width, int64_t to_begin, int64_t count) {
  const int64_t whole = state_width(rule, 0);
  std::copy_n(from.begin(), whole, to.begin());
  const int64_t kinds = state_width(rule, 1) - whole;
  // Row-wise rules have state for the whole alone.
  if (state_width(rule, 2) == state_width(rule, 1)) {
    std::copy(from.begin(), from.end(), to.begin());
    return;
  }
  for (int64_t kind = 0; kind < kinds; ++kind) {
    std::copy_n(from.begin() + whole + kind * width + begin, count,
                to.begin() + whole + kind * to_width + to_begin);
  }
}

// Whether part `i` of `n` can hold rows of server `j` of `m`: server_of cuts the range of hashes
// into equal pieces, in order.
bool rows_overlap(size_t i, size_t n, size_t j, size_t m) {
  return i * m < (j + 1) * n && j * n < (i + 1) * m;
}

}  // namespace

Shard::Shard(int server, std::string spill_folder, BlockMaker make_block, int table_threads)
    : server_(server),
      spill_folder_(std::move(spill_folder)),
      make_block_(std::move(make_block)),
      threads_(std::make_shared<TableThreads>(table_threads)) {}

Shard::~Shard() = default;
Shard::Shard(Shard&&) noexcept = default;
Shard& Shard::operator=(Shard&&) noexcept = default;

std::vector<TableStatistics> Shard::table_statistics() const {
  std::vector<TableStatistics> statistics;
  for (const auto& table : tables_) statistics.push_back(table->statistics());
  return statistics;
}

void Shard::set_job(JobOptions options) {
  job_ = std::make_shared<const DeclaredJob>(std::move(options), server_);
  for (uint32_t number = 0; number < job()->blocks.size(); ++number) {
    const BlockOptions& block = job()->blocks[number];
    if (block.server != server_) continue;
    blocks_[number] = make_block_(job()->dense_rule, block.end - block.begin);
  }
  for (const TableOptions& table : job()->tables) {
    std::unique_ptr<SpillStore> store;
    if (table.at_cap == AtCap::kSpill) {
      TORCH_CHECK_VALUE(!spill_folder_.empty(), "table '", table.name,
                        "': it spills to disk, and this server has no folder");
      make_folder(spill_folder_);
      store = std::make_unique<SpillStore>(
          spill_path(tables_.size()),
          SpillStore::Options{.width = table.width,
                              .state_width = state_width(table.rule.rule, table.width),
                              .memory_bytes = spill_memory(table)});
    }
    tables_.push_back(std::make_unique<RowTable>(table, std::move(store), threads_));
  }
}

void Shard::check_job(const JobOptions& job) const {
  const std::string folder = spill_folder_.empty() ? "" : spill_folder_ + ".trial";
  if (!folder.empty()) fs::remove_all(folder);  // Left by a server that was killed here.
  {
    Shard trial(server_, folder, make_block_);
    trial.set_job(job);
  }
  if (!folder.empty()) fs::remove_all(folder);
}

std::string Shard::spill_path(size_t table) const {
  return (fs::path(spill_folder_) / std::to_string(table)).string();
}

void Shard::set_initial(const Message& message) {
  for (const Section& section : message.sections) {
    blocks_.at(section.table)->set_weights(section.values);
  }
}

void Shard::push(const Message& message, int64_t step, uint32_t time) {
  for (const Section& section : message.sections) {
    if (section.kind == SectionKind::kBlock) {
      blocks_.at(section.table)->update(step, floats_of(section, widened_));
    } else {
      tables_[section.table]->push(section.ids, floats_of(section, widened_), step, time);
    }
  }
}

void Shard::push_sum(std::span<const Message> messages, int64_t step, uint32_t time) {
  // A push without sections abstains: its trainer joined when the step was open here, but closed on
  // another server.
  const auto pushed =
      std::ranges::count_if(messages, [](const Message& push) { return !push.sections.empty(); });
  const auto divisor = job()->reduce == Reduce::kMean ? static_cast<float>(pushed) : 1.0f;
  std::map<std::pair<SectionKind, uint32_t>, std::vector<const Section*>> parts;
  for (const Message& message : messages) {
    for (const Section& section : message.sections) {
      parts[{section.kind, section.table}].push_back(&section);
    }
  }
  for (const auto& [part, sections] : parts) {
    if (part.first == SectionKind::kBlock) {
      const auto first = floats_of(*sections.front(), widened_);
      sum_.assign(first.begin(), first.end());
      for (size_t i = 1; i < sections.size(); ++i) {
        const float* values = floats_of(*sections[i], widened_).data();
        for (size_t j = 0; j < sum_.size(); ++j) sum_[j] += values[j];
      }
      if (divisor != 1) {
        for (float& value : sum_) value /= divisor;
      }
      blocks_.at(part.second)->update(step, sum_);
      continue;
    }
    RowTable& table = *tables_[part.second];
    size_t most = 0;
    for (const Section* section : sections) most += section->ids.size();
    merged_rows_.begin(table.options().width, most);
    for (const Section* section : sections)
      merged_rows_.add(section->ids, floats_of(*section, widened_));
    if (divisor != 1) merged_rows_.divide(divisor);
    table.push(merged_rows_.ids(), merged_rows_.gradients(), step, time);
  }
}

void Shard::evict(uint32_t time) {
  for (auto& table : tables_) table->evict(time);
}

Buffer Shard::pull(const Message& request, const Header& header, const BufferMaker& make) const {
  const std::vector<SectionShape> shapes = job_->answer_to(request);
  const auto unknown = (request.header.flags & kPrediction) ? RowTable::Unknown::kZeros
                                                            : RowTable::Unknown::kInitial;
  MessageWriter reply(shapes, make);
  for (size_t i = 0; i < shapes.size(); ++i) {
    const Section& section = request.sections[i];
    if (section.kind == SectionKind::kBlock) {
      const auto weights = blocks_.at(section.table)->weights();
      if (shapes[i].dtype == WireDtype::kBfloat16) {
        round_to_bfloat16(weights, reply.bfloat16s(i));
      } else {
        std::copy(weights.begin(), weights.end(), reply.values(i).begin());
      }
    } else if (shapes[i].dtype == WireDtype::kBfloat16) {
      tables_[section.table]->pull(section.ids, reply.bfloat16s(i), unknown);
    } else {
      tables_[section.table]->pull(section.ids, reply.values(i), unknown);
    }
  }
  return reply.finish_reply(header);
}

std::vector<BlockView> Shard::blocks() const {
  std::vector<BlockView> views;
  for (const auto& [number, block] : blocks_) {
    views.push_back({&job()->blocks[number], block->weights(), block->state()});
  }
  return views;
}

void Shard::begin_save(const std::string& folder) const {
  for (const auto& [number, block] : blocks_) {
    block->weights();
    block->state();
  }
  for (size_t number = 0; number < tables_.size(); ++number) {
    SpillStore* const store = tables_[number]->spill_store();
    if (store) store->checkpoint(saved_spill_path(folder, number));
  }
}

std::vector<std::vector<std::byte>> Shard::block_records() const {
  std::vector<std::vector<std::byte>> payloads;
  for (const auto& [number, block] : blocks_) {
    const BlockHeader header{
        .number = number, .weights = block->weights().size(), .state = block->state().size()};
    auto& payload = payloads.emplace_back();
    for (const auto part : {std::as_bytes(std::span(&header, 1)), std::as_bytes(block->weights()),
                            std::as_bytes(block->state())})
      payload.insert(payload.end(), part.begin(), part.end());
  }
  return payloads;
}

void Shard::save_tables(const std::string& folder) const {
  for (size_t number = 0; number < tables_.size(); ++number)
    write_table_file(*tables_[number], saved_table_path(folder, number));
}

void Shard::load_job(const std::string& folder, JobOptions job) {
  for (size_t number = 0; number < job.tables.size(); ++number) {
    if (job.tables[number].at_cap != AtCap::kSpill) continue;
    make_folder(spill_folder_);
    SpillStore::restore(saved_spill_path(folder, number), spill_path(number));
  }
  set_job(std::move(job));
}

void Shard::load_block(const std::string& path, const Record& record) {
  const StoredBlock stored = block_of(path, record);
  BlockStore& block = *blocks_.at(stored.number);
  block.set_weights(stored.weights);
  block.set_state(stored.state);
}

void Shard::load_tables(const std::string& folder) {
  for (size_t number = 0; number < tables_.size(); ++number) {
    load_table_file(saved_table_path(folder, number), *tables_[number],
                    [](uint64_t) { return true; });
  }
}

uint64_t Shard::load_checkpoint(const std::string& checkpoint) {
  uint64_t steps = 0;
  // Blocks as they are put together from those of other cuts.
  struct Parts {
    std::vector<float> weights, state;
    int64_t filled = 0;  // Elements.
  };
  std::map<uint32_t, Parts> parts;
  for (const auto& [number, block] : blocks_) {
    const auto weights = block->weights(), state = block->state();
    parts[number] = {{weights.begin(), weights.end()}, {state.begin(), state.end()}};
  }
  const auto folders = saved_folders(checkpoint);
  for (size_t part_number = 0; part_number < folders.size(); ++part_number) {
    const std::string& folder = folders[part_number];
    const std::string path = records_path(folder);
    const JobOptions stored_job = saved_job(folder);
    if (stored_job.dense_rule.rule != job()->dense_rule.rule)
      throw ConfigError(path + ": its dense rule is " + to_string(stored_job.dense_rule.rule) +
                        ", the job's " + to_string(job()->dense_rule.rule));
    check_same_parameters(path, stored_job, *job());
    read_records(path, [&](const Record& record) {
      if (record.kind == kProgress) {
        const uint64_t its = steps_of(record);
        if (stored_job.mode == Mode::kSync && folder != folders.front() && its != steps)
          throw ConfigError(path + ": expected the state after step " + std::to_string(steps) +
                            ", like the parts before it, found that after step " +
                            std::to_string(its));
        steps = std::max(steps, its);
      }
      if (record.kind != kBlock) return;
      const StoredBlock stored = block_of(path, record);
      const BlockOptions& from = stored_job.blocks.at(stored.number);
      for (auto& [number, part] : parts) {
        const BlockOptions& to = job()->blocks[number];
        if (to.parameter != from.parameter) continue;
        const int64_t begin = std::max(from.begin, to.begin);
        const int64_t count = std::min(from.end, to.end) - begin;
        if (count <= 0) continue;
        std::copy_n(stored.weights.begin() + (begin - from.begin), count,
                    part.weights.begin() + (begin - to.begin));
        copy_state(job()->dense_rule.rule, stored.state, from.end - from.begin, begin - from.begin,
                   part.state, to.end - to.begin, begin - to.begin, count);
        part.filled += count;
      }
    });
    if (rows_overlap(part_number, folders.size(), static_cast<size_t>(server_),
                     static_cast<size_t>(job()->servers)))
      load_own_rows(folder, stored_job);
  }
  for (const auto& [number, part] : parts) {
    const BlockOptions& options = job()->blocks[number];
    if (part.filled != options.end - options.begin)
      throw ConfigError(checkpoint + ": expected elements " + std::to_string(options.begin) +
                        " to " + std::to_string(options.end) + " of parameter '" +
                        options.parameter + "', they are not all there");
    blocks_.at(number)->set_weights(part.weights);
    blocks_.at(number)->set_state(part.state);
  }
  return steps;
}

void Shard::load_own_rows(const std::string& folder, const JobOptions& stored_job) {
  const auto servers = static_cast<uint32_t>(job()->servers);
  const auto is_own = [&](uint64_t id) {
    return server_of(id, servers) == static_cast<uint32_t>(server_);
  };
  for (size_t stored = 0; stored < stored_job.tables.size(); ++stored) {
    const std::string& name = stored_job.tables[stored].name;
    const auto found = std::find_if(tables_.begin(), tables_.end(), [&](const auto& table) {
      return table->options().name == name;
    });
    if (found == tables_.end()) throw ConfigError(folder + ": the job has no table '" + name + "'");
    RowTable& table = **found;
    load_table_file(saved_table_path(folder, stored), table, is_own);
    if (stored_job.tables[stored].at_cap != AtCap::kSpill) continue;
    // Copied to be read: opening a store writes to it.
    const WorkFolder scratch(spill_folder_.empty() ? fs::temp_directory_path().string()
                                                   : spill_folder_);
    const std::string copy = scratch.path() + "/rows";
    SpillStore::restore(saved_spill_path(folder, stored), copy);
    const TableOptions& options = table.options();
    SpillStore(copy, {.width = options.width,
                      .state_width = state_width(options.rule.rule, options.width)})
        .for_each([&](const RowView& row) {
          if (is_own(row.id)) table.insert(row);
        });
  }
}

}  // namespace cohort::ps
