#include "cohort/ps/server/parameter_state.h"

#include <algorithm>
#include <c10/util/Exception.h>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>

#include "cohort/base/atomic_file.h"
#include "cohort/ps/id_hash.h"
#include "cohort/ps/row_merger.h"
#include "cohort/ps/table/spill_store.h"

namespace cohort::ps {

namespace {

constexpr int64_t kMaxReplyBytes = std::numeric_limits<int32_t>::max();  // What gRPC carries.

// What a record's payload lies in; a record that was read lies in the log's memory: copied.
std::shared_ptr<const Buffer> message_of(const Record& record) {
  if (record.message) return record.message;
  Buffer copy(record.payload.size());
  std::memcpy(copy.data(), record.payload.data(), copy.size());
  return std::make_shared<const Buffer>(std::move(copy));
}

template <class Payload>
Payload payload_of(const Record& record) {
  TORCH_CHECK_VALUE(record.payload.size() == sizeof(Payload), "record ", record.number,
                    ": expected ", sizeof(Payload), " bytes, got ", record.payload.size());
  Payload payload;
  std::memcpy(&payload, record.payload.data(), sizeof(payload));
  return payload;
}

uint64_t elements_of(const BlockOptions& block) {
  return static_cast<uint64_t>(block.end - block.begin);
}

// What RocksDB may hold for a table that spills, beside the table's cap. Less than half of the cap
// costs a third of the pushes; less than 8 MiB writes many small files.
int64_t spill_memory(const TableOptions& table) {
  return std::clamp(table.memory_cap_bytes / 2, int64_t{8} << 20, int64_t{256} << 20);
}

}  // namespace

ParameterState::ParameterState(int server, std::string spill_folder, BlockMaker make_block)
    : server_(server), spill_folder_(std::move(spill_folder)), make_block_(std::move(make_block)) {}

ParameterState::~ParameterState() = default;
ParameterState::ParameterState(ParameterState&&) noexcept = default;
ParameterState& ParameterState::operator=(ParameterState&&) noexcept = default;

const TrainerState* ParameterState::trainer(uint32_t id) const {
  const auto found = trainers_.find(id);
  return found == trainers_.end() ? nullptr : &found->second;
}

std::vector<uint32_t> ParameterState::missing_trainers() const {
  std::vector<uint32_t> missing;
  if (!job_) return missing;
  for (uint32_t id = 0; id < static_cast<uint32_t>(job_->trainers); ++id) {
    if (!trainer(id)) missing.push_back(id);
  }
  const bool is_sync = job_->mode == Mode::kSync;
  const uint64_t slowest = slowest_clock();
  for (const auto& [id, state] : trainers_) {
    const bool is_late = is_sync ? state.last_sequence <= steps_ : state.clock == slowest;
    if (state.is_member && is_late) missing.push_back(id);
  }
  return missing;
}

bool ParameterState::all_joined() const {
  for (uint32_t id = 0; id < static_cast<uint32_t>(job_->trainers); ++id) {
    if (!trainer(id)) return false;
  }
  return true;
}

uint64_t ParameterState::slowest_clock() const {
  if (!all_joined()) return 0;
  std::optional<uint64_t> slowest;
  for (const auto& [id, state] : trainers_) {
    if (state.is_member) slowest = std::min(slowest.value_or(state.clock), state.clock);
  }
  return slowest.value_or(0);
}

uint64_t ParameterState::lead_of(uint32_t id) const {
  const TrainerState* state = trainer(id);
  return state && state->is_member ? state->clock - slowest_clock() : 0;
}

std::vector<TableStatistics> ParameterState::table_statistics() const {
  std::vector<TableStatistics> statistics;
  for (const auto& table : tables_) statistics.push_back(table->statistics());
  return statistics;
}

void ParameterState::check(const Message& message) const {
  TORCH_CHECK_VALUE(job_.has_value(), "message: this server has no job yet");
  const bool push = message.header.kind == MessageKind::kPush;
  const bool initial = push && (message.header.flags & kInitialValues);
  TORCH_CHECK_VALUE(!initial || message.sections.size() == blocks_.size(),
                    "message: initial values of ", message.sections.size(), " blocks, server ",
                    server_, " has ", blocks_.size());
  const Section* before = nullptr;
  for (const Section& section : message.sections) {
    TORCH_CHECK_VALUE(!initial || section.kind == SectionKind::kBlock,
                      "message: initial values are of blocks, got those of rows");
    TORCH_CHECK_VALUE(!before || before->kind < section.kind ||
                          (before->kind == section.kind && before->table < section.table),
                      "message: expected its sections in the order of tables, each once");
    before = &section;
    if (section.kind == SectionKind::kBlock) {
      TORCH_CHECK_VALUE(blocks_.contains(section.table), "message: server ", server_,
                        " has no block ", section.table);
      TORCH_CHECK_VALUE(section.width == 1, "message: block ", section.table, " has width 1, got ",
                        section.width);
      const uint64_t elements = elements_of(job_->blocks[section.table]);
      TORCH_CHECK_VALUE(!push || section.values.size() == elements, "message: block ",
                        section.table, " has ", elements, " elements, got ", section.values.size());
      continue;
    }
    TORCH_CHECK_VALUE(section.table < tables_.size(), "message: the job has ", tables_.size(),
                      " tables, got number ", section.table);
    const TableOptions& table = tables_[section.table]->options();
    TORCH_CHECK_VALUE(section.width == table.width, "message: rows of table '", table.name,
                      "' have ", table.width, " values, got ", section.width);
    TORCH_CHECK_VALUE(!push || section.values.size() == section.ids.size() * section.width,
                      "message: table '", table.name, "': ", section.ids.size(), " ids with ",
                      section.values.size(), " values");
    const auto servers = static_cast<uint32_t>(job_->servers);
    for (const uint64_t id : section.ids) {
      TORCH_CHECK_VALUE(server_of(id, servers) == static_cast<uint32_t>(server_), "message: row ",
                        id, " of table '", table.name, "' is server ", server_of(id, servers),
                        "'s, this is server ", server_);
    }
  }
}

void ParameterState::check_job(const JobOptions& job) const {
  const std::string folder = spill_folder_.empty() ? "" : spill_folder_ + ".trial";
  if (!folder.empty())
    std::filesystem::remove_all(folder);  // Left by a server that was killed here.
  {
    ParameterState trial(server_, folder, make_block_);
    trial.set_job(job.to_json());
  }
  if (!folder.empty()) std::filesystem::remove_all(folder);
}

void ParameterState::apply(const Record& record) {
  switch (record.kind) {
    case RecordKind::kJob:
      set_job(
          std::string(reinterpret_cast<const char*>(record.payload.data()), record.payload.size()));
      return;
    case RecordKind::kInitial:
      set_initial(parse_message(record.payload, Checksums::kIgnored));
      return;
    case RecordKind::kJoin:
      join(payload_of<JoinRecord>(record));
      return;
    case RecordKind::kClose:
      TORCH_CHECK_VALUE(is_step_complete(), "record ", record.number, ": step ", steps_ + 1,
                        " is closed before all pushes of it have come");
      close_step(record.time);
      return;
    case RecordKind::kPush:
      accept_push(record);
      return;
    case RecordKind::kLeave:
      trainers_.at(payload_of<LeaveRecord>(record).trainer).is_member = false;
      return;
    case RecordKind::kEvict:
      for (auto& table : tables_) table->evict(record.time);
      return;
  }
  TORCH_CHECK_VALUE(false, "record ", record.number, ": unknown kind ",
                    static_cast<uint32_t>(record.kind));
}

void ParameterState::set_job(const std::string& json) {
  job_ = JobOptions::parse(json);
  fingerprint_ = job_->fingerprint();
  for (uint32_t number = 0; number < job_->blocks.size(); ++number) {
    const BlockOptions& options = job_->blocks[number];
    if (options.server != server_) continue;
    blocks_[number] = make_block_(job_->dense_rule, options.end - options.begin);
  }
  for (const TableOptions& table : job_->tables) {
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
    tables_.push_back(std::make_unique<RowTable>(table, std::move(store)));
  }
  is_initialised_ = blocks_.empty();
}

std::string ParameterState::spill_path(size_t table) const {
  return (std::filesystem::path(spill_folder_) / std::to_string(table)).string();
}

void ParameterState::set_initial(const Message& message) {
  for (const Section& section : message.sections) {
    blocks_.at(section.table)->set_weights(section.values);
  }
  is_initialised_ = true;
}

void ParameterState::join(const JoinRecord& record) {
  const uint64_t slowest = job_ ? slowest_clock() : 0;
  const auto [found, is_new] = trainers_.try_emplace(record.trainer);
  TrainerState& trainer = found->second;
  trainer.incarnation = record.incarnation;
  trainer.nonce = record.nonce;
  if (is_new || !trainer.is_member) {
    trainer.is_member = true;
    trainer.joined_after = steps_;
    trainer.clock = slowest;
    // Closed steps are not its own.
    if (job_ && job_->mode == Mode::kSync)
      trainer.last_sequence = std::max(trainer.last_sequence, steps_);
  }
}

void ParameterState::accept_push(const Record& record) {
  const Message message = parse_message(record.payload, Checksums::kIgnored);
  TrainerState& trainer = trainers_.at(message.header.trainer);
  trainer.last_sequence = message.header.sequence;
  ++trainer.clock;
  if (job_->mode == Mode::kAsync) {
    ++steps_;
    const int64_t step = schedule_step();
    for (const Section& section : message.sections) {
      if (section.kind == SectionKind::kBlock) {
        blocks_.at(section.table)->update(step, section.values);
      } else {
        tables_[section.table]->push(section.ids, section.values, step, record.time);
      }
    }
    return;
  }
  pending_[message.header.sequence].emplace(message.header.trainer, message_of(record));
  pending_bytes_ += static_cast<int64_t>(record.payload.size());
}

int64_t ParameterState::schedule_step() const {
  if (job_->mode == Mode::kSync) return static_cast<int64_t>(steps_);
  // To a schedule, one push of each trainer together is a step of kSync.
  const auto trainers = static_cast<uint64_t>(job_->trainers);
  return static_cast<int64_t>((steps_ + trainers - 1) / trainers);
}

bool ParameterState::is_step_complete() const {
  const uint64_t step = steps_ + 1;
  // A step needs the job's number of trainers: all must have joined.
  return !pending_.empty() && pending_.begin()->first == step && all_joined() &&
         std::all_of(trainers_.begin(), trainers_.end(), [step](const auto& entry) {
           return !entry.second.is_member || entry.second.last_sequence >= step;
         });
}

void ParameterState::close_step(uint32_t time) {
  ++steps_;
  const auto open = pending_.extract(pending_.begin());
  apply_step(open.mapped(), time);
  for (const auto& [trainer, push] : open.mapped()) {
    pending_bytes_ -= static_cast<int64_t>(push->size());
  }
}

void ParameterState::apply_step(const Pushes& pushes, uint32_t time) {
  // std::map is sorted by trainer: the order of summation.
  std::vector<Message> messages;
  for (const auto& [trainer, push] : pushes) {
    messages.push_back(parse_message(push->span(), Checksums::kIgnored));
  }
  const int64_t step = schedule_step();
  // A push without sections abstains: its trainer joined when the step was open here, but closed on
  // another server.
  const auto pushed = std::count_if(messages.begin(), messages.end(),
                                    [](const Message& push) { return !push.sections.empty(); });
  const auto divisor = job_->reduce == Reduce::kMean ? static_cast<float>(pushed) : 1.0f;
  std::map<std::pair<SectionKind, uint32_t>, std::vector<const Section*>> parts;
  for (const Message& message : messages) {
    for (const Section& section : message.sections) {
      parts[{section.kind, section.table}].push_back(&section);
    }
  }
  for (const auto& [part, sections] : parts) {
    if (part.first == SectionKind::kBlock) {
      const auto& first = sections.front()->values;
      sum_.assign(first.begin(), first.end());
      for (size_t i = 1; i < sections.size(); ++i) {
        const float* values = sections[i]->values.data();
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
    for (const Section* section : sections) merged_rows_.add(section->ids, section->values);
    if (divisor != 1) merged_rows_.divide(divisor);
    table.push(merged_rows_.ids(), merged_rows_.gradients(), step, time);
  }
}

// What the sections of the answer to a pull look like.
std::vector<SectionShape> ParameterState::shapes_of_answer(const Message& request) const {
  std::vector<SectionShape> shapes;
  for (const Section& section : request.sections) {
    const bool is_block = section.kind == SectionKind::kBlock;
    shapes.push_back(
        {.kind = section.kind,
         .table = section.table,
         .width = section.width,
         .count = is_block ? elements_of(job_->blocks[section.table]) : section.ids.size(),
         .has_ids = false});
  }
  return shapes;
}

int64_t ParameterState::bytes_of_pull(const Message& request) const {
  int64_t bytes = 0;
  for (const SectionShape& shape : shapes_of_answer(request))
    bytes += static_cast<int64_t>(shape.count * shape.width * sizeof(float));
  return bytes;
}

Buffer ParameterState::pull(const Message& request) const {
  check(request);
  const std::vector<SectionShape> shapes = shapes_of_answer(request);
  const int64_t bytes = bytes_of_pull(request);
  TORCH_CHECK_VALUE(bytes <= kMaxReplyBytes, "pull: its answer would have ", bytes,
                    " bytes, a message has ", kMaxReplyBytes,
                    " at most: ask for fewer rows at once");
  const auto unknown = (request.header.flags & kPrediction) ? RowTable::Unknown::kZeros
                                                            : RowTable::Unknown::kInitial;
  MessageWriter reply(shapes);
  for (size_t i = 0; i < shapes.size(); ++i) {
    const Section& section = request.sections[i];
    if (section.kind == SectionKind::kBlock) {
      const auto weights = blocks_.at(section.table)->weights();
      std::copy(weights.begin(), weights.end(), reply.values(i).begin());
    } else {
      tables_[section.table]->pull(section.ids, reply.values(i), unknown);
    }
  }
  return reply.finish({.kind = MessageKind::kReply,
                       .job = fingerprint_,
                       .trainer = request.header.trainer,
                       .step = steps_});
}

std::vector<ParameterState::BlockView> ParameterState::blocks() const {
  std::vector<BlockView> views;
  for (const auto& [number, block] : blocks_) {
    views.push_back({&job_->blocks[number], block->weights(), block->state()});
  }
  return views;
}

}  // namespace cohort::ps
