#include "cohort/ps/server/saved_state.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cohort/base/atomic_file.h"
#include "cohort/base/error.h"
#include "cohort/base/system_error.h"
#include "cohort/ps/id_hash.h"
#include "cohort/ps/table/spill_store.h"
#include "cohort/ps/table/table_file.h"

namespace cohort::ps {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Records that only saved states have, beside those of the log.
constexpr auto kProgress = static_cast<RecordKind>(101);  // JSON: steps, trainers.
constexpr auto kBlock = static_cast<RecordKind>(102);     // BlockHeader, weights, state.

struct BlockHeader {
  uint32_t number = 0;
  uint32_t reserved = 0;
  uint64_t weights = 0;
  uint64_t state = 0;
};

// Where stored spilled rows are copied to be read, because opening a store writes to it: below the
// spill folder, or among temporary files where there is none. Removed with this object.
class CopyFolder {
 public:
  explicit CopyFolder(const std::string& spill_folder) {
    make_folder(spill_folder);
    std::string parent = spill_folder;
    if (parent.empty()) {
      parent = (fs::temp_directory_path() / "cohort-loading-XXXXXX").string();
      if (::mkdtemp(parent.data()) == nullptr)
        throw_without_stack(parent + ": cannot make this folder: " + system_reason(errno));
    }
    path_ = fs::path(parent) / "loading";
    removed_at_end_ = spill_folder.empty() ? fs::path(parent) : path_;
  }
  ~CopyFolder() {
    std::error_code ignored;
    fs::remove_all(removed_at_end_, ignored);
  }
  CopyFolder(const CopyFolder&) = delete;
  CopyFolder& operator=(const CopyFolder&) = delete;

  std::string path() const { return path_.string(); }

 private:
  fs::path path_;
  fs::path removed_at_end_;
};

// "server-0-of-2".
std::string part_name(int server, int servers) {
  return "server-" + std::to_string(server) + "-of-" + std::to_string(servers);
}

std::string save_name(uint64_t nonce) {
  std::array<char, 32> name{};
  std::snprintf(name.data(), name.size(), "save-%016" PRIx64, nonce);
  return name.data();
}

bool is_save_name(const std::string& name) {
  uint64_t nonce = 0;
  return std::sscanf(name.c_str(), "save-%" SCNx64, &nonce) == 1 && name == save_name(nonce);
}

std::string name_path(const std::string& folder) {
  return (fs::path(folder) / "checkpoint").string();
}

// The save that a checkpoint's folder names.
std::optional<std::string> named_save(const std::string& folder) {
  std::ifstream file(name_path(folder));
  std::string name;
  return std::getline(file, name) ? std::optional(name) : std::nullopt;
}

// The folders of a save's parts, in the order of servers.
std::vector<std::string> parts_of(const std::string& save) {
  int servers = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(save, error)) {
    const std::string name = entry.path().filename().string();
    int server = 0, of = 0;
    if (std::sscanf(name.c_str(), "server-%d-of-%d", &server, &of) == 2 &&
        name == part_name(server, of))
      servers = std::max(servers, of);
  }
  if (servers == 0) throw ConfigError(save + ": expected parts of a checkpoint, found none");
  std::vector<std::string> folders;
  for (int server = 0; server < servers; ++server) {
    folders.push_back((fs::path(save) / part_name(server, servers)).string());
    if (!fs::exists(folders.back()))
      throw ConfigError(save + ": the part of server " + std::to_string(server) +
                        " is missing: " + part_name(server, servers));
  }
  return folders;
}

std::string records_path(const std::string& folder) {
  return (fs::path(folder) / "state.records").string();
}

std::string table_path(const std::string& folder, size_t number) {
  return (fs::path(folder) / ("table." + std::to_string(number))).string();
}

fs::path saved_spill_path(const std::string& folder, size_t number) {
  return fs::path(folder) / ("cold." + std::to_string(number));
}

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

std::string text_of(const Record& record) {
  return {reinterpret_cast<const char*>(record.payload.data()), record.payload.size()};
}

// The step that a saved state of a sync job is after.
std::optional<uint64_t> sync_step_of(const std::string& folder) {
  std::optional<uint64_t> step;
  bool is_sync = false;
  const auto look = [&](const Record& record) {
    if (record.kind == RecordKind::kJob)
      is_sync = JobOptions::parse(text_of(record)).mode == Mode::kSync;
    if (record.kind == kProgress && is_sync) step = json::parse(text_of(record)).at("steps");
  };
  read_records(records_path(folder), look, 2);
  return step;
}

// Refuses a save whose parts are not all there, or not of one step.
void check_steps(const std::string& save) {
  const auto folders = parts_of(save);
  const auto first = sync_step_of(folders.front());
  for (const std::string& folder : folders) {
    const auto step = sync_step_of(folder);
    if (step != first)
      throw ConfigError(save + ": " + fs::path(folders.front()).filename().string() +
                        " is the state after step " + std::to_string(first.value_or(0)) + ", " +
                        fs::path(folder).filename().string() + " that after step " +
                        std::to_string(step.value_or(0)));
  }
}

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

}  // namespace

