// What a server answers: the rules of the game, one request at a time. docs/ps.md has them as a
// contract.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "cohort/base/log.h"
#include "cohort/ps/server/durable_state.h"
#include "cohort/ps/server/server.h"
#include "cohort/ps/wire/request.h"

namespace cohort::ps {

/// A request on its way through the server.
struct Pending {
  Request request;
  Message message;                        ///< Of a push or pull: into request.message.
  std::optional<ValuePlace> nonfinite{};  ///< Of a push: its first NaN or infinity.
  Done done;
  std::chrono::steady_clock::time_point arrived;
};

/// Threads: one.
class RequestHandler {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// Recovers the state. Errors: as Server's constructor.
  RequestHandler(const ServerOptions& options, const Log& log);
  ~RequestHandler();

  /// Answers it, or keeps it for later. Errors: whatever breaks the server; it is answered first.
  void handle(Pending pending);
  /// After each batch of requests: acknowledges what must be synced first, answers what can be
  /// answered now.
  void finish_batch(Time now);
  /// A few times a second: lost trainers, and unless the job has failed, evictions and snapshots.
  void tick(Time now);

  bool is_stopped() const { return stopped_; }

  /// Answers what waits with kLost. Nothing is handled after it.
  void close();

 private:
  void answer(Pending& pending);
  // Each answers, or keeps the request (moved from) for later.
  void push(Pending& pending);
  void initial(Pending& pending);
  void pull(Pending& pending);
  void set_job(Pending& pending);
  void join(Pending& pending);
  void confirm(Pending& pending);
  void restore(Pending& pending);
  void beat(Pending& pending);
  void leave(Pending& pending);
  void save(Pending& pending);
  Reply status() const;

  /// Errors: c10::ValueError that names trainer, push and value, if the job takes finite ones
  /// alone.
  void check_finite(const Pending& pending) const;
  /// Errors: c10::ValueError that names `call`: `folder` is not below options.save_root.
  void check_folder(const char* call, const std::string& folder) const;
  void take_overtaken(uint32_t trainer);
  bool has_room(const Pending& pending) const;
  void wait(Pending& pending);
  void lose(uint32_t trainer, Time now);
  void give_up_absent(Time now);
  void evict(Time now);
  /// Once a period: what cannot be written is tried again and again.
  void say_unwritable(const char* what, const std::string& reason, Time now);
  /// Why a message is refused, if it is.
  std::optional<Reply> refusal(const Header& header, const Message& message) const;
  /// Why the process `incarnation` of a trainer has no part in the job, if it has none.
  std::optional<Reply> stranger(uint32_t trainer, uint64_t incarnation) const;
  /// Takes down what a member says of its pushes (Call::kConfirm).
  void note_confirmed(uint32_t trainer, uint64_t step);
  bool has_confirmed(uint32_t trainer, uint64_t step) const;
  /// Closes the steps that every member has confirmed.
  void close_confirmed(Time now);
  std::string waiting_for() const;
  /// Reply::progress for those who wait while a checkpoint is written, here or by another server of
  /// the same save; 0 if none is.
  uint64_t save_progress();
  Reply reply(Code code, std::string text = "") const;
  /// What a trainer that has joined is told.
  Reply place_of(uint32_t trainer) const;

  ServerOptions options_;
  const Log& log_;
  DurableState durable_;
  std::map<uint32_t, Time> heard_;  // When a member was last heard of.
  // By trainer: the last step of which its process knows that all servers have its push. Not in the
  // log: it is said again with every beat.
  std::map<uint32_t, uint64_t> confirmed_;
  std::list<Pending> waiting_;  // Pulls and checkpoints that cannot be answered yet.
  // Pushes that overtook an earlier one of their trainer: by trainer and sequence.
  std::multimap<std::pair<uint32_t, uint64_t>, Pending> ahead_;
  int64_t kept_bytes_ = 0;  // Of messages in the two.
  // Applied; answered after the next sync.
  struct Unsynced {
    Done done;
    Reply reply;
  };
  std::list<Unsynced> unsynced_;
  std::string failure_;        // Why the job cannot go on.
  std::optional<Time> job_since_;  // When it was first seen by this process.
  bool has_no_start_ = false;  // For the checkpoint that it was to begin with could not be loaded.
  Time last_eviction_;
  Time last_tick_;
  std::optional<Time> unwritable_said_;
  bool stopped_ = false;

  // The last checkpoint that was asked for, and what came of it, "" if it is there.
  struct Saving {
    uint64_t nonce = 0;
    std::optional<std::string> outcome;
    uint32_t trainer = kNoTrainer;  // Who asked, and its last push then.
    uint64_t last_sequence = 0;
    uint64_t bytes = 0;  // When progress was looked at last.
    uint64_t progress = 0;
  };
  Saving saving_;
  // The save that the state is or was last, and its steps: written or loaded since the start.
  uint64_t save_held_ = 0;
  uint64_t steps_held_ = 0;
  std::shared_ptr<std::atomic<int64_t>> reply_bytes_ =
      std::make_shared<std::atomic<int64_t>>(0);  // Of pulls' answers that are not sent yet.

  struct Counts {
    int64_t pushes = 0, duplicates = 0, pulls = 0, refused = 0;
    int64_t rows_pushed = 0, rows_pulled = 0, bytes_in = 0, bytes_out = 0;
  };
  Counts counts_;
  // Counts of 5 to 10 seconds ago and of the last 5: what rates are taken from.
  struct Counted {
    Counts counts;
    Time time;
  };
  Counted rates_from_, rates_next_;
  Time started_;
};

}  // namespace cohort::ps
