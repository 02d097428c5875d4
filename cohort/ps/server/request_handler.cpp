// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/request_handler.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/ps/server/kill_point.h"
#include "cohort/ps/server/saved_state.h"

namespace cohort::ps {

namespace {

using std::chrono::milliseconds;

// A request waits here for at most this time; then the reply says for what, and the trainer
// retries. So both sides notice a lost peer.
constexpr milliseconds kLongPollTimeout{1000};

// Ticks come ten times a second.
constexpr milliseconds kStallThreshold{1000};
constexpr std::chrono::seconds kWriteFailurePeriod{10};

template <class Payload>
std::span<const std::byte> bytes_of(const Payload& payload) {
  return std::as_bytes(std::span(&payload, 1));
}

int64_t bytes_of_message(const Pending& pending) {
  return pending.request.message ? static_cast<int64_t>(pending.request.message->size()) : 0;
}

int64_t rows_in(const Message& message) {
  int64_t rows = 0;
  for (const Section& section : message.sections) rows += static_cast<int64_t>(section.ids.size());
  return rows;
}

std::string seconds_text(std::chrono::steady_clock::duration time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(time).count()) + " s";
}

// What a request is told that failed with `error`; `of_system`: unless its sender is to blame.
Code code_of(const std::exception& error, Code of_system) {
  return dynamic_cast<const c10::ValueError*>(&error) ? Code::kInvalid : of_system;
}

}  // namespace

RequestHandler::RequestHandler(const ServerOptions& options, const Log& log,
                               std::function<void()> wake)
    : options_(options),
      log_(log),
      durable_(options, log, std::move(wake)),
      arrival_check_(options) {
  arrival_check_.set_job(durable_.state().shard().declared_job());
  last_eviction_ = last_tick_ = activity_.started;
  // Members have trainer_timeout to come back.
  for (const auto& [id, trainer] : durable_.state().members().trainers()) {
    if (trainer.is_member) last_message_[id] = activity_.started;
  }
}

RequestHandler::~RequestHandler() {
  close();
}

void RequestHandler::close() {
  for (auto& [step, pending] : waiting_)
    pending.done(reply(Code::kLost, "the server is shutting down"));
  for (auto& [place, pending] : out_of_order_)
    pending.done(reply(Code::kLost, "the server is shutting down"));
  for (Acknowledgement& answer : acknowledgements_)
    answer.done(reply(Code::kLost, "the server is shutting down"));
  waiting_.clear();
  out_of_order_.clear();
  acknowledgements_.clear();
}

Reply RequestHandler::reply(Code code, std::string text) const {
  const ParameterState& state = durable_.state();
  return {.code = code,
          .text = std::move(text),
          .server_incarnation = durable_.incarnation(),
          .steps = state.steps(),
          .is_initialised = state.is_initialised(),
          .server = options_.server};
}

void RequestHandler::handle(Pending pending) {
  const Request& request = pending.request;
  const auto heard = last_message_.find(request.trainer);
  if (heard != last_message_.end() && !membership_error(request.trainer, request.incarnation))
    heard->second = pending.arrived;
  activity_.counts.bytes_in += bytes_of_message(pending);
  const bool is_push = request.call == Call::kPush;
  const uint32_t trainer = request.trainer;
  answer(pending);
  if (is_push && !out_of_order_.empty()) process_out_of_order(trainer);
}

