// SPDX-License-Identifier: Apache-2.0
// What this process shows its launcher: the page of its last collective and, on a signal, its main
// thread's stack. One for all groups of the process.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/stack_report.h"
#include "cohort/base/trace_page.h"

namespace cohort::comm {

class CollectiveLog;

/// The trace page of one file, shared by the logs of all groups.
///
/// While one group waits inside a collective, another one's end does not hide that: the page shows
/// the wait that began last.
/// Threads: any.
class RankTrace {
 public:
  /// The trace of `file`: a process has one as long as it is held. Empty: a new one, in memory
  /// only.
  /// Errors: ConfigError that names a file that cannot be made.
  static std::shared_ptr<RankTrace> open(const std::string& file);

  /// Shows what `log` does now.
  void show(const CollectiveLog* log, const TraceRecord& record);
  /// `log` ends: what it waited for is shown no more.
  void forget(const CollectiveLog* log);

 private:
  explicit RankTrace(const std::string& file);

  const std::unique_ptr<StackReport>
      stack_report_;  // before the page: a launcher that sees the page may send the signal
  TracePage page_;
  std::mutex mutex_;
  std::vector<std::pair<const CollectiveLog*, TraceRecord>>
      waiting_;  // guarded by mutex_; the last began last
};

}  // namespace cohort::comm
