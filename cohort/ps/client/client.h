// SPDX-License-Identifier: Apache-2.0
// A trainer's access to all servers of a job: parameters and rows, on whichever server they are.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cohort/ps/client/server_link.h"
#include "cohort/ps/job.h"
#include "cohort/ps/rpc/security.h"

namespace cohort::ps {

struct ClientOptions {
  std::vector<std::string> servers;  ///< Endpoints, in the order of their numbers.
  uint32_t trainer = 0;              ///< kNoTrainer: reads only.
  SecurityOptions security;
  int connections = 1;  ///< To each server.
  /// Trainer 0: rolls the job back to this checkpoint of all servers, or to its beginning ("").
  /// None: the job continues. The servers must see the folder. The other trainers join afterwards:
  /// a process that joined before is rejected.
  std::optional<std::string> restore;
  /// kAsync: after a restart the program makes its pushes after pushed_before() again. A server that
  /// has such a push keeps the first one. False: its pushes are new ones; the one in which it was
  /// killed may have reached some servers only. kSync: pushes are of steps, always made again.
  bool repeats_pushes = false;
  LinkOptions link;  ///< Timeouts and credits; number, endpoint and trainer are filled in.
};

/// A dense parameter as the job cuts it.
struct ParameterSize {
  std::string name;
  int64_t elements = 0;
};

/// Rows to pull or push. Spans are borrowed: until `wait` returns for pulls, for the call for
/// pushes.
struct PullRows {
  uint32_t table = 0;               ///< Number in JobOptions::tables; ascending, each once.
  std::span<const uint64_t> ids{};  ///< Any.
  std::span<float> weights{};       ///< [ids.size() x width]
};
struct PushRows {
  uint32_t table = 0;
  std::span<const uint64_t> ids{};     ///< Each once.
  std::span<const float> gradients{};  ///< [ids.size() x width]
};

/// A pull in flight. Its Client must outlive the call of wait().
class PendingPull {
 public:
  PendingPull(PendingPull&&) noexcept;
  PendingPull& operator=(PendingPull&&) noexcept;
  ~PendingPull();
  /// Blocks until all servers have replied, and copies the values into the caller's spans. Call it
  /// once.
  /// Returns: the least number of steps among the servers' states.
  /// Errors: as ReplyFuture::wait; also c10::DistError if a reply does not match the request:
  /// nothing outside the given spans is ever written.
  uint64_t wait();

 private:
  friend class Client;
  struct State;
  explicit PendingPull(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// Joined to every server of a job.
///
/// Threads: one for pushes; pulls, step() and give_up_pushes() from any. A pull sees the pushes
/// that had returned when it was called.
class Client {
 public:
  /// Makes the channel to a server; for tests without a network.
  using ChannelMaker = std::function<std::unique_ptr<Channel>(int server)>;

  /// Connects and joins; trainer 0 sends the job to the servers. Blocks until all servers have
  /// replied and know the job.
  /// Errors: ConfigError: bad options, servers with another job, an invalid checkpoint;
  ///         c10::DistError: no reply.
  Client(const ClientOptions& options, const JobOptions& job, const ChannelMaker& channels = {});
  /// Closes the connections without leaving: the trainer then counts as lost.
  ~Client();

  const JobOptions& job() const { return job_; }
  /// Dense parameters in the order of the job's blocks: what `parameters` below must be.
  const std::vector<ParameterSize>& parameters() const { return parameters_; }

  /// Whether the servers still need initial values of the dense parameters.
  bool needs_initial_values() const { return !is_initialised_; }
  /// Sends the initial values. Blocks. Trainer 0 only.
  void initialise(std::span<const std::span<const float>> parameters);

  /// kSync: steps that this trainer has pushed or need not push; its next push is of step() + 1.
  /// After the constructor: the closed steps. All trainers that join find the same number, and the
  /// parameters after it. A restarted trainer pushes the next step again; a server that has that
  /// push already keeps the first one.
  uint64_t step() const { return step_; }

  /// The step after which a restarted program resumes. kSync: steps that were closed since
  /// the job began, with this trainer or without; kAsync: pushes of this trainer that all servers
  /// have. 0 in a new job.
  uint64_t pushed_before() const { return pushed_before_; }

  /// Requests rows, and all parameters unless `parameters` is empty. kSync: of the state after
  /// step() steps. Returns at once; but kSync with several servers blocks until all of them have
  /// acknowledged the last push, unless it is a prediction.
  PendingPull pull(std::span<const PullRows> rows, std::vector<std::span<float>> parameters,
                   bool is_prediction = false);

  /// Pushes gradients: of rows, and of all parameters unless `parameters` is empty. kSync: closes
  /// this trainer's step. Blocks only while too many bytes are in flight; kSync with several
  /// servers: until all of them have acknowledged the push before, and so does pull().
  /// Errors: as ReplyFuture::wait, of this or an earlier push. The servers may then have different
  /// parts of a push: every later push and flush fails.
  void push(std::span<const PushRows> rows, std::vector<std::span<const float>> parameters);
  /// Waits until every push is acknowledged; kSync: also confirms them, so that steps can close
  /// that no pull follows.
  /// Errors: as push.
  void flush();
  /// Makes calls of `push` and `flush` that block in other threads, and all later ones, throw
  /// c10::DistError.
  void give_up_pushes();

  /// Writes a checkpoint of all servers after step() steps to `folder`, a path that they all see.
  /// The previous checkpoint in `folder` stays loadable until the new one is complete. Blocks. One
  /// trainer calls it; with others training on in kAsync, servers write theirs at different
  /// moments.
  void save(const std::string& folder);
  /// One line of JSON a server. Blocks.
  std::vector<std::string> status();
  /// Ends the servers. Blocks.
  void stop_servers();
  /// Flushes, and tells the servers that no more pushes follow: steps close without this trainer.
  /// Blocks.
  void leave();

 private:
  friend class PendingPull;
  struct Spread;
  void check_numbers();
  void restore(const std::string& checkpoint);
  void join();
  bool confirms() const;
  void await_acknowledged();
  void all_or_nothing(const std::function<void()>& pushes);
  void send_push(std::span<const PushRows> rows,
                 const std::vector<std::span<const float>>& parameters,
                 const std::vector<Spread>& spreads);
  void round_rows(const PushRows& rows, size_t server, const Spread& spread, uint64_t sequence,
                  std::span<uint16_t> to) const;
  void check_rows(const char* call, uint32_t table, size_t ids, size_t floats) const;
  template <class Values>
  void check_parameters(const char* call, const std::vector<Values>& parameters) const;
  std::vector<SectionShape> block_shapes(int server, bool with_values, WireDtype dtype) const;

  ClientOptions options_;
  JobOptions job_;
  uint64_t fingerprint_;  // Of the job.
  std::vector<ParameterSize> parameters_;
  std::vector<size_t> parameter_of_block_;
  const std::unique_ptr<TimerThread> timer_;
  std::vector<std::unique_ptr<ServerLink>> links_;
  bool is_initialised_ = false;
  std::atomic<uint64_t> step_ = 0;
  uint64_t pushed_before_ = 0;
  std::vector<std::atomic<uint64_t>> sequences_;  // Of the last push, by server.
};

}  // namespace cohort::ps