void RequestHandler::answer(Pending& pending) {
  const Call call = pending.request.call;
  // A failed job may be rolled back to a checkpoint.
  const bool is_rollback = call == Call::kRestore || (call == Call::kJob && !initial_load_failed_);
  if (!failure_.empty() && call != Call::kStatus && call != Call::kStop && !is_rollback)
    return pending.done(reply(Code::kFailed, failure_));
  if (auto refused = refusal(pending)) {
    ++activity_.counts.refused;
    return pending.done(std::move(*refused));
  }
  try {
    switch (call) {
      case Call::kPush:
        return push(pending);
      case Call::kPull:
        return pull(pending);
      case Call::kJob:
        return set_job(pending);
      case Call::kJoin:
        return join(pending);
      case Call::kConfirm:
        return confirm(pending);
      case Call::kRestore:
        return restore(pending);
      case Call::kHeartbeat:
        return heartbeat(pending);
      case Call::kLeave:
        return leave(pending);
      case Call::kSave:
        return save(pending);
      case Call::kFinishSave:
        finish_checkpoint(pending.request.text, pending.request.nonce);
        return pending.done(reply(Code::kOk));
      case Call::kStatus:
        return pending.done(status());
      case Call::kStop:
        stopped_ = true;
        return pending.done(reply(Code::kOk));
    }
  } catch (const std::exception& error) {
    const std::string reason = one_line(error);
    if (durable_.is_broken()) {
      pending.done(reply(Code::kLost, reason));
      throw;
    }
    const bool saves = call == Call::kSave || call == Call::kFinishSave;
    // A retry of what the standard library throws for would fail again.
    const bool is_own = dynamic_cast<const c10::Error*>(&error) != nullptr;
    const Code code =
        is_own ? code_of(error, saves ? Code::kNotWritten : Code::kBusy) : Code::kInvalid;
    if (code == Code::kInvalid) ++activity_.counts.refused;
    if (code == Code::kNotWritten) log_.error("cannot save", {{"reason", reason}});
    // The log cannot be written: nothing has changed, and a retry may succeed.
    if (code == Code::kBusy) log_write_failure("cannot log", reason, pending.arrived);
    pending.done(reply(code, refusal_text(error)));
  } catch (...) {
    pending.done(reply(Code::kLost, "the server is shutting down"));
    throw;
  }
}

std::optional<Reply> RequestHandler::refusal(const Pending& pending) const {
  if (pending.request.message) {
    const auto& job = durable_.state().shard().declared_job();
    const Header& header = pending.message.header;
    if (!job) return reply(Code::kRestarted, "the server has no job yet");
    if (header.server_incarnation != durable_.incarnation())
      return reply(Code::kRestarted,
                   "the server is incarnation " + std::to_string(durable_.incarnation()) +
                       " now, the message is for " + std::to_string(header.server_incarnation));
    if (pending.job != job)
      return reply(Code::kRestarted, "the server had no job yet when the message arrived");
    if (header.trainer != kNoTrainer) {
      if (auto refused = membership_error(header.trainer, header.trainer_incarnation))
        return refused;
    }
  }
  if (!pending.mismatch.empty()) return reply(Code::kInvalid, pending.mismatch);
  return std::nullopt;
}

std::optional<Reply> RequestHandler::membership_error(uint32_t id, uint64_t incarnation) const {
  const TrainerState* const trainer = durable_.state().trainer(id);
  const std::string name = "trainer " + std::to_string(id);
  if (!trainer) return reply(Code::kRestarted, name + " has not joined");
  if (trainer->incarnation != incarnation)
    return reply(Code::kReplaced, name + ": another process has joined under this number");
  if (!trainer->is_member)
    return reply(Code::kReplaced, name + " has left, or was dropped after it was silent for " +
                                      seconds_text(options_.trainer_timeout) +
                                      ": restart it to join");
  return std::nullopt;
}

