// SPDX-License-Identifier: Apache-2.0
// A c10d::Backend whose collectives wait in a queue of their own: the common part of shm and
// hierarchical.
#pragma once
#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "cohort/comm/backends/backend_call.h"
#include "cohort/comm/backends/work_queue.h"
#include "cohort/comm/numbered_backend.h"

namespace cohort::comm {

/// Numbers collectives, and runs them one after another in the order of the calls: on a thread of
/// the backend, or, where the caller does not want to do anything else meanwhile (asyncOp is false)
/// and none is under way, on the caller's. A future's callbacks run on that thread too: they may
/// start operations, in the same order on all ranks, and must neither wait for one nor drop the last
/// reference to the group. After an operation that failed all others fail with its error.
///
/// Threads: one caller at a time; `abort` any.
class QueuedBackend : public c10d::Backend, public NumberedBackend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  void number_next(uint32_t number) override;

  using Tensors = std::vector<at::Tensor>;
  /// Coalesced forms: an operation for each tensor, one after another, of which the last one's work is returned. If one fails, so
  /// do those after it, with its text.
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;

 protected:
  /// What a profiler's trace calls an operation.
  using TitleOf = const char* (*)(c10d::OpType);
  /// `thread_name`: of at most 15 characters.
  QueuedBackend(int rank, int world_size, std::chrono::milliseconds timeout,
                std::string thread_name, TitleOf title_of);

  std::chrono::milliseconds timeout() const { return timeout_; }
  /// Gives the call the next number and queues it. What it throws, `wait` of the result throws.
  WorkPtr launch(BackendCall call);
  /// Number of a collective that does not pass through the queue.
  uint32_t take_number();
  /// Ends what is under way: nobody waits for it any more, and peers may have gone. Every
  /// destructor calls this first, because operations use the members that it destroys.
  void end_queue();
  /// Errors: c10::ValueError that names the backend and `name`, the operation.
  int checked_rank(int64_t rank, const char* name) const;

 private:
  /// Prepares the call that runs next.
  virtual void begin(const BackendCall& call) = 0;
  void run(const BackendCall& call);
  void check_as_many(size_t outputs, size_t inputs, const char* name) const;

  const TitleOf title_of_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::mutex mutex_;
  uint64_t sequence_ = 0;
  uint32_t number_ = 0;
  std::string failure_;  // of an earlier operation: the group is dead
  WorkQueue queue_;
};

}  // namespace cohort::comm
