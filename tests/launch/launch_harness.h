// SPDX-License-Identifier: Apache-2.0
// Runs the real `cohort` program in tests: streams, signals, exit code.
#pragma once
#include <string>
#include <sys/types.h>
#include <vector>

#include "cohort/base/fd.h"

namespace cohort::launch {

/// A fresh folder, removed with all it holds.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }
  std::vector<std::string> names() const;

 private:
  std::string path_;
};

/// A function of the shell: `explained CODE` ends as run_program does, with a code that the
/// launcher knows to be Cohort's.
inline const std::string kExplained =
    "explained() { echo \"{\\\"exit_code\\\": $1}\" > $COHORT_ERROR_FILE; exit $1; };";

/// What a program left when it ended.
struct Ended {
  int exit_code = -1;  ///< 128 + n if signal n killed it.
  std::string out;
  std::string err;
};

/// One running program; killed by the destructor if it still runs.
class Launched {
 public:
  /// Starts `command`, with TMPDIR a folder of its own.
  /// `environment`: "NAME=value" each, beside what this process has.
  explicit Launched(const std::vector<std::string>& command,
                    const std::vector<std::string>& environment = {});
  ~Launched();
  Launched(const Launched&) = delete;
  Launched& operator=(const Launched&) = delete;

  pid_t pid() const { return pid_; }
  const TemporaryFolder& temporary() const { return folder_; }
  /// Reads stdout until it holds `num_lines` lines in all; returns everything so far.
  std::string read_lines(int num_lines);
  /// Stops reading stdout, as a reader that goes away.
  void close_out() { out_.reset(); }
  /// Waits until stderr holds `part` `count` times, then returns everything so far.
  std::string wait_for_err(const std::string& part, int count = 1) const;
  void send(int signal) const;
  /// Reads both streams to their ends and waits.
  Ended wait();

 private:
  bool read_some();

  TemporaryFolder folder_;
  pid_t pid_ = -1;
  Fd out_;
  std::string text_;
};

/// Returns the command line of `cohort run` with these flags and this program.
std::vector<std::string> cohort_run(std::vector<std::string> flags,
                                    const std::vector<std::string>& program);
/// The same with a shell script as program.
std::vector<std::string> cohort_run_sh(std::vector<std::string> flags, const std::string& script);

/// Returns the path of the `cohort` program under test.
std::string cohort_program();
/// Returns the path of this test program; "--worker NAME" makes it a worker (launch_harness.cpp).
std::string this_program();
std::string read_file(const std::string& path);
std::vector<std::string> sorted_lines(const std::string& text);
/// Waits until the file exists and is not empty, then returns its text.
std::string wait_for_file(const std::string& path);

/// Watches a process that need not be a child. Make it while the process runs.
class Watched {
 public:
  explicit Watched(pid_t pid);
  /// Waits for the end; returns false after a minute.
  bool wait_for_end() const;

 private:
  Fd pidfd_;
};

}  // namespace cohort::launch