void RequestHandler::push(Pending& pending) {
  const Header header = pending.message.header;
  note_confirmed(header.trainer, header.step);
  if (header.flags & kInitialValues) return initial(pending);
  const ParameterState& state = durable_.state();
  TORCH_CHECK_VALUE(state.is_initialised(), "push: the blocks have no values yet");
  const TrainerState& trainer = *state.trainer(header.trainer);
  const uint64_t last = trainer.last_sequence;
  TORCH_CHECK_VALUE(state.job()->mode != Mode::kSync || pending.message.sections.empty() ||
                        header.sequence > trainer.joined_after,
                    "push: step ", header.sequence,
                    " was closed without this trainer, which joined after step ",
                    trainer.joined_after);
  if (header.sequence > last + 1) {
    if (!has_room(pending))
      return pending.done(reply(Code::kBusy, "too many pushes are out of order"));
    kept_bytes_ += bytes_of_message(pending);
    out_of_order_.emplace(std::pair(header.trainer, header.sequence), std::move(pending));
    return;
  }
  // With one server the push itself confirms the step.
  if (header.sequence <= last + 1 && state.job()->servers == 1)
    note_confirmed(header.trainer, header.sequence);
  if (header.sequence <= last) {
    ++activity_.counts.duplicates;
    return acknowledge(pending, reply(Code::kOk));
  }
  // The open step's pushes are always accepted, so that it can close.
  const bool is_early = state.job()->mode == Mode::kSync && header.sequence > state.steps() + 1;
  if (is_early && state.pending_bytes() + bytes_of_message(pending) > options_.max_queue_bytes)
    return pending.done(reply(Code::kBusy, waiting_for()));
  durable_.change(RecordKind::kPush, pending.request.message->span(), pending.request.message);
  ++activity_.counts.pushes;
  activity_.counts.rows_pushed += rows_in(pending.message);
  acknowledge(pending, reply(Code::kOk));
}

void RequestHandler::process_out_of_order(uint32_t trainer) {
  const TrainerState* const state = durable_.state().trainer(trainer);
  while (state) {
    const auto next = out_of_order_.lower_bound({trainer, 0});
    if (next == out_of_order_.end() || next->first.first != trainer ||
        next->first.second > state->last_sequence + 1)
      return;
    Pending ready = std::move(next->second);
    out_of_order_.erase(next);
    kept_bytes_ -= bytes_of_message(ready);
    answer(ready);
  }
}

// Kept requests may take half of the queue's bytes, so that the requests they wait for always fit.
bool RequestHandler::has_room(const Pending& pending) const {
  return kept_bytes_ == 0 ||
         kept_bytes_ + bytes_of_message(pending) <= options_.max_queue_bytes / 2;
}

void RequestHandler::acknowledge(Pending& pending, Reply reply) {
  acknowledgements_.push_back({std::nullopt, std::move(pending.done), std::move(reply)});
}

void RequestHandler::wait(Pending& pending, uint64_t step) {
  if (!has_room(pending)) return pending.done(reply(Code::kBusy, "too many requests are waiting"));
  kept_bytes_ += bytes_of_message(pending);
  waiting_.emplace(step, std::move(pending));
}

void RequestHandler::initial(Pending& pending) {
  // Repeated after a lost reply, or by a restarted trainer 0: the first values count.
  if (!durable_.state().is_initialised())
    durable_.change(RecordKind::kInitial, pending.request.message->span());
  acknowledge(pending, reply(Code::kOk));
}

void RequestHandler::pull(Pending& pending) {
  const Header& header = pending.message.header;
  const ParameterState& state = durable_.state();
  const JobOptions& job = *state.job();
  const bool is_trainer = header.trainer != kNoTrainer;
  if (is_trainer) note_confirmed(header.trainer, header.step);
  if (is_trainer && job.mode == Mode::kSync && state.steps() < header.step)
    return wait(pending, header.step);
  const bool too_early =
      is_trainer && state.trainer(header.trainer)->last_sequence < header.sequence;
  // The next push of a trainer does not depend on its predictions.
  const bool is_bounded = is_trainer && job.mode == Mode::kAsync && job.max_staleness >= 0 &&
                          !(header.flags & kPrediction);
  const bool too_far = is_bounded && state.members().lead_of(header.trainer) >
                                         static_cast<uint64_t>(job.max_staleness);
  // A step that a power failure could open again is not shown.
  if (!state.is_initialised() || too_early || too_far || !is_step_durable()) return wait(pending);
  const int64_t bytes = pending.job->answer_bytes(pending.message);
  // A single reply is always sent, however large.
  const int64_t held = *reply_bytes_;
  if (held > 0 && held + bytes > options_.max_queue_bytes)
    return pending.done(reply(Code::kBusy, "answers of " + std::to_string(held) +
                                               " bytes have not been taken by trainers yet"));
  Reply answer = reply(Code::kOk);
  answer.message = state.pull(pending.message, pending.request.answer_maker);
  *reply_bytes_ += bytes;
  answer.hold = {nullptr, [held_bytes = reply_bytes_, bytes](void*) { *held_bytes -= bytes; }};
  ++activity_.counts.pulls;
  activity_.counts.rows_pulled += rows_in(pending.message);
  activity_.counts.bytes_out += static_cast<int64_t>(answer.message.size());
  pending.done(std::move(answer));
}

