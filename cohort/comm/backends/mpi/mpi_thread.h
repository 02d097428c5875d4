// SPDX-License-Identifier: Apache-2.0
// The one thread of a process that calls MPI, for all of its groups: it starts operations in order,
// drives them until they end or their time is up, and says so. Knows nothing of tensors.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <mpi.h>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace cohort::comm {

/// Turns a return code of MPI into c10::DistBackendError, with the name of `call` and MPI's own
/// text.
/// Threads: any.
void check_mpi(int code, const char* call);

/// Non-blocking requests of one operation, and how each ended.
struct MpiRequests {
  std::vector<MPI_Request> pending;
  std::vector<MPI_Status> statuses;  ///< Filled when the operation ends well; as many as `pending`.
  /// Room for one more request: pass it to an MPI_I... call at once.
  MPI_Request* next() { return &pending.emplace_back(MPI_REQUEST_NULL); }
};

/// Something to do on the MPI thread. The callbacks keep alive what MPI reads and writes.
struct MpiOperation {
  std::string name;                                ///< Stands in the error.
  std::chrono::milliseconds timeout{0};            ///< From `submit` to the end; > 0.
  std::function<void(MpiRequests&)> start;         ///< Posts requests; may post none. May throw.
  std::function<void(const MpiRequests&)> finish;  ///< After all requests ended well. May throw.
  std::function<void(std::exception_ptr)>
      done;  ///< Called once, last; null when all went well. Must not throw.
};

/// Owner of MPI in this process.
///
/// Calls MPI_Init_thread when it is made and MPI_Finalize when the program exits with status 0,
/// both on its thread. A program that exits with another status leaves MPI unfinalised, which is
/// how mpirun learns to end the other ranks at once. If the program itself has initialised MPI, it
/// also finalises it. An operation whose time is up fails; its buffers are kept for ever, because
/// MPI may still write to them.
/// Threads: any may call. A callback runs on the MPI thread and must not wait for another
///          operation.
class MpiThread {
 public:
  /// The process's own, made on the first call; never destroyed.
  /// Errors: ConfigError if the program initialised MPI with less than MPI_THREAD_MULTIPLE.
  static MpiThread& of_process();
  MpiThread(const MpiThread&) = delete;
  MpiThread& operator=(const MpiThread&) = delete;

  int rank() const { return rank_; }              ///< In MPI_COMM_WORLD.
  int world_size() const { return world_size_; }  ///< Of MPI_COMM_WORLD.

  /// Hands over an operation; returns at once.
  void submit(MpiOperation operation);
  /// Runs `call` on the MPI thread and returns when it has ended, or throws c10::DistBackendError
  /// after `timeout`. `call` must own what it touches: late, it still runs.
  void run(const std::string& name, std::chrono::milliseconds timeout, std::function<void()> call);
  /// Ends all that has been submitted so far with an error, of all groups: for a job that is dead.
  /// Returns at once.
  void abort();

 private:
  struct Running {
    MpiOperation operation;
    std::chrono::steady_clock::time_point submitted;
    MpiRequests requests;
    std::chrono::steady_clock::time_point deadline() const { return submitted + operation.timeout; }
  };
  enum class Progress { kPending, kEnded, kAbandoned };

  MpiThread();
  ~MpiThread() = default;
  void initialise();
  void loop();
  bool take_new();
  Progress advance(Running& running);
  bool is_aborted(const Running& running);
  bool is_broken();
  void mark_broken();
  static void at_exit(int status, void* self);

  int rank_ = 0;
  int world_size_ = 1;
  bool owns_mpi_ = true;
  std::list<Running> active_;  // of the MPI thread alone
  std::list<Running> abandoned_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Running> queue_;
  bool stop_ = false;
  bool broken_ = false;  // an operation was given up: MPI cannot be finalised
  std::optional<std::chrono::steady_clock::time_point> aborted_;  // what came before is to end
  std::thread thread_;
};

}  // namespace cohort::comm
