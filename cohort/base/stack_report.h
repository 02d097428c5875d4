// SPDX-License-Identifier: Apache-2.0
// Writes the main thread's stack to a file when a launcher asks by signal: where does a silent rank
// hang?
#pragma once
#include <semaphore.h>
#include <string>
#include <thread>

namespace cohort {

/// Answers stack_signal(): the handler notes the main thread's return addresses, a thread of its
/// own turns them into names and replaces the file in one step. One function per line, innermost
/// first; a function of a program without exported symbols shows as program(+offset), which
/// addr2line reads.
///
/// Owner: one at a time in a process (a second one does nothing while the first lives). The
/// program's own use of that signal is replaced; afterwards the signal is ignored. A process that
/// is stopped (SIGSTOP) cannot answer. A launcher may send the signal once the trace page exists:
/// make this object before the page.
class StackReport {
 public:
  explicit StackReport(std::string path);
  ~StackReport();
  StackReport(const StackReport&) = delete;
  StackReport& operator=(const StackReport&) = delete;

 private:
  void run(const std::stop_token& stop);

  const std::string path_;
  bool active_ = false;
  std::jthread thread_;
};

}  // namespace cohort