void RequestHandler::set_job(Pending& pending) {
  const ParameterState& state = durable_.state();
  const JobOptions& job = pending.job->options();
  if (const auto& own = state.shard().declared_job()) {
    own->check_same(pending.job->fingerprint(), pending.request.text);
    return pending.done(reply(Code::kOk));
  }
  TORCH_CHECK_VALUE(job.servers == options_.servers, "job: it has ", job.servers,
                    " servers, this server was started as one of ", options_.servers);
  try {
    state.shard().check_job(job);
  } catch (const std::exception& error) {
    return pending.done(reply(Code::kInvalid, one_line(error)));
  }
  try {
    durable_.set_job(job);
  } catch (const std::exception& error) {
    if (!state.job() || durable_.is_broken()) throw;
    // The checkpoint to begin with is loaded in part. No record follows that of the job, so the
    // next start in this folder loads it again.
    failure_ = one_line(error);
    initial_load_failed_ = true;
    log_.error("job failed", {{"reason", failure_}});
    return pending.done(reply(code_of(error, Code::kFailed), failure_));
  }
  arrival_check_.set_job(state.shard().declared_job());
  if (!options_.load.empty()) {
    save_held_ = finished_save(options_.load);
    steps_held_ = state.steps();
  }
  log_.info("job", {{"mode", to_string(job.mode)},
                    {"trainers", job.trainers},
                    {"tables", job.tables.size()},
                    {"blocks", state.shard().blocks().size()}});
  pending.done(reply(Code::kOk));
}

void RequestHandler::join(Pending& pending) {
  const ParameterState& state = durable_.state();
  const Request& request = pending.request;
  if (!pending.job) return pending.done(reply(Code::kNotYet, "trainer 0 has not set the job yet"));
  const TrainerState* trainer = state.trainer(request.trainer);
  if (request.trainer != kNoTrainer) {
    const bool repeated = trainer && request.nonce != 0 && trainer->nonce == request.nonce;
    if (request.incarnation == 0 && !repeated) {
      const JoinRecord record{
          .trainer = request.trainer,
          .incarnation = trainer ? trainer->incarnation + 1 : durable_.incarnation(),
          .nonce = request.nonce};
      durable_.change(RecordKind::kJoin, bytes_of(record));
      confirmed_.erase(request.trainer);  // The new process may know less.
      last_message_[request.trainer] = pending.arrived;
      trainer = state.trainer(request.trainer);
      log_.info("trainer joined",
                {{"trainer", request.trainer}, {"incarnation", trainer->incarnation}});
    } else if (!trainer || !trainer->is_member ||
               (!repeated && trainer->incarnation != request.incarnation)) {
      return pending.done(
          reply(Code::kReplaced, "trainer " + std::to_string(request.trainer) +
                                     ": it was dropped, or another process uses its number"));
    }
  }
  acknowledge(pending, join_reply(request.trainer));
}

