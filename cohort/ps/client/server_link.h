// A trainer's line to one server: what it asks is answered once, whatever happens to messages,
// connections and the server on the way.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "cohort/ps/wire/request.h"

namespace cohort::ps {

struct LinkOptions {
  int server = 0;        ///< Number, for messages and errors.
  std::string endpoint;  ///< Likewise.
  uint32_t trainer = kNoTrainer;
  /// Of the first sending of a message. It doubles with each one that was not answered in time, up
  /// to server_timeout: a large message on a slow line arrives, at the cost of sending it again.
  std::chrono::milliseconds attempt_timeout{5'000};
  /// A server that gave no answer for longer is lost; also one that lives, and let a sending wait
  /// for as long.
  std::chrono::milliseconds server_timeout{300'000};
  /// Longest wait for other trainers, or for room with a server: its queue's, or its disk's. While
  /// a checkpoint grows, the wait for it does not age.
  std::chrono::milliseconds trainer_timeout{600'000};
  std::chrono::milliseconds beat_period{1'000};
  int64_t max_in_flight_bytes = int64_t{64} << 20;  ///< Of pushes not acknowledged; more wait.
  std::chrono::milliseconds notice_period{10'000};  ///< Between two calls of `on_wait`.
  /// Called while something is waited for and nothing is answered, one line; from a thread of the
  /// link, which it holds up. May be empty.
  std::function<void(const std::string&)> on_wait;
};

/// Draws a number, not 0, by which a server knows a call that is repeated (Request::nonce).
uint64_t draw_nonce();

/// A call on its way.
class Ticket {
 public:
  /// Blocks for the answer, which is kOk.
  /// Errors: c10::DistError: the server, or another trainer, is lost; c10::ValueError: the server
  /// finds
  ///         the request wrong.
  Reply wait();
  bool is_done() const;

 private:
  friend class ServerLink;
  struct State;
  explicit Ticket(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

/// Repeats what was not answered, joins again after the server's restart, tells it every second
/// that this trainer lives. Pushes are numbered; the server applies each number once.
///
/// Threads: any; pushes are numbered in the order of calls. Calls of `push` block while too many
/// bytes are in flight; others return at once, unless they say otherwise.
class ServerLink {
 public:
  ServerLink(std::unique_ptr<Channel> channel, const LinkOptions& options);
  ~ServerLink();

  /// A call beside pushes and pulls.
  Ticket begin(Request request);
  /// The same, and its answer. Blocks. Errors: as Ticket::wait.
  Reply call(Request request);

  /// Joins, as a new process, the job of this fingerprint. Blocks, also until the job is set.
  /// `text`: its JSON, for a server that has another one. Errors: as Ticket::wait.
  Reply join(uint64_t job, const std::string& text = "");
  /// Says that all servers have this trainer's pushes up to `step` (Call::kConfirm). Blocks.
  /// Errors: likewise.
  void confirm(uint64_t step);

  /// Sends `message`, with `flags` of the header; numbered by `sequence` (> all before), or outside
  /// of the count (kInitialValues) with 0. `confirmed`: as confirm() says it.
  Ticket push(MessageWriter message, uint64_t sequence, uint64_t confirmed = 0, uint32_t flags = 0);
  /// Answered from a state that has this trainer's pushes up to `sequence`; kSync: after `step`
  /// steps, which it confirms.
  Ticket pull(MessageWriter message, uint64_t sequence, uint64_t step, uint32_t flags = 0);

  /// Waits until every push is acknowledged. Errors: as Ticket::wait.
  void flush();
  /// Throws what a push has failed with, if one has. Errors: as Ticket::wait.
  void check_pushes();
  /// Ends calls of `push` and `flush` that block in other threads, and all later ones, with
  /// c10::DistError.
  void give_up_pushes();
  /// Says that no push will come any more. Blocks. The last call.
  void leave();

 private:
  class Worker;
  std::shared_ptr<Worker> worker_;
};

}  // namespace cohort::ps
