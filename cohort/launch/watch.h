// Where every rank of this node stands, and which one keeps the others waiting.
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

/// Reads the workers' trace pages and /proc, and says what is worth saying.
///
/// A stall: a rank waits in one collective for stall_timeout. It is reported once, as a table of
/// all ranks, with the stacks of those that have not come: they are asked for by signal and have
/// one second to answer. A stopped rank (state T) counts as not there wherever it stands; one that
/// was stopped all that time is returned as failed, one that a debugger holds is not. Workers that
/// keep no trace page are never blamed. Threads: none; nothing blocks.
class Watch {
 public:
  using Clock = std::chrono::steady_clock;
  struct Finding {
    std::string text;  ///< Whole lines for stderr; may be empty.
    std::optional<int> failed_rank;
    std::string why;  ///< "was stopped (state T) for 60 s while ...": the end of a sentence.
  };

  /// `options` and `log_dir` outlive it.
  Watch(const RunOptions& options, const std::string& log_dir);

  /// Forgets the last round, or the time in which the whole job was suspended.
  void begin();
  /// How often look() is due.
  std::chrono::milliseconds interval() const;
  /// Looks at the workers of a running round.
  Finding look(std::span<const Worker> workers);
  /// One line for each rank: state, last collective, its number, tensor, call site, since when.
  std::string table(std::span<const Worker> workers) const;

 private:
  struct Sight {
    const Worker* worker = nullptr;
    std::optional<TraceRecord> record;
    pid_t pid = -1;    // Of the process that keeps the page, else the worker's.
    char state = '?';  // As /proc/PID/stat says; 'X': ended.

    bool waits() const;
    bool waits_in(const TraceRecord& collective) const;
  };
  struct Stall {
    TraceRecord where;  // The collective that is waited in.
    std::vector<int> missing;
    Clock::time_point report_at;
  };

  std::vector<Sight> see(std::span<const Worker> workers) const;
  std::chrono::nanoseconds waited(const Sight& sight) const;
  void note_stopped(const std::vector<Sight>& sights);
  std::optional<Stall> find_stall(const std::vector<Sight>& sights) const;
  void ask_for_stacks(const std::vector<Sight>& sights) const;
  bool stacks_are_there(const std::vector<Sight>& sights) const;
  std::string report(const std::vector<Sight>& sights) const;
  std::string table(const std::vector<Sight>& sights) const;
  Finding judge_stopped(const std::vector<int>& missing) const;

  const RunOptions& options_;
  const std::string& log_dir_;
  int64_t begun_ns_ = 0;
  Clock::time_point table_at_;
  std::map<int, Clock::time_point> stopped_since_;  // By rank; a debugger's hold does not count.
  std::optional<Stall> stall_;                      // Found, not yet reported.
  std::optional<TraceRecord> reported_;             // The last one reported.
};

}  // namespace cohort::launch