Reply RequestHandler::join_reply(uint32_t id) const {
  Reply joined = reply(Code::kOk);
  joined.steps_at_start = durable_.state().steps_at_start();
  if (const TrainerState* const trainer = durable_.state().trainer(id)) {
    joined.joined_after = trainer->joined_after;
    joined.trainer_incarnation = trainer->incarnation;
    joined.last_sequence = trainer->last_sequence;
  }
  return joined;
}

void RequestHandler::confirm(Pending& pending) {
  const uint32_t id = pending.request.trainer;
  if (auto refused = membership_error(id, pending.request.incarnation))
    return pending.done(std::move(*refused));
  note_confirmed(id, pending.request.step);
  acknowledge(pending, reply(Code::kOk));
}

void RequestHandler::restore(Pending& pending) {
  const ParameterState& state = durable_.state();
  // The job's beginning is what this server began with.
  const std::string& checkpoint =
      pending.request.text.empty() ? options_.load : pending.request.text;
  TORCH_CHECK_VALUE(pending.job, "restore: this server has no job yet");
  const uint64_t save = checkpoint.empty() ? 0 : finished_save(checkpoint);
  const bool is_new =
      state.steps() == 0 && state.pending_bytes() == 0 && state.members().trainers().empty();
  const bool is_held =
      checkpoint.empty() ? is_new : save != 0 && save == save_held_ && state.steps() == steps_held_;
  const bool is_whole = failure_.empty() && state.pending_bytes() == 0;
  if (is_held && is_whole) return pending.done(reply(Code::kOk));
  if (!checkpoint.empty()) saved_folders(checkpoint);  // A missing checkpoint changes nothing.
  if (durable_.is_saving()) return pending.done(reply(Code::kBusy, "a snapshot is being written"));
  save_held_ = 0;
  try {
    durable_.restore(checkpoint);
  } catch (const std::exception& error) {
    failure_ = "cannot roll back: " + one_line(error);
    log_.error("job failed", {{"reason", failure_}});
    return pending.done(reply(code_of(error, Code::kFailed), failure_));
  }
  arrival_check_.set_job(state.shard().declared_job());
  save_held_ = save;
  steps_held_ = state.steps();
  last_message_.clear();
  confirmed_.clear();
  job_since_.reset();
  failure_.clear();
  initial_load_failed_ = false;
  const auto refuse = [this](Pending& old) {
    kept_bytes_ -= bytes_of_message(old);
    old.done(reply(Code::kReplaced, "the job was rolled back to a checkpoint"));
  };
  for (auto& [step, old] : waiting_) refuse(old);
  for (auto& [place, old] : out_of_order_) refuse(old);
  waiting_.clear();
  out_of_order_.clear();
  log_.info("rolled back", {{"checkpoint", checkpoint}, {"steps", state.steps()}});
  pending.done(reply(Code::kOk));
}

void RequestHandler::note_confirmed(uint32_t trainer, uint64_t step) {
  const JobOptions& job = *durable_.state().job();
  if (job.mode != Mode::kSync) return;
  uint64_t& last = confirmed_[trainer];
  last = std::max(last, step);
}

bool RequestHandler::has_confirmed(uint32_t trainer, uint64_t step) const {
  const auto found = confirmed_.find(trainer);
  return found != confirmed_.end() && found->second >= step;
}

bool RequestHandler::is_step_durable() const {
  return closed_at_ <= durable_.durable_number();
}

void RequestHandler::close_confirmed(Time now) {
  const ParameterState& state = durable_.state();
  const auto is_confirmed = [&] {
    return std::ranges::all_of(state.members().trainers(), [&](const auto& entry) {
      return !entry.second.is_member || has_confirmed(entry.first, state.steps() + 1);
    });
  };
  try {
    while (failure_.empty() && state.job() && state.job()->mode == Mode::kSync &&
           state.is_step_complete() && is_confirmed()) {
      durable_.change(RecordKind::kClose, {});
      closed_at_ = durable_.last_number();
    }
  } catch (const std::exception& error) {
    if (durable_.is_broken()) throw;
    // A full disk, for example: the next batch retries.
    log_write_failure("cannot log", one_line(error), now);
  }
}

