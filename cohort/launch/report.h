// SPDX-License-Identifier: Apache-2.0
// Derives the job's exit code and report from the exits of its processes. Pure: starts and kills
// nothing.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "cohort/base/program.h"
#include "cohort/launch/worker.h"

namespace cohort::launch {

/// The end of one worker or server and what the launcher had done to it before.
struct Outcome {
  int rank = 0;  ///< A server's number, if it is one.
  pid_t pid = 0;
  ExitStatus status;
  int passed_signal = 0;  ///< The last stopping signal passed on to it; 0: none.
  bool stopped = false;  ///< It was sent SIGTERM or SIGKILL because another failed or time ran out.
  std::string note;      ///< Not empty: why the launcher itself declared that this rank failed.
  bool is_server = false;
  int64_t log_begin = 0;  ///< Size of its log when it started; the report shows only what follows.
  /// Its error file names its exit code, as run_program writes it.
  bool explained = false;

  /// What its exit code means. Codes 2, 3 and 4 mean something only of a program that explained
  /// them: pytest, wget and shells use them for errors of their own, which are kExitFailure.
  ExitCode meaning() const;
  /// Whether it ended neither well nor on request with a checkpoint.
  bool failed() const;
};

/// The outcome of the whole job.
struct JobOutcome {
  int exit_code = 0;
  ExitCode meaning = kExitOk;
  /// The process that failed first; none if none failed by itself.
  std::optional<Outcome> root_cause;
};

/// Returns the job's outcome, given `outcomes` in the order in which the exits were noticed.
///
/// A failure before any signal is the root cause: the first that is not a lost peer (a
/// consequence), else the first. Else, if a forwarded signal n ended a worker: 128 + n. Else a
/// failure after the signal, chosen likewise. Else 4 if any worker stopped on request, else 0.
JobOutcome job_outcome(std::span<const Outcome> outcomes);

/// Whether the error file `path` names `exit_code`.
bool explains(const std::string& path, int exit_code);

/// Returns "rank 1 (pid 123) was killed by signal 9 (Killed)" or "rank 1 (pid 123) exited with
/// code 1: <message>" ("server 1" likewise), the message from its error file in `log_dir`, if it
/// left one, cut after 4096 bytes; the outcome's note instead, if it has one.
std::string describe(const Outcome& outcome, const std::string& log_dir);

/// The warning about a process, "rank 1" or "server 1", that SIGKILL does not end.
std::string left_behind_line(const std::string& name, pid_t pid);

/// Returns the first frames of the stack that the rank left in its error file, a line each,
/// indented, if its error was neither its user's (exit code 2) nor a lost peer's (3); else nothing.
std::string indented_stack(const Outcome& outcome, const std::string& log_dir);

/// Returns "2 (Interrupt)".
std::string signal_name(int signal);

/// Returns the last `num_lines` lines of the file without its first `begin` bytes, each indented and
/// ended; empty if there are none. Of a line that was rewritten with carriage returns only the last
/// state counts.
std::string indented_tail(const std::string& path, int num_lines, int64_t begin = 0);

}  // namespace cohort::launch
