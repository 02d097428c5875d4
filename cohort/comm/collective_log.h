// SPDX-License-Identifier: Apache-2.0
// What this rank has called, group by group: for the trace page, for the flight record that a rank
// publishes when a job has failed, and to find where two ranks' calls differ. Knows nothing of the
// network.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cohort/comm/rank_trace.h"

namespace cohort::comm {

/// A collective that all ranks of its group must call alike.
struct MatchedCall {
  std::string group;   ///< Equal on the group's ranks, different for each group of the job.
  int64_t number = 0;  ///< Among the group's matched collectives, from 1: the log's to set.
  std::string what;    ///< What must be equal: operation, dtype, shape.
  std::string site;    ///< Where it was called; may be empty.
  bool operator==(const MatchedCall&) const = default;
};

/// A collective that a rank has called and its device has not ended.
struct DeviceWait {
  MatchedCall call;
  std::string name;        ///< The group's, for users.
  std::vector<int> ranks;  ///< The group's, as numbers of the job.
  int64_t ms = 0;          ///< Since the call.
  int64_t timeout_ms = 0;  ///< The group's.

  /// When ranks compare what they called: after a tenth of the timeout, but two seconds at least.
  /// Where the host runs ahead of its device, as it should, calls wait there for seconds.
  int64_t stuck_ms() const;
  bool is_stuck() const { return ms >= stuck_ms(); }
  bool is_overdue() const { return ms >= timeout_ms; }
};

/// What a rank does at one moment.
struct FlightRecord {
  bool waiting = false;                             ///< Inside a collective, else outside of all.
  int64_t ms = 0;                                   ///< Since when.
  std::string last;                                 ///< The present collective, or the last one.
  std::vector<MatchedCall> matched;                 ///< The last 64 at most, the oldest first.
  std::map<std::string, int64_t> num_matched = {};  ///< How many there were, by group.
  std::vector<DeviceWait> device_waits = {};  ///< Those that are stuck, the oldest of each group.
};

/// One rank's log, shared by the group of all ranks and its sub-groups.
///
/// Threads: the caller of collectives writes, the watching thread reads; any may.
class CollectiveLog {
 public:
  CollectiveLog(int rank, int world_size, std::shared_ptr<RankTrace> trace);
  ~CollectiveLog();
  CollectiveLog(const CollectiveLog&) = delete;
  CollectiveLog& operator=(const CollectiveLog&) = delete;

  /// Notes that a collective begins; sets pid, rank, state and time. `matched`: what takes part in
  /// comparisons, if it does. Returns its number, else 0.
  int64_t begin(TraceRecord record, std::optional<MatchedCall> matched);
  /// Notes a call that takes part in comparisons and is not waited for. Returns its number.
  int64_t add(MatchedCall matched);
  /// Notes that the innermost collective begun is over.
  void end();

  /// How long this rank has been inside its collective; nothing if it is outside.
  std::optional<int64_t> waiting_ns() const;

  FlightRecord flight_record() const;

 private:
  int64_t add_locked(MatchedCall matched);

  const TraceRecord blank_;  // pid, rank, world size
  const std::shared_ptr<RankTrace> trace_;
  mutable std::mutex mutex_;
  std::deque<MatchedCall> matched_;             // guarded by mutex_; oldest first
  std::map<std::string, int64_t> num_matched_;  // guarded by mutex_; by group
  std::vector<TraceRecord> underway_;           // guarded by mutex_; innermost last
  TraceRecord last_;  // guarded by mutex_; the present, or what was called last
};

/// By rank. Ranks without a record are absent.
using FlightRecords = std::map<int, FlightRecord>;

/// Finds the first collective that ranks of a group called differently, such as
/// "rank 1 calls broadcast from 0 of float32[4] at x.cpp:12 where rank 0 calls all_reduce(sum) of
/// float32[8] at y.cpp:9". Nothing if all that is known agrees.
std::optional<std::string> find_mismatch(const FlightRecords& records);

/// Says what each rank does whose present call is not the most frequent one: "rank 2 computes
/// since 12.3 s, last called all_reduce(sum) of float32[8] at y.cpp:9". Empty if all do the same.
std::string describe_others(const FlightRecords& records);

/// Says which ranks have not called what the devices of others wait for: "rank 1 has not come to
/// all_reduce(sum) of float32[8] at y.cpp:9, call 7 of group "world", for which the devices of ranks
/// 0, 2 wait since 60.0 s: outside of collectives since 61.2 s, last called ..."; or that all have
/// called it. Empty if no device waits.
std::string describe_device_waits(const FlightRecords& records);

}  // namespace cohort::comm
