// SPDX-License-Identifier: Apache-2.0
// Starting one worker process, and asking how it ended.
#pragma once
#include <chrono>
#include <optional>
#include <string>
#include <sys/types.h>
#include <vector>

#include "cohort/launch/options.h"
#include "cohort/launch/reaper.h"
#include "cohort/launch/signals.h"

namespace cohort::launch {

/// What one worker process is started with. Its stdin is /dev/null.
struct ProcessOptions {
  std::string program;                   ///< As find_program returned it.
  std::vector<std::string> command;      ///< argv, with the program's name first.
  std::vector<std::string> environment;  ///< "NAME=value" each.
  int stdout_fd = -1;
  int stderr_fd = -1;
  int inherited_fd = -1;   ///< Kept open in the worker under its number; -1: none.
  std::vector<int> cores;  ///< Those it is pinned to; empty: those of this process.
  /// If there is one, the process calls it with `local_rank` instead of executing the program, and
  /// ends by _exit with what it returns. It must not throw.
  WorkerFunction function{};
  int local_rank = 0;
};

/// How a worker ended: by exit code, or by signal (then exit_code is 128 + signal).
struct ExitStatus {
  int exit_code = 0;
  int signal = 0;  ///< 0: it exited by itself.
};

/// Returns the path that executing `name` would take: `name` itself if it holds a slash, else the
/// first match in PATH.
/// Errors: ConfigError if it is not found, a folder, or not executable.
std::string find_program(const std::string& name);

/// Starts a process that leads its own session and process group (both numbered as the pid).
/// It is registered with `reaper` and dies with the launcher (parent-death signal) before its
/// program begins. Returns once the program runs. A function finds the environment and standard
/// streams of `options`; of other descriptors it has `inherited_fd` and those that exec would not
/// close. Call from the main thread, with no other alive.
/// Errors: ConfigError if the program cannot be executed; nothing is left running.
pid_t start_process(const ProcessOptions& options, const Reaper& reaper, const Signals& signals);

/// Returns how the child `pid` ended, or nothing while it runs. The child is not reaped: until
/// reap() its number, and so its session's, cannot be reused by an unrelated process.
std::optional<ExitStatus> peek_exit(pid_t pid);

/// A process that has not ended this long after SIGKILL is blocked in the kernel (state D) by a
/// driver or a file system.
inline constexpr std::chrono::milliseconds kKillTime{5000};

/// Whether a process that was sent SIGKILL at `killed_at` should have ended by now.
inline bool survives_kill(const std::optional<std::chrono::steady_clock::time_point>& killed_at) {
  return killed_at && std::chrono::steady_clock::now() - *killed_at > kKillTime;
}

/// Waits until the child `pid`, which was sent SIGKILL or has ended, is gone, at most until
/// `deadline`; returns whether it is.
bool reap(pid_t pid, std::chrono::steady_clock::time_point deadline);

}  // namespace cohort::launch
