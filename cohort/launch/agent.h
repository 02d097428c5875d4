// SPDX-License-Identifier: Apache-2.0
// What runs the workers of one node: the event loop over signals, terminals, servers and workers.
// How rounds follow each other is for LocalAgent and ElasticAgent to decide.
#pragma once
#include <chrono>
#include <memory>
#include <optional>
#include <poll.h>
#include <string>
#include <unistd.h>
#include <vector>

#include "cohort/launch/hang_detector.h"
#include "cohort/launch/log_directory.h"
#include "cohort/launch/options.h"
#include "cohort/launch/reaper.h"
#include "cohort/launch/server_group.h"
#include "cohort/launch/signals.h"
#include "cohort/launch/store_socket.h"
#include "cohort/launch/terminal.h"
#include "cohort/launch/worker_group.h"

namespace cohort::launch {

/// launcher.h says what `run` does. `options` and `function` outlive the agent.
/// Threads: the main thread only.
class Agent {
 public:
  /// Errors: ConfigError, as launch::run.
  Agent(const RunOptions& options, const WorkerFunction& function);
  virtual ~Agent();
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  /// Runs the job to its end and returns its exit code. Once.
  int run();

 protected:
  using Clock = std::chrono::steady_clock;

  /// The rounds, from the first to the return of conclude().
  virtual int run_job() = 0;
  /// What else run_once() waits for, and handles after signals.
  virtual void add_polls(std::vector<pollfd>&) const {}
  virtual void handle_events() {}

  /// Binds the socket that the next round's rank 0 inherits.
  void bind_store();
  /// Starts the workers of `node`: group_.
  void start_round(const NodeInfo& node);
  /// One iteration of the event loop: waits for events, or `until`, then handles all of them.
  void run_once(std::optional<Clock::time_point> until = std::nullopt);
  void end_group();

  bool stop_requested() const { return stop_signal_ != 0; }
  /// Whether leave_at_ has come.
  bool must_leave() const { return leave_at_ && Clock::now() >= *leave_at_; }
  void handle_signal(int signal);
  void print_line(const std::string& text);
  /// Reports how the job ended, and returns its exit code.
  int conclude(const JobOutcome& job);
  int finish(const std::string& text, int code);

  const RunOptions& options_;
  const WorkerFunction& function_;
  const std::string program_;
  LogDirectory logs_;
  Signals signals_;
  Reaper reaper_;
  LogWriter log_writer_;
  Terminal out_{STDOUT_FILENO};
  Terminal err_{STDERR_FILENO};
  const std::string& log_dir_ = logs_.path();
  HangDetector hang_detector_{options_, log_dir_};
  StoreSocket store_;                     // Bound and not yet inherited.
  std::unique_ptr<ServerGroup> servers_;  // Of a job that has some.
  bool server_failed_first_ = false;
  std::unique_ptr<WorkerGroup> group_;
  int num_stop_requests_ = 0;
  int stop_signal_ = 0;                        // The last one that asks the job to stop.
  std::optional<Clock::time_point> leave_at_;  // Once stopped: the end of waiting for other nodes.
  Clock::time_point check_at_ = Clock::now();

 private:
  void announce_cores();
  void poll_servers();
  void poll_group();
  std::string job_secret(const NodeInfo& node) const;
  void wait_for_events(std::optional<Clock::time_point> until);
  std::chrono::milliseconds poll_timeout(std::optional<Clock::time_point> until) const;
  void suspend();
  void check_for_hangs();
  std::string report(const Outcome& root_cause);
};

}  // namespace cohort::launch
