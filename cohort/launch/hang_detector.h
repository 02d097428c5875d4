// SPDX-License-Identifier: Apache-2.0
// Detects stalled collectives and reports the ranks that others wait for.
#pragma once
#include <chrono>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cohort/base/trace_page.h"
#include "cohort/launch/worker_group.h"

namespace cohort::launch {

/// Reads the workers' trace pages and /proc, and reports stalls.
///
/// A stall: a rank waits in one collective for stall_timeout. It is reported once, as a table of
/// all ranks, with the stacks of the missing ranks, which are requested by signal and awaited for
/// one second. A stopped rank (state T) counts as missing in any collective; one that was stopped
/// for the whole period is returned as failed, one that a debugger holds is not. Of a sub-group the
/// trace pages do not say who its members are: the ranks that are not in its collective are listed
/// as such, and none is returned as failed. Workers without a trace page are never reported.
/// Threads: none; nothing blocks.
class HangDetector {
 public:
  using Clock = std::chrono::steady_clock;
  struct Finding {
    std::string text;  ///< Whole lines for stderr; may be empty.
    std::optional<int> failed_rank;
    std::string why;  ///< "was stopped (state T) for 60 s while ...": the end of a sentence.
  };

  /// `options` and `log_dir` outlive it.
  HangDetector(const RunOptions& options, const std::string& log_dir);

  /// Discards the state of the last round, or the time in which the whole job was suspended.
  void reset();
  /// How often check() is due.
  std::chrono::milliseconds interval() const;
  /// Checks the workers of a running round.
  Finding check(std::span<const Worker> workers);
  /// One line for each rank: state, last collective, its number, tensor, call site, since when.
  std::string table(std::span<const Worker> workers) const;

 private:
  struct Snapshot {
    const Worker* worker = nullptr;
    std::optional<TraceRecord> record;
    pid_t pid = -1;    // Of the process that keeps the page, else the worker's.
    char state = '?';  // As /proc/PID/stat says; 'X': ended.

    bool waits() const;
    bool waits_in(const TraceRecord& collective) const;
  };
  struct Stall {
    TraceRecord where;         // The collective that ranks wait in.
    std::vector<int> missing;  // Those elsewhere; of a sub-group, also ranks that are no members.
    Clock::time_point report_at;
  };

  std::vector<Snapshot> take_snapshots(std::span<const Worker> workers) const;
  std::chrono::nanoseconds waited(const Snapshot& snapshot) const;
  void note_stopped(const std::vector<Snapshot>& snapshots);
  std::optional<Stall> find_stall(const std::vector<Snapshot>& snapshots) const;
  void request_stacks(const std::vector<Snapshot>& snapshots) const;
  bool stacks_are_complete(const std::vector<Snapshot>& snapshots) const;
  std::string report(const std::vector<Snapshot>& snapshots) const;
  std::string table(const std::vector<Snapshot>& snapshots) const;
  Finding find_stopped(const std::vector<int>& missing) const;

  const RunOptions& options_;
  const std::string& log_dir_;
  int64_t begun_ns_ = 0;
  Clock::time_point table_at_;
  std::map<int, Clock::time_point> stopped_since_;  // By rank; a debugger's hold does not count.
  std::optional<Stall> stall_;                      // Found, not yet reported.
  std::optional<TraceRecord> reported_;             // The last one reported.
};

}  // namespace cohort::launch