void RequestHandler::heartbeat(Pending& pending) {
  const uint32_t id = pending.request.trainer;
  if (auto refused = membership_error(id, pending.request.incarnation))
    return pending.done(std::move(*refused));
  last_message_[id] = pending.arrived;  // Also after it was lost.
  note_confirmed(id, pending.request.step);
  pending.done(reply(Code::kOk));
}

void RequestHandler::leave(Pending& pending) {
  const TrainerState* trainer = durable_.state().trainer(pending.request.trainer);
  if (trainer && trainer->is_member && trainer->incarnation == pending.request.incarnation) {
    const LeaveRecord record{.trainer = pending.request.trainer};
    durable_.change(RecordKind::kLeave, bytes_of(record));
    last_message_.erase(pending.request.trainer);
    log_.info("trainer left", {{"trainer", pending.request.trainer}});
  }
  acknowledge(pending, reply(Code::kOk));
}

void RequestHandler::save(Pending& pending) {
  const ParameterState& state = durable_.state();
  TORCH_CHECK_VALUE(state.is_initialised(), "save: there is nothing to save yet");
  const uint64_t nonce = pending.request.nonce;
  if (saving_.nonce == nonce) {
    if (!saving_.outcome) return wait(pending);
    const Code code = saving_.outcome->empty() ? Code::kOk : Code::kNotWritten;
    return pending.done(reply(code, *saving_.outcome));
  }
  // A late message must not replace a part of a finished save by a newer state.
  if (is_finished(pending.request.text, nonce)) return pending.done(reply(Code::kOk));
  const uint64_t step = pending.request.step;
  const bool is_sync = state.job()->mode == Mode::kSync;
  // Steps continue without a dropped trainer.
  if (is_sync && state.steps() > step)
    return pending.done(reply(Code::kFailed, "save: expected the state after step " +
                                                 std::to_string(step) + ", it is that after step " +
                                                 std::to_string(state.steps())));
  if (is_sync && state.steps() < step) return wait(pending, step);
  // After a power failure the server may go back to what the disk has: a checkpoint of a later step
  // would not fit its state.
  if (durable_.is_saving() || !is_step_durable()) return wait(pending);
  durable_.begin_save(pending.request.text, nonce,
                      [this, nonce, steps = state.steps()](const std::string& reason) {
                        saving_.outcome = reason;
                        if (!reason.empty()) return;
                        save_held_ = nonce;
                        steps_held_ = steps;
                      });
  saving_ = {.nonce = nonce, .trainer = pending.request.trainer};
  if (const TrainerState* const saver = state.trainer(pending.request.trainer))
    saving_.last_sequence = saver->last_sequence;
  wait(pending);
}

// A server that has written its part waits for the others, until the trainer that saves continues.
uint64_t RequestHandler::save_progress() {
  const TrainerState* const saver = durable_.state().trainer(saving_.trainer);
  const bool others_write = saving_.outcome == "" && saver && saver->is_member &&
                            saver->last_sequence == saving_.last_sequence &&
                            last_message_.contains(saving_.trainer);
  if (!durable_.is_saving() && !others_write) return 0;
  const uint64_t bytes = durable_.saved_bytes();
  const bool grows = !durable_.is_saving() || bytes != saving_.bytes;
  saving_.bytes = bytes;
  return saving_.progress += grows;
}

