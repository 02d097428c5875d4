// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/parameter_state.h"

#include <c10/util/Exception.h>
#include <cstring>
#include <nlohmann/json.hpp>

#include "cohort/base/atomic_file.h"
#include "cohort/ps/server/saved_state.h"

namespace cohort::ps {

namespace {

std::shared_ptr<const Buffer> copied(std::span<const std::byte> bytes) {
  Buffer copy(bytes.size());
  std::memcpy(copy.data(), bytes.data(), bytes.size());
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

}  // namespace

std::vector<uint32_t> ParameterState::missing_trainers() const {
  if (!job()) return {};
  return job()->mode == Mode::kSync ? members_.missing(steps_ + 1) : members_.slowest();
}

bool ParameterState::is_step_complete() const {
  return open_steps_.is_first(steps_ + 1) && members_.have_pushed(steps_ + 1);
}

void ParameterState::apply(const Record& record) {
  switch (record.kind) {
    case RecordKind::kJob:
      shard_.set_job(JobOptions::parse(text_of(record)));
      return note_job();
    case RecordKind::kInitial:
      shard_.set_initial(parse_message(record.payload, Checksums::kIgnored));
      is_initialised_ = true;
      return;
    case RecordKind::kJoin: {
      const auto join = payload_of<JoinRecord>(record);
      const bool is_sync = job() && job()->mode == Mode::kSync;
      return members_.join(join.trainer, join.incarnation, join.nonce, steps_, is_sync);
    }
    case RecordKind::kClose:
      TORCH_CHECK_VALUE(is_step_complete(), "record ", record.number, ": step ", steps_ + 1,
                        " is closed before all pushes of it have come");
      return close_step(record.time);
    case RecordKind::kPush:
      return accept_push(record);
    case RecordKind::kLeave:
      return members_.leave(payload_of<LeaveRecord>(record).trainer);
    case RecordKind::kEvict:
      return shard_.evict(record.time);
  }
  TORCH_CHECK_VALUE(false, "record ", record.number, ": unknown kind ",
                    static_cast<uint32_t>(record.kind));
}

void ParameterState::note_job() {
  members_.set_expected(job()->trainers);
  is_initialised_ = !shard_.has_blocks();
}

void ParameterState::accept_push(const Record& record) {
  const Message message = parse_message(record.payload, Checksums::kIgnored);
  const Header& header = message.header;
  members_.push(header.trainer, header.sequence);
  if (job()->mode == Mode::kAsync) {
    ++steps_;
    return shard_.push(message, schedule_step(), record.time);
  }
  // A record that was read lies in the log's memory.
  open_steps_.add(header.sequence, header.trainer,
                  record.message ? record.message : copied(record.payload));
}

int64_t ParameterState::schedule_step() const {
  if (job()->mode == Mode::kSync) return static_cast<int64_t>(steps_);
  // To a schedule, one push of each trainer together is a step of kSync.
  const auto trainers = static_cast<uint64_t>(job()->trainers);
  return static_cast<int64_t>((steps_ + trainers - 1) / trainers);
}

void ParameterState::close_step(uint32_t time) {
  ++steps_;
  const OpenSteps::Pushes pushes = open_steps_.take_first();
  std::vector<Message> messages;  // In the order of trainers: that of summation.
  for (const auto& [trainer, push] : pushes)
    messages.push_back(parse_message(push->span(), Checksums::kIgnored));
  shard_.push_sum(messages, schedule_step(), time);
}

Buffer ParameterState::pull(const Message& request, const BufferMaker& make) const {
  return shard_.pull(request,
                     {.kind = MessageKind::kReply,
                      .job = shard_.declared_job()->fingerprint(),
                      .trainer = request.header.trainer,
                      .step = steps_},
                     make);
}

void ParameterState::begin_save(const std::string& folder) const {
  make_folder(folder);
  shard_.begin_save(folder);
}

void ParameterState::save(const std::string& folder) const {
  make_folder(folder);
  const std::string job_text = job() ? job()->to_json() : "", progress_text = progress();
  const auto blocks = shard_.block_records();
  std::vector<Record> records;
  const auto add = [&](RecordKind kind, std::span<const std::byte> payload) {
    records.push_back({.number = records.size() + 1, .kind = kind, .payload = payload});
  };
  if (job()) add(RecordKind::kJob, std::as_bytes(std::span(job_text)));
  add(kProgress, std::as_bytes(std::span(progress_text)));
  for (const auto& block : blocks) add(kBlock, block);
  for (const auto& [step, pushes] : open_steps_.steps()) {
    for (const auto& [trainer, push] : pushes) add(RecordKind::kPush, push->span());
  }
  shard_.save_tables(folder);
  write_records(records_path(folder), records);
}

std::string ParameterState::progress() const {
  nlohmann::json progress{{"steps", steps_},
                          {"steps_at_start", steps_at_start_},
                          {"is_initialised", is_initialised_},
                          {"trainers", nlohmann::json::array()}};
  for (const auto& [id, trainer] : members_.trainers()) {
    progress["trainers"].push_back({{"trainer", id},
                                    {"incarnation", trainer.incarnation},
                                    {"last_sequence", trainer.last_sequence},
                                    {"clock", trainer.clock},
                                    {"is_member", trainer.is_member},
                                    {"nonce", trainer.nonce},
                                    {"joined_after", trainer.joined_after}});
  }
  return progress.dump();
}

void ParameterState::set_progress(const std::string& text) {
  const auto progress = nlohmann::json::parse(text);
  steps_ = progress.at("steps");
  steps_at_start_ = progress.value("steps_at_start", uint64_t{0});
  is_initialised_ = progress.at("is_initialised");
  for (const auto& trainer : progress.at("trainers")) {
    members_.restore(trainer.at("trainer"),
                     {.incarnation = trainer.at("incarnation"),
                      .last_sequence = trainer.at("last_sequence"),
                      .clock = trainer.at("clock"),
                      .is_member = trainer.at("is_member"),
                      .nonce = trainer.at("nonce"),
                      .joined_after = trainer.value("joined_after", uint64_t{0})});
  }
}

void ParameterState::load(const std::string& folder) {
  const std::string path = records_path(folder);
  read_records(path, [&](const Record& record) {
    if (record.kind == RecordKind::kJob) {
      shard_.load_job(folder, JobOptions::parse(text_of(record)));
      note_job();
    } else if (record.kind == kProgress) {
      set_progress(text_of(record));
    } else if (record.kind == kBlock) {
      shard_.load_block(path, record);
    } else {
      const Header header = parse_message(record.payload).header;
      open_steps_.add(header.sequence, header.trainer, copied(record.payload));
    }
  });
  shard_.load_tables(folder);
}

void ParameterState::load_checkpoint(const std::string& checkpoint) {
  TORCH_CHECK_VALUE(job() && steps_ == 0, "a checkpoint is loaded into a new job only");
  steps_at_start_ = steps_ = shard_.load_checkpoint(checkpoint);
  is_initialised_ = true;
}

}  // namespace cohort::ps