std::string part_folder(const std::string& folder, uint64_t nonce, int server, int servers) {
  return (fs::path(folder) / save_name(nonce) / part_name(server, servers)).string();
}

bool is_finished(const std::string& folder, uint64_t nonce) {
  return named_save(folder) == save_name(nonce);
}

uint64_t finished_save(const std::string& folder) {
  const auto name = named_save(folder);
  uint64_t nonce = 0;
  if (name && is_save_name(*name)) std::sscanf(name->c_str(), "save-%" SCNx64, &nonce);
  return nonce;
}

void finish_checkpoint(const std::string& folder, uint64_t nonce) {
  if (is_finished(folder, nonce)) return;
  const std::string name = save_name(nonce);
  check_steps((fs::path(folder) / name).string());
  write_atomically(name_path(folder), name + "\n");
  std::vector<fs::path> others;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string other = entry.path().filename().string();
    if (is_save_name(other) && other != name) others.push_back(entry.path());
  }
  for (const fs::path& other : others) {
    std::error_code error;
    fs::remove_all(other, error);
    if (error)
      throw ConfigError(other.string() +
                        ": the checkpoint is there, but the one before it cannot " +
                        "be removed: " + error.message());
  }
}

std::vector<std::string> saved_folders(const std::string& folder) {
  const auto name = named_save(folder);
  if (!name) throw ConfigError(folder + ": expected a checkpoint of servers, found none");
  if (!is_save_name(*name))
    throw ConfigError(name_path(folder) + ": expected the name of a save, save-<16 digits>");
  return parts_of((fs::path(folder) / *name).string());
}

JobOptions saved_job(const std::string& folder) {
  std::optional<JobOptions> job;
  read_records(records_path(folder), [&](const Record& record) {
    if (record.kind == RecordKind::kJob) job = JobOptions::parse(text_of(record));
  });
  if (!job) throw ConfigError(records_path(folder) + ": it has no job");
  return *job;
}

void ParameterState::begin_save(const std::string& folder) const {
  make_folder(folder);
  for (const auto& [number, block] : blocks_) {
    block->weights();
    block->state();
  }
  for (size_t number = 0; number < tables_.size(); ++number) {
    SpillStore* const store = tables_[number]->spill_store();
    if (store) store->checkpoint(saved_spill_path(folder, number).string());
  }
}

void ParameterState::save(const std::string& folder) const {
  make_folder(folder);
  std::vector<std::vector<std::byte>> payloads;
  std::vector<Record> records;
  const auto add = [&](RecordKind kind, std::vector<std::byte> payload) {
    payloads.push_back(std::move(payload));
    records.push_back({.number = records.size() + 1, .kind = kind});
  };
  if (job_) add(RecordKind::kJob, bytes_of(job_->to_json()));
  json progress{{"steps", steps_},
                {"steps_at_start", steps_at_start_},
                {"is_initialised", is_initialised_},
                {"trainers", json::array()}};
  for (const auto& [id, trainer] : trainers_) {
    progress["trainers"].push_back({{"trainer", id},
                                    {"incarnation", trainer.incarnation},
                                    {"last_sequence", trainer.last_sequence},
                                    {"clock", trainer.clock},
                                    {"is_member", trainer.is_member},
                                    {"nonce", trainer.nonce},
                                    {"joined_after", trainer.joined_after}});
  }
  add(kProgress, bytes_of(progress.dump()));
  for (const auto& [number, block] : blocks_) {
    const BlockHeader header{
        .number = number, .weights = block->weights().size(), .state = block->state().size()};
    std::vector<std::byte> payload;
    for (const auto part : {std::as_bytes(std::span(&header, 1)), std::as_bytes(block->weights()),
                            std::as_bytes(block->state())})
      payload.insert(payload.end(), part.begin(), part.end());
    add(kBlock, std::move(payload));
  }
  for (const auto& [step, pushes] : pending_) {
    for (const auto& [trainer, push] : pushes)
      add(RecordKind::kPush, {push->span().begin(), push->span().end()});
  }
  for (size_t i = 0; i < records.size(); ++i) records[i].payload = payloads[i];
  for (size_t number = 0; number < tables_.size(); ++number) {
    write_table_file(*tables_[number], table_path(folder, number));
  }
  write_records(records_path(folder), records);
}