std::string RequestHandler::waiting_for() const {
  const ParameterState& state = durable_.state();
  if (!state.is_initialised()) return "trainer 0 has not sent the initial values yet";
  if (!is_step_durable())
    return "step " + std::to_string(state.steps()) + " is not on the disk yet";
  std::string names;
  std::vector<uint32_t> missing = state.missing_trainers();
  if (state.job()->mode == Mode::kSync && state.is_step_complete()) {
    for (const auto& [id, trainer] : state.members().trainers())
      if (trainer.is_member && !has_confirmed(id, state.steps() + 1)) missing.push_back(id);
  }
  for (const uint32_t trainer : missing) {
    names += (names.empty() ? "trainer " : ", ") + std::to_string(trainer);
  }
  // Trainers that push get this reason directly; those that wait for them do not.
  const std::string& unwritable = durable_.log_failure();
  const std::string reason = unwritable.empty() ? ""
                                                : "; server " + std::to_string(options_.server) +
                                                      " cannot log: " + unwritable;
  return "step " + std::to_string(state.steps() + 1) + " waits for " +
         (names.empty() ? "nobody" : names) + reason;
}

void RequestHandler::finish_batch(Time now) {
  close_confirmed(now);
  // With a step that they have closed: else servers could be two steps apart after a power failure.
  for (auto added = acknowledgements_.rbegin(); added != acknowledgements_.rend(); ++added) {
    if (added->number) break;
    added->number = durable_.last_number();
  }
  durable_.begin_sync();
  kill_point("before the answer");
  acknowledge_durable();
  answer_waiting();
  end_long_polls(now);
}

void RequestHandler::acknowledge_durable() {
  const uint64_t durable = durable_.durable_number();
  for (; !acknowledgements_.empty(); acknowledgements_.pop_front()) {
    Acknowledgement& next = acknowledgements_.front();
    if (next.number.value_or(UINT64_MAX) > durable) return;
    next.done(std::move(next.reply));
  }
}

void RequestHandler::finish() {
  if (acknowledgements_.empty()) return;
  durable_.sync();
  acknowledge_durable();
}

// Each once: those that must wait longer come back. An error that ends the server leaves the others
// to close().
void RequestHandler::answer_waiting() {
  const uint64_t closed = failure_.empty() ? durable_.state().steps() : UINT64_MAX;
  std::multimap<uint64_t, Pending> due;
  while (!waiting_.empty() && waiting_.begin()->first <= closed)
    due.insert(waiting_.extract(waiting_.begin()));
  try {
    while (!due.empty()) {
      Pending pending = std::move(due.extract(due.begin()).mapped());
      kept_bytes_ -= bytes_of_message(pending);
      answer(pending);
    }
  } catch (...) {
    waiting_.merge(due);
    throw;
  }
}

void RequestHandler::end_long_polls(Time now) {
  const auto end_in = [&](auto& kept, bool at_once, const auto& not_yet) {
    for (auto entry = kept.begin(); entry != kept.end();) {
      Pending& pending = entry->second;
      if (now - pending.arrived < kLongPollTimeout && !at_once) {
        ++entry;
        continue;
      }
      kept_bytes_ -= bytes_of_message(pending);
      pending.done(not_yet(pending));
      entry = kept.erase(entry);
    }
  };
  std::optional<uint64_t> progress;
  end_in(waiting_, /*at_once=*/false, [&](const Pending& pending) {
    if (!progress) progress = save_progress();
    const bool saves = pending.request.call == Call::kSave && durable_.is_saving();
    Reply answer = reply(Code::kNotYet, saves ? "a checkpoint is being written" : waiting_for());
    answer.progress = *progress;
    return answer;
  });
  // The earlier push may be there and find no room on the disk: that is what the trainer must hear.
  const std::string& unwritable = durable_.log_failure();
  end_in(out_of_order_, !failure_.empty(), [&](const Pending&) {
    return reply(Code::kNotYet,
                 unwritable.empty() ? "an earlier push of this trainer is missing" : unwritable);
  });
}

