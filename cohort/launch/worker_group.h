// SPDX-License-Identifier: Apache-2.0
// The workers of one round on this node, from their start to their last byte.
#pragma once
#include <chrono>
#include <optional>
#include <poll.h>
#include <span>
#include <string>
#include <vector>

#include "cohort/base/fd.h"
#include "cohort/launch/environment.h"
#include "cohort/launch/reaper.h"
#include "cohort/launch/report.h"
#include "cohort/launch/signals.h"
#include "cohort/launch/stream.h"
#include "cohort/launch/terminal.h"

namespace cohort::launch {

/// Beyond the grace, for a checkpoint after a signal that asks the job to stop.
inline constexpr std::chrono::milliseconds kSaveTime{25'000};

/// What outlives a round. All references outlive the group.
struct RoundContext {
  const RunOptions& options;
  const std::string& program;      ///< As find_program returned it.
  const WorkerFunction& function;  ///< Empty: workers execute the program.
  const std::string& log_dir;
  const Reaper& reaper;
  const Signals& signals;
  LogWriter& logs;
  Terminal& out;
  Terminal& err;
  std::string servers;     ///< See WorkerInfo::servers.
  std::string job_secret;  ///< See WorkerInfo::job_secret.
};

/// One worker, and what the launcher keeps of it.
struct Worker {
  int rank = 0;
  int local_rank = 0;
  pid_t pid = -1;  ///< -1 once its session was ended.
  bool running = false;
  std::optional<std::chrono::steady_clock::time_point> killed_at{};  ///< SIGKILL went out.
  std::string note;                                                  ///< See Outcome::note.
  std::vector<Stream> streams;                                       ///< stdout, stderr.
  int restarts = 0;  ///< Times that it was restarted alone.
};

/// Starts one worker per local rank, copies what they write, notices how they end, and stops them.
///
/// When a worker fails, the others have options.grace to leave, then SIGTERM, 3 seconds later
/// SIGKILL. Where the job may restart nothing is gained by waiting: then SIGTERM goes out at once
/// and SIGKILL after the grace, unless all that is known is a lost peer (exit code 3). One that
/// SIGKILL does not end within kKillTime is left behind. Where workers are independent
/// (RunOptions), one that fails is restarted alone, max_restarts times in all, and under
/// on_trainer_loss "continue" the others then continue without it.
/// Threads: from the main thread, while there is no other (it forks).
class WorkerGroup {
 public:
  using Clock = std::chrono::steady_clock;
  using milliseconds = std::chrono::milliseconds;

  /// Starts the workers. `store`: rank 0's listening socket, on node 0 only. The job's first round
  /// empties the logs, a later one appends: in a shared folder they may be another node's.
  /// Errors: ConfigError if the program cannot be executed; no worker is left running.
  WorkerGroup(const RoundContext& context, const NodeInfo& node, Fd store);
  ~WorkerGroup();
  WorkerGroup(const WorkerGroup&) = delete;
  WorkerGroup& operator=(const WorkerGroup&) = delete;

  bool running() const;
  const NodeInfo& node() const { return node_; }
  std::span<const Worker> workers() const { return workers_; }
  /// The ends noticed so far, in their order.
  std::span<const Outcome> outcomes() const { return outcomes_; }

  /// Adds what poll() waits for.
  void add_polls(std::vector<pollfd>& polls) const;
  /// When poll() is due at the latest.
  std::optional<Clock::time_point> deadline() const;
  /// Reads what there is, notices ends, keeps deadlines; does not block, but to end what an
  /// independent worker has left behind. Returns lines to tell the user.
  std::vector<std::string> poll();

  /// Passes on a signal that asks the job to stop; SIGKILL follows 25 seconds after the grace.
  void pass_stop(int signal);
  /// Passes on any other signal, as all signals to every process group of the workers' sessions.
  void send(int signal) const;
  /// Stops the round: SIGTERM, and SIGKILL after `grace`. `why`, for example "server 0 failed", is
  /// reported with the workers that it ended. May be called again: the first reason counts.
  void stop(milliseconds grace, const std::string& why);
  void kill_now(const std::string& why);
  /// The workers were suspended for `pause`, which no deadline counts.
  void postpone(Clock::duration pause);
  /// Why workers were stopped, if they were.
  const std::string& stopped_because() const { return stopped_because_; }
  /// Declares that the running worker of `rank` failed, and kills it; `note` says why.
  void fail(int rank, const std::string& note);
  /// Gives rank 0's pseudo-terminal, if it has one, the launcher's window size.
  void pass_window_size() const;

  /// Kills what is left of the workers' sessions and reads the last bytes. Returns lines to tell
  /// the user: which workers are left behind, and whether logs are incomplete.
  std::vector<std::string> end();

 private:
  WorkerGroup(const RoundContext& context, const NodeInfo& node);
  void start(Worker& worker, int store_fd);
  Stream make_stream(const Worker& worker, int which, Channel& channel) const;
  Channel make_channel(int rank, int local_rank, int which) const;
  Terminal& terminal(int which) const;
  bool may_start_again() const;
  void notice_exits();
  void note_end(Worker& worker, ExitStatus status);
  bool recover_from(Worker& worker, const Outcome& outcome);
  void start_again(Worker& worker, const std::string& reason);
  void keep_deadlines();
  std::vector<std::string> kill_workers();
  static void drain(std::span<Worker> workers);

  const RoundContext context_;
  const NodeInfo node_;
  std::vector<std::vector<int>> cores_;  // By local rank; empty: not bound.
  int num_threads_ = 1;
  std::vector<Worker> workers_;
  std::vector<Outcome> outcomes_;
  std::vector<std::string> lines_;
  int restarts_ = 0;  // Of single workers.
  int passed_signal_ = 0;
  bool failed_ = false;
  std::string stopped_because_;
  bool stopping_ = false;  // SIGTERM or SIGKILL went out on our own account.
  std::optional<Clock::time_point> term_at_;
  std::optional<Clock::time_point> kill_at_;
};

}  // namespace cohort::launch