void ParameterState::load(const std::string& folder) {
  const std::string path = records_path(folder);
  read_records(path, [&](const Record& record) {
    if (record.kind == RecordKind::kJob) {
      const auto stored = JobOptions::parse(text_of(record)).tables;
      for (size_t number = 0; number < stored.size(); ++number) {
        if (stored[number].at_cap != AtCap::kSpill) continue;
        make_folder(spill_folder_);
        SpillStore::restore(saved_spill_path(folder, number).string(), spill_path(number));
      }
      set_job(text_of(record));
    } else if (record.kind == kProgress) {
      const json progress = json::parse(text_of(record));
      steps_ = progress.at("steps");
      steps_at_start_ = progress.value("steps_at_start", uint64_t{0});
      is_initialised_ = progress.at("is_initialised");
      for (const json& trainer : progress.at("trainers")) {
        trainers_[trainer.at("trainer")] = {
            .incarnation = trainer.at("incarnation"),
            .last_sequence = trainer.at("last_sequence"),
            .clock = trainer.at("clock"),
            .is_member = trainer.at("is_member"),
            .nonce = trainer.at("nonce"),
            .joined_after = trainer.value("joined_after", uint64_t{0})};
      }
    } else if (record.kind == kBlock) {
      const StoredBlock stored = block_of(path, record);
      BlockStore& block = *blocks_.at(stored.number);
      block.set_weights(stored.weights);
      block.set_state(stored.state);
    } else {
      const Message message = parse_message(record.payload);
      Buffer copy(record.payload.size());
      std::memcpy(copy.data(), record.payload.data(), copy.size());
      pending_bytes_ += static_cast<int64_t>(copy.size());
      pending_[message.header.sequence].emplace(message.header.trainer,
                                                std::make_shared<const Buffer>(std::move(copy)));
    }
  });
  for (size_t number = 0; number < tables_.size(); ++number) {
    load_table_file(table_path(folder, number), *tables_[number], [](uint64_t) { return true; });
  }
}

// Whether part `i` of `n` can hold rows of server `j` of `m`: server_of cuts the range of hashes
// into equal pieces, in order.
bool rows_overlap(size_t i, size_t n, size_t j, size_t m) {
  return i * m < (j + 1) * n && j * n < (i + 1) * m;
}

void ParameterState::load_checkpoint(const std::string& checkpoint) {
  TORCH_CHECK_VALUE(job_ && steps_ == 0, "a checkpoint is loaded into a new job only");
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
    if (stored_job.dense_rule.rule != job_->dense_rule.rule)
      throw ConfigError(path + ": its dense rule is " + to_string(stored_job.dense_rule.rule) +
                        ", the job's " + to_string(job_->dense_rule.rule));
    read_records(path, [&](const Record& record) {
      if (record.kind == kProgress) {
        const uint64_t steps = json::parse(text_of(record)).at("steps");
        if (stored_job.mode == Mode::kSync && folder != folders.front() && steps != steps_)
          throw ConfigError(path + ": expected the state after step " + std::to_string(steps_) +
                            ", like the parts before it, found that after step " +
                            std::to_string(steps));
        steps_at_start_ = steps_ = std::max(steps_, steps);
      }
      if (record.kind != kBlock) return;
      const StoredBlock stored = block_of(path, record);
      const BlockOptions& from = stored_job.blocks.at(stored.number);
      for (auto& [number, part] : parts) {
        const BlockOptions& to = job_->blocks[number];
        if (to.parameter != from.parameter) continue;
        const int64_t begin = std::max(from.begin, to.begin);
        const int64_t count = std::min(from.end, to.end) - begin;
        if (count <= 0) continue;
        std::copy_n(stored.weights.begin() + (begin - from.begin), count,
                    part.weights.begin() + (begin - to.begin));
        copy_state(job_->dense_rule.rule, stored.state, from.end - from.begin, begin - from.begin,
                   part.state, to.end - to.begin, begin - to.begin, count);
        part.filled += count;
      }
    });
    if (rows_overlap(part_number, folders.size(), static_cast<size_t>(server_),
                     static_cast<size_t>(job_->servers)))
      load_tables(folder, stored_job);
  }
  for (const auto& [number, part] : parts) {
    const BlockOptions& options = job_->blocks[number];
    if (part.filled != options.end - options.begin)
      throw ConfigError(checkpoint + ": expected elements " + std::to_string(options.begin) +
                        " to " + std::to_string(options.end) + " of parameter '" +
                        options.parameter + "', they are not all there");
    blocks_.at(number)->set_weights(part.weights);
    blocks_.at(number)->set_state(part.state);
  }
  is_initialised_ = true;
}

void ParameterState::load_tables(const std::string& folder, const JobOptions& stored_job) {
  const auto servers = static_cast<uint32_t>(job_->servers);
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
    load_table_file(table_path(folder, stored), table, is_own);
    if (stored_job.tables[stored].at_cap != AtCap::kSpill) continue;
    const CopyFolder copy(spill_folder_);
    SpillStore::restore(saved_spill_path(folder, stored).string(), copy.path());
    const TableOptions& options = table.options();
    SpillStore(copy.path(), {.width = options.width,
                             .state_width = state_width(options.rule.rule, options.width)})
        .for_each([&](const RowView& row) {
          if (is_own(row.id)) table.insert(row);
        });
  }
}

}  // namespace cohort::ps
