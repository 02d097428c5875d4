// SPDX-License-Identifier: Apache-2.0
// The parameter servers of a job on this node, beside its workers.
#pragma once
#include <chrono>
#include <memory>
#include <optional>
#include <poll.h>
#include <string>
#include <vector>

#include "cohort/base/fd.h"
#include "cohort/launch/log_writer.h"
#include "cohort/launch/options.h"
#include "cohort/launch/reaper.h"
#include "cohort/launch/report.h"
#include "cohort/launch/signals.h"
#include "cohort/launch/stream.h"

namespace cohort::launch {

/// Starts `cohort ps server` processes, keeps them running while the workers need them, and stops
/// them.
///
/// Each server has a unix socket in a folder that only this user may enter, a folder for its state,
/// <servers' folder>/server.<id>, and one log, server.<id>.log, for both its streams; all have the
/// job's secret. One that ends before stop() is started again with the same socket and folder, up
/// to options.servers.max_restarts times in all; then, or if it ended with exit code 2, that is
/// failure().
/// Threads: from the main thread, while there is no other (it forks).
class ServerGroup {
 public:
  using Clock = std::chrono::steady_clock;
  using milliseconds = std::chrono::milliseconds;

  /// Starts the servers that `options` names. All references outlive the group.
  /// Errors: ConfigError if the program cannot be executed, or a folder not be made; no server is
  /// left running.
  ServerGroup(const RunOptions& options, const std::string& log_dir, LogWriter& logs,
              const Reaper& reaper, const Signals& signals);
  ~ServerGroup();
  ServerGroup(const ServerGroup&) = delete;
  ServerGroup& operator=(const ServerGroup&) = delete;

  bool running() const;
  /// "unix:PATH,unix:PATH", by the servers' numbers.
  const std::string& endpoints() const { return endpoints_; }
  /// What servers and trainers prove by that they are of this job.
  const std::string& job_secret() const { return job_secret_; }

  /// Adds what poll() waits for.
  void add_polls(std::vector<pollfd>& polls) const;
  /// When poll() is due at the latest.
  std::optional<Clock::time_point> deadline() const;
  /// Reads what there is, notices ends, starts again, keeps the deadline; does not block. Returns
  /// lines to tell the user.
  std::vector<std::string> poll();
  /// The end of a server that the job does not survive.
  const std::optional<Outcome>& failure() const { return failure_; }

  /// Sends `signal` to all.
  void send(int signal) const;
  /// The workers are gone: SIGTERM, and SIGKILL after `grace`. May be called again.
  void stop(milliseconds grace);
  void kill_now();
  /// The servers were suspended for `pause`, which no deadline counts.
  void postpone(Clock::duration pause);
  /// Kills what is left of the servers' sessions and reads the last bytes. Returns a line for each
  /// server that SIGKILL does not end.
  std::vector<std::string> end();

 private:
  struct Server {
    int id = 0;
    std::string endpoint;
    std::unique_ptr<Stream> log;
    int64_t log_end = 0;  // Of the stream that was cleared.
    pid_t pid = -1;
    bool running = false;
  };

  struct Key {};  // For the constructor that the public one delegates to.
  ServerGroup(Key, const RunOptions& options, const std::string& log_dir, LogWriter& logs,
              const Reaper& reaper, const Signals& signals);
  void start(Server& server, bool again);
  bool clear(Server& server);
  std::vector<std::string> arguments(const Server& server) const;
  std::string folder(const Server& server) const;
  std::optional<std::string> notice_exit(Server& server);

  const RunOptions& options_;
  const std::string& log_dir_;
  LogWriter& logs_;
  const Reaper& reaper_;
  const Signals& signals_;
  std::string program_;
  std::string
      sockets_;  // The folder of the sockets, and of the secret for clients outside of the job.
  const std::string job_secret_;
  std::string endpoints_;
  std::vector<Server> servers_;
  int num_restarts_ = 0;
  std::optional<Outcome> failure_;
  bool stopping_ = false;
  std::optional<Clock::time_point> killed_at_;  // SIGKILL: how a server ends means nothing now.
  std::optional<Clock::time_point> kill_at_;
};

}  // namespace cohort::launch
