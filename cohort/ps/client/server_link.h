// SPDX-License-Identifier: Apache-2.0
// A trainer's link to one server: each request takes effect once and gets one reply, whatever
// happens to messages, connections and the server.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "cohort/ps/wire/request.h"

namespace cohort::ps {

class TimerThread;

struct LinkOptions {
  int server = 0;        ///< Number, for messages and errors.
  std::string endpoint;  ///< Likewise.
  uint32_t trainer = kNoTrainer;
  /// Of the first attempt to send a message. It doubles with each attempt that times out, up to
  /// server_timeout, so that a large message gets through on a slow connection.
  std::chrono::milliseconds attempt_timeout{5'000};
  /// A server that sends no reply for longer is lost, even if it is alive and only this request has
  /// no reply.
  std::chrono::milliseconds server_timeout{300'000};
  /// Longest wait for other trainers, or for space in a server's queue or on its disk. The wait for
  /// a checkpoint does not count while the checkpoint grows.
  std::chrono::milliseconds trainer_timeout{600'000};
  std::chrono::milliseconds heartbeat_period{1'000};
  /// Of pushes not acknowledged; more block. Half of the memory that a trainer shares with a server
  /// of its host: answers find room in the other half.
  int64_t max_in_flight_bytes = int64_t{32} << 20;
  std::chrono::milliseconds notice_period{10'000};  ///< Between two calls of `on_wait`.
  /// Called with one line of text while requests wait without a reply; on the timer's thread, which
  /// it must not block. May be empty.
  std::function<void(const std::string&)> on_wait;
};

/// Draws a number, not 0, by which a server recognises a repeated request (Request::nonce).
uint64_t draw_nonce();

/// The reply to a request in flight.
class ReplyFuture {
 public:
  /// Blocks until the reply, which is kOk.
  /// Errors: c10::DistError: the server, or another trainer, is lost; c10::ValueError: the server
  /// rejects the request.
  Reply wait();
  bool is_done() const;

 private:
  friend class ServerLink;
  struct State;
  explicit ReplyFuture(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

/// Repeats requests without a reply, joins again after a restart of the server, and sends
/// heartbeats. Pushes are numbered; the server applies each number once.
///
/// Threads: any; pushes are numbered in the order of calls. `push` blocks while too many bytes are
/// in flight; other calls return at once unless stated otherwise.
class ServerLink {
 public:
  /// `timer` must outlive this; one serves all links of a client.
  ServerLink(std::unique_ptr<Channel> channel, const LinkOptions& options, TimerThread& timer);
  ~ServerLink();

  /// Sends a request other than a push or pull.
  ReplyFuture begin(Request request);
  /// Sends it and returns the reply. Blocks.
  /// Errors: as ReplyFuture::wait.
  Reply call(Request request);

  /// Joins the job of this fingerprint as a new process. Blocks, also until the job is set. `text`:
  /// the job's JSON, for the error of a server that has another job.
  /// Errors: as ReplyFuture::wait.
  Reply join(uint64_t job, const std::string& text = "");
  /// Confirms that all servers have this trainer's pushes up to `step` (Call::kConfirm). Blocks.
  /// Errors: likewise.
  void confirm(uint64_t step);

  /// Of messages to be sent here (Channel::make_buffer). Any thread.
  BufferMaker buffer_maker() const;
  /// Sends `message`, with `flags` of the header; numbered by `sequence` (greater than all before);
  /// 0 for initial values (kInitialValues). `confirmed`: see confirm().
  ReplyFuture push(MessageWriter message, uint64_t sequence, uint64_t confirmed = 0,
                   uint32_t flags = 0);
  /// Reads a state that has this trainer's pushes up to `sequence`; kSync: after `step`
  /// steps, which it confirms. `answer_bytes`: Request's.
  ReplyFuture pull(MessageWriter message, uint64_t sequence, uint64_t step, uint32_t flags = 0,
                   size_t answer_bytes = 0);

  /// Waits until every push is acknowledged.
  /// Errors: as ReplyFuture::wait.
  void flush();
  /// Throws the error of a failed push, if there is one.
  /// Errors: as ReplyFuture::wait.
  void check_pushes();
  /// Makes calls of `push` and `flush` that block in other threads, and all later ones, throw
  /// c10::DistError.
  void give_up_pushes();
  /// Tells the server that no more pushes follow. Blocks. The last call.
  void leave();

 private:
  class Worker;
  std::shared_ptr<Worker> worker_;
};

}  // namespace cohort::ps
