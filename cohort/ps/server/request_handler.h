// SPDX-License-Identifier: Apache-2.0
// Handles requests one at a time, by the contract in docs/ps.md.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "cohort/base/log.h"
#include "cohort/ps/server/arrival_check.h"
#include "cohort/ps/server/durable_state.h"
#include "cohort/ps/server/server.h"
#include "cohort/ps/server/status.h"
#include "cohort/ps/wire/request.h"

namespace cohort::ps {

/// Threads: one, but for arrival_check().
class RequestHandler {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// Recovers the state. `wake`: called on another thread when finish_batch() should be called.
  /// Errors: as Server's constructor.
  RequestHandler(const ServerOptions& options, const Log& log, std::function<void()> wake = {});
  ~RequestHandler();

  /// Makes of requests what `handle` takes. Any thread.
  const ArrivalCheck& arrival_check() const { return arrival_check_; }

  /// Replies to it, or keeps it for later.
  /// Errors: those that end the server; the request gets a reply first.
  void handle(Pending pending);
  /// After each batch of requests: begins a sync of the log, acknowledges what an earlier one has
  /// covered, and replies to waiting requests that can proceed.
  void finish_batch(Time now);
  /// A few times a second: detects lost trainers and, unless the job has failed, starts evictions
  /// and snapshots.
  void tick(Time now);

  bool is_stopped() const { return stopped_; }

  /// Syncs the log if the options ask for it, and acknowledges what is applied: before close(),
  /// unless the server ends with an error.
  /// Errors: as handle.
  void finish();
  /// Replies kLost to waiting requests. The last call.
  void close();

 private:
  void answer(Pending& pending);
  // Each replies, or keeps the request (moved from) for later.
  void push(Pending& pending);
  void initial(Pending& pending);
  void pull(Pending& pending);
  void set_job(Pending& pending);
  void join(Pending& pending);
  void confirm(Pending& pending);
  void restore(Pending& pending);
  void heartbeat(Pending& pending);
  void leave(Pending& pending);
  void save(Pending& pending);
  Reply status() const;

  void process_out_of_order(uint32_t trainer);
  bool has_room(const Pending& pending) const;
  /// Acknowledges it once all records so far are as durable as the options ask for.
  void acknowledge(Pending& pending, Reply reply);
  void acknowledge_durable();
  /// Keeps the request until `step` is closed; 0: until the next batch.
  void wait(Pending& pending, uint64_t step = 0);
  void answer_waiting();
  void end_long_polls(Time now);
  void handle_lost_trainer(uint32_t trainer, Time now);
  void drop_absent_trainers(Time now);
  void evict(Time now);
  /// Logs once a period: a failed write is retried often.
  void log_write_failure(const char* what, const std::string& reason, Time now);
  /// The reply that rejects a request, if it does not fit the job, or a push's or pull's sender is
  /// not a member of it.
  std::optional<Reply> refusal(const Pending& pending) const;
  /// The reply that rejects process `incarnation` of a trainer, if it is not a member of the job.
  std::optional<Reply> membership_error(uint32_t trainer, uint64_t incarnation) const;
  /// Records a member's confirmation (Call::kConfirm).
  void note_confirmed(uint32_t trainer, uint64_t step);
  bool has_confirmed(uint32_t trainer, uint64_t step) const;
  /// Closes the steps that every member has confirmed.
  void close_confirmed(Time now);
  /// Whether the last closed step may be acknowledged.
  bool is_step_durable() const;
  std::string waiting_for() const;
  /// Reply::progress for requests that wait while a checkpoint is written, here or by another
  /// server of the same save; 0 if none is.
  uint64_t save_progress();
  Reply reply(Code code, std::string text = "") const;
  /// The reply to a trainer that has joined.
  Reply join_reply(uint32_t trainer) const;

  ServerOptions options_;
  const Log& log_;
  DurableState durable_;
  ArrivalCheck arrival_check_;
  std::map<uint32_t, Time> last_message_;  // When a member's last message came.
  // By trainer: the last step that its process has confirmed. Not in the log: every heartbeat
  // repeats it.
  std::map<uint32_t, uint64_t> confirmed_;
  // Pulls and checkpoints that cannot be answered yet, by the step that they wait for. Those of key
  // 0 wait for something else and are tried again after every batch.
  std::multimap<uint64_t, Pending> waiting_;
  // Pushes that arrived before an earlier one of their trainer: by trainer and sequence.
  std::multimap<std::pair<uint32_t, uint64_t>, Pending> out_of_order_;
  int64_t kept_bytes_ = 0;  // Of messages in the two.
  // A reply to what was applied. It is sent when record `number` may be acknowledged, the last of
  // the batch; without a number the batch has not ended yet.
  struct Acknowledgement {
    std::optional<uint64_t> number;
    Done done;
    Reply reply;
  };
  std::list<Acknowledgement> acknowledgements_;
  uint64_t closed_at_ = 0;            // Record of the last step that was closed since the start.
  std::string failure_;               // Why the job cannot continue.
  std::optional<Time> job_since_;     // When it was first seen by this process.
  bool initial_load_failed_ = false;  // The checkpoint to begin with could not be loaded.
  Time last_eviction_;
  Time last_tick_;
  std::optional<Time> write_failure_logged_;
  bool stopped_ = false;

  // The last checkpoint that was requested, and its outcome: "" if it was written.
  struct Saving {
    uint64_t nonce = 0;
    std::optional<std::string> outcome;
    uint32_t trainer = kNoTrainer;  // The requester, and its last push then.
    uint64_t last_sequence = 0;
    uint64_t bytes = 0;  // At the last look at progress.
    uint64_t progress = 0;
  };
  Saving saving_;
  // The save that was written or loaded last since the start, and its steps.
  uint64_t save_held_ = 0;
  uint64_t steps_held_ = 0;
  std::shared_ptr<std::atomic<int64_t>> reply_bytes_ =
      std::make_shared<std::atomic<int64_t>>(0);  // Of pulls' answers that are not sent yet.

  Activity activity_;
};

}  // namespace cohort::ps
