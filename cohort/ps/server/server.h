// A parameter server: one thread that owns the state, and answers in the order of asking.
//
// Whoever carries requests (rpc/rpc_server.h, or a test) calls `submit` from any thread; the owner
// takes them in batches, logs what changes the state, applies it and answers. Pulls see every push
// answered before them. More cores: more servers.
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

/// What an acknowledged push has outlived.
enum class Acknowledge {
  kApplied,  ///< Nothing: there is no log. A server that ends has lost its state.
  kLogged,   ///< The death of the server's process. The loss of power may cost the last second, and
             ///< what the disk had not taken by then.
  kSynced,   ///< The loss of power. One fdatasync for all pushes that wait.
};

enum class OnTrainerLoss {
  kFail,      ///< The job ends: everybody is told who was lost.
  kWait,      ///< Steps wait until the trainer is back.
  kContinue,  ///< It is given up: steps close without it.
};

struct ServerOptions {
  int server = 0;  ///< This one's number, in [0, servers).
  int servers = 1;
  std::string folder;  ///< Its own: log and snapshots. Empty: none, under kApplied alone.
  std::string load;    ///< A checkpoint to begin with, of any number of servers; empty: none.
  BlockMaker make_block = make_host_block;  ///< Where dense parameters live.
  Acknowledge acknowledge = Acknowledge::kLogged;
  OnTrainerLoss on_trainer_loss = OnTrainerLoss::kFail;
  std::chrono::milliseconds trainer_timeout{
      30'000};  ///< A trainer that is silent for longer is lost.
  /// Checkpoints are written below this folder alone; empty: anywhere.
  std::string save_root;
  int64_t snapshot_log_bytes = int64_t{4} << 30;  ///< A snapshot after so much log; 0: never.
  int64_t max_queue_bytes = int64_t{256} << 20;  ///< Of messages that wait; more is answered kBusy.
  std::chrono::milliseconds evict_period{60'000};  ///< Between evictions, where a table has rules.
};

class Server {
 public:
  /// Recovers what `folder` holds: newest snapshot, then the log behind it.
  /// Errors: ConfigError: the folder is another server's, in use by another process, or damaged
  /// (file and offset).
  Server(const ServerOptions& options, const Log& log);
  /// Stops as `stop`, without a snapshot.
  ~Server();

  /// Takes a request; `done` is called from the owner's thread, or at once where there is no room.
  void submit(Request request, Done done);

  /// Blocks until a client asked to stop, or `stop` was called. Errors: what ended the owner's
  /// thread (a log that cannot be written is not among it: see Code::kBusy).
  void wait();
  /// From any thread, also from a signal's watcher: answers what waits with kLost, and ends.
  void stop();

 private:
  class Owner;
  std::unique_ptr<Owner> owner_;
};

}  // namespace cohort::ps