void RequestHandler::tick(Time now) {
  // A stopped server receives nothing: that time does not count against the trainers.
  if (now - last_tick_ > kStallThreshold) {
    for (auto& [trainer, time] : last_message_) time += now - last_tick_;
  }
  last_tick_ = now;
  activity_.tick(now);
  if (!failure_.empty()) return;
  try {
    for (auto heard = last_message_.begin(); heard != last_message_.end();) {
      const auto [trainer, time] = *heard++;
      if (now - time > options_.trainer_timeout) handle_lost_trainer(trainer, now);
    }
    if (!failure_.empty()) return;  // Since one was lost.
    drop_absent_trainers(now);
    evict(now);
    durable_.poll();
  } catch (const std::exception& error) {
    if (durable_.is_broken()) throw;
    // A full disk, for example: the next tick retries.
    log_write_failure("cannot write", one_line(error), now);
  }
}

void RequestHandler::log_write_failure(const char* what, const std::string& reason, Time now) {
  if (write_failure_logged_ && now - *write_failure_logged_ < kWriteFailurePeriod) return;
  write_failure_logged_ = now;
  log_.error(what, {{"reason", reason}});
}

// A trainer that never joined is lost like a silent one, counted from the start of the job or of
// this server.
void RequestHandler::drop_absent_trainers(Time now) {
  const ParameterState& state = durable_.state();
  if (!state.job()) return;
  if (!job_since_) job_since_ = now;
  if (options_.on_trainer_loss != OnTrainerLoss::kContinue ||
      now - *job_since_ <= options_.trainer_timeout)
    return;
  for (uint32_t id = 0; id < static_cast<uint32_t>(state.job()->trainers); ++id) {
    if (state.trainer(id)) continue;
    const JoinRecord came{.trainer = id, .incarnation = durable_.incarnation()};
    durable_.change(RecordKind::kJoin, bytes_of(came));
    const LeaveRecord left{.trainer = id};
    durable_.change(RecordKind::kLeave, bytes_of(left));
    log_.warn(
        "continuing without a trainer",
        {{"trainer", id}, {"reason", "it did not join within " + seconds_text(now - *job_since_)}});
  }
}

void RequestHandler::evict(Time now) {
  const JobOptions* const job = durable_.state().job();
  if (!job || now - last_eviction_ < options_.evict_period) return;
  last_eviction_ = now;
  if (std::any_of(job->tables.begin(), job->tables.end(), [](const TableOptions& table) {
        return table.eviction.time_to_live_s > 0 || table.eviction.minimum_score > 0;
      }))
    durable_.change(RecordKind::kEvict, {});
}

void RequestHandler::handle_lost_trainer(uint32_t trainer, Time now) {
  const std::string text = "trainer " + std::to_string(trainer) + " sent nothing for " +
                           seconds_text(now - last_message_.at(trainer));
  switch (options_.on_trainer_loss) {
    case OnTrainerLoss::kFail:
      if (!failure_.empty()) break;  // The others ended because of the first.
      failure_ = text + "; its last push was number " +
                 std::to_string(durable_.state().trainer(trainer)->last_sequence);
      log_.error("job failed", {{"reason", failure_}});
      break;
    case OnTrainerLoss::kWait:
      log_.warn("waiting for a lost trainer", {{"trainer", trainer}, {"reason", text}});
      break;
    case OnTrainerLoss::kContinue: {
      const LeaveRecord record{.trainer = trainer};
      durable_.change(RecordKind::kLeave, bytes_of(record));
      log_.warn("continuing without a trainer", {{"trainer", trainer}, {"reason", text}});
      break;
    }
  }
  last_message_.erase(trainer);
}

Reply RequestHandler::status() const {
  return reply(Code::kOk, status_text({.server = options_.server,
                                       .incarnation = durable_.incarnation(),
                                       .state = durable_.state(),
                                       .activity = activity_,
                                       .last_message = last_message_,
                                       .failure = failure_,
                                       .log_failure = durable_.log_failure(),
                                       .waiting = waiting_.size()}));
}

}  // namespace cohort::ps
