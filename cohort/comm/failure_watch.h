// SPDX-License-Identifier: Apache-2.0
// Finds out which ranks are lost, and which called what, after an operation of one rank has failed.
#pragma once
#include <ATen/core/ivalue.h>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cohort/comm/collective_log.h"
#include "cohort/comm/store_connection.h"

namespace cohort::comm {

/// What all survivors of a failure agree on.
struct FailureReport {
  std::vector<int> lost;  ///< Ranks of the job that did not answer.
  std::string mismatch;   ///< Where the ranks' calls differ; empty if they agree.
  /// How the lost were found; where none is, what ranks do that are not in the operation of the
  /// most, empty if all are in it.
  std::string others;
};

/// What the watching thread asks of its rank, and does to it. Called from that thread.
struct FailureWatchCalls {
  std::function<FlightRecord()> flight_record;         ///< CollectiveLog::flight_record.
  std::function<std::optional<int64_t>()> waiting_ns;  ///< CollectiveLog::waiting_ns.
  /// What its devices wait in, the oldest call of each group; empty: it has none. It must not block:
  /// a rank whose watching thread does is lost.
  std::function<std::vector<DeviceWait>()> device_waits = {};
  /// Whether a rank's process is known to have ended; empty: of none.
  std::function<bool(int rank)> has_ended = {};
  std::function<void()> abort;  ///< Ends this rank's waiting: the group is dead.
};

/// A rank's part in the liveness check after a failure.
///
/// The first rank whose operation fails declares it in the store. Every rank's watching thread sees
/// that, answers with its rank's flight record even while its main thread is stuck in an operation,
/// and ends that operation. A rank is lost as soon as its process has ended, or when it has not
/// answered within two seconds, dead or not. The declarer then writes the failure report, and every
/// watcher keeps it, so that all survivors name the same ranks. A store that is gone, or silent, means
/// that rank 0, its host, is lost.
///
/// A rank that waits for more than two seconds publishes its flight record; rank 0's watcher
/// compares them and declares a failure if two ranks called different collectives.
///
/// The host does not wait for collectives of devices, so none of its operations fails when another
/// rank does not come, or is lost. For these the watching thread looks at what the device was last
/// known to wait in. A rank whose device waits in a call publishes its record too
/// (DeviceWait::stuck_ms), and declares a failure when the group's timeout is reached: two seconds
/// later at most. Its group's ranks `follow` each other.
///
/// Cost: one wait for the declaration in the store every two seconds; on rank 0, and on every rank
/// where the store can only be polled, one every quarter of a second.
///
/// Owner:   the group of all ranks.
/// Threads: `report` from one thread; blocks at most about six seconds.
class FailureWatch {
 public:
  /// The watch owns `connection`. `host_dies_with_rank_0`: rank 0 holds
  /// the store.
  FailureWatch(StoreConnection connection, int rank, int world_size, bool host_dies_with_rank_0,
               FailureWatchCalls calls);
  /// Local: stops the watching thread, even where it waits for a silent store.
  ~FailureWatch();

  /// Declares a failure, or joins the one declared, and returns its report.
  FailureReport report();

  /// From now on this rank beats in the store every two seconds, and takes `peer`, which shall do the
  /// same, for lost when its process has ended or it has not beaten for five looks. From any thread.
  void follow(int peer);

 private:
  void run(const std::stop_token& stop);
  void watch_store(const std::stop_token& stop);
  void publish_if_stuck();
  bool a_device_is_overdue() const;
  bool published_records_differ();
  bool followed_rank_is_silent();
  void check_liveness();
  FailureReport collect_records();
  FailureReport store_lost(const std::string& how) const;
  std::chrono::milliseconds until_next_look() const;
  bool wait_for_key(const std::string& key, std::chrono::milliseconds limit);
  bool has_ended(int peer) const;
  bool wait_for_key_of(int peer, const std::string& key,
                       std::chrono::steady_clock::time_point deadline);
  bool wait_or_wake(const std::string& key, std::chrono::milliseconds limit);
  void wake();
  void decide(FailureReport report);

  const StoreConnection connection_;
  const StorePtr& store_ = connection_.store;  // used by the watching thread alone
  const int rank_;
  const int world_size_;
  const bool host_dies_with_rank_0_;
  const FailureWatchCalls calls_;
  struct Beats {
    int64_t num_seen = 0;
    int num_silent_looks = 0;
  };
  std::vector<DeviceWait> device_waits_;  // the watching thread's: at its last look
  std::vector<MatchedCall> published_;    // the watching thread's: its calls, then its devices'
  int64_t num_published_ = 0;             // the watching thread's
  std::chrono::steady_clock::time_point beat_at_;  // the watching thread's
  std::map<int, Beats> followed_;                  // the watching thread's; by rank
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::vector<int> to_follow_;           // guarded by mutex_
  bool declare_ = false;                 // guarded by mutex_
  bool woken_ = false;                   // guarded by mutex_
  bool ended_ = false;                   // guarded by mutex_: the thread uses the store no more
  std::optional<FailureReport> report_;  // guarded by mutex_
  std::jthread thread_;
};

}  // namespace cohort::comm
