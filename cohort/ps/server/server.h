// SPDX-License-Identifier: Apache-2.0
// A parameter server: one thread owns the state and handles requests in the order of their arrival.
//
// The transport (rpc/rpc_server.h, or a test) calls `submit` from any thread; the request's form is
// checked on that thread. The owner takes requests in batches, logs each change of the state,
// applies it and replies. A pull sees every push that was acknowledged before it. To use more
// cores, give the tables more threads (ServerOptions::table_threads), or run more servers.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "cohort/base/log.h"
#include "cohort/ps/server/block_store.h"
#include "cohort/ps/wire/request.h"

namespace cohort::ps {

/// What an acknowledged push survives: `cohort ps server --acknowledge`.
enum class Durability {
  /// Nothing: there is no log. A server that ends loses its state.
  kApplied,
  /// The death of the server's process. A power failure may cost the last second, and what the disk
  /// had not written by then.
  kLogged,
  /// A power failure. One fdatasync serves all pushes that wait.
  kSynced,
};

enum class OnTrainerLoss {
  kFail,      ///< The job ends: all trainers get an error that names the lost one.
  kWait,      ///< Steps wait until the trainer is back.
  kContinue,  ///< It is dropped: steps close without it.
};

struct ServerOptions {
  int server = 0;  ///< This one's number, in [0, servers).
  int servers = 1;
  std::string folder;  ///< Its own: log and snapshots. Empty: none, only under kApplied.
  std::string load;    ///< A checkpoint to begin with, of any number of servers; empty: none.
  BlockMaker make_block = make_host_block;  ///< Where dense parameters live.
  /// Threads that share the work on tables, the owner among them: 1 to 64. The number changes no
  /// result, and may be another at each start.
  int table_threads = 1;
  Durability durability = Durability::kLogged;
  OnTrainerLoss on_trainer_loss = OnTrainerLoss::kFail;
  /// A trainer that is silent for longer is lost.
  std::chrono::milliseconds trainer_timeout{30'000};
  /// Checkpoints are written only below this folder; empty: anywhere.
  std::string save_root;
  int64_t snapshot_log_bytes = int64_t{4} << 30;   ///< Bytes of log before a snapshot; 0: never.
  int64_t max_queue_bytes = int64_t{256} << 20;    ///< Of queued messages; more are told kBusy.
  std::chrono::milliseconds evict_period{60'000};  ///< Between evictions, where a table has rules.
};

class Server {
 public:
  /// Recovers what `folder` holds: newest snapshot, then the log after it. `log` must outlive this.
  /// Errors: ConfigError: the folder is another server's, in use by another process, or damaged
  /// (file and offset); table_threads is out of its range.
  Server(const ServerOptions& options, const Log& log);
  /// Stops the server as `stop` does. No snapshot is written.
  ~Server();

  /// Checks a request as far as the state does not matter, and queues it; `done` is called from the
  /// owner's thread, or at once if the message cannot be read or the queue is full.
  void submit(Request request, Done done);
  /// Whether the queue has room for a message of this size now: what a transport asks before it
  /// copies one. `submit` has the last word.
  bool has_room(int64_t bytes) const;

  /// Blocks until a client requests a stop, or `stop` is called.
  /// Errors: the exception that ended the owner's thread (a log that cannot be written does not end
  ///         it: see Code::kBusy).
  void wait();
  /// From any thread: acknowledges what has been applied, replies kLost to all other requests, and
  /// ends.
  void stop();

 private:
  class Owner;
  std::unique_ptr<Owner> owner_;
};

}  // namespace cohort::ps
