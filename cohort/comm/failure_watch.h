// Finds out who is gone after one rank's operation has failed.
#pragma once
#include <ATen/core/ivalue.h>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace c10d {
class Store;
}

namespace cohort::comm {

/// A rank's part in the roll call after a failure.
///
/// The first rank whose operation fails declares it in the store. Every rank's watching thread sees
/// that within a quarter of a second and answers, even while its main thread is stuck in an
/// operation. Who has not answered within two seconds is lost; the declarer writes the verdict, and
/// every watcher keeps it, so that all survivors name the same ranks. A store that is gone
/// means that rank 0, its host, is lost.
///
/// Owner: ProcessGroup. Threads: `lost_ranks` from one thread; blocks at most about six seconds.
class FailureWatch {
 public:
  /// `store` belongs to the watch: a connection that nobody else uses.
  FailureWatch(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size);
  /// Local: stops the watching thread.
  ~FailureWatch();

  /// Declares a failure, or joins the one declared, and returns the lost ranks; empty if every rank
  /// answers.
  std::vector<int> lost_ranks();

 private:
  void run(const std::stop_token& stop);
  void roll_call(const std::stop_token& stop);
  bool wait_for_key(const std::string& key, std::chrono::milliseconds limit);
  void decide(std::vector<int> lost);

  const c10::intrusive_ptr<c10d::Store> store_;  // used by the watching thread alone
  const int rank_;
  const int world_size_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  bool declare_ = false;                     // guarded by mutex_
  std::optional<std::vector<int>> verdict_;  // guarded by mutex_
  std::jthread thread_;
};

}  // namespace cohort::comm
