// SPDX-License-Identifier: Apache-2.0
// c10d::Backend over MPI: collectives and point-to-point messages of one group's CPU
// tensors.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <mpi.h>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "cohort/comm/backends/mpi/mpi_thread.h"

namespace cohort::comm {

/// The ranks of one group, over Open MPI or another MPI-3.
///
/// Every operation is non-blocking: it is started on the process's MPI thread in the order of the
/// calls, several may be under way, and `wait()` or the future of its Work ends with it. A future's
/// callbacks run on the MPI thread: they may start operations and must not wait for one.
/// Shapes:   contiguous CPU tensors; lists as c10d's ProcessGroup passes them, one tensor a rank.
/// Numerics: see mpi_reduction; AVG is a sum and one division after it.
/// Threads:  one caller at a time.
/// Cost:     what MPI's non-blocking collectives do; a message above 1 GiB goes in pieces of that
///           size.
/// Errors:   c10::ValueError: bad tensors or an unsupported dtype, before anything is sent.
///           c10::DistBackendError (thrown by `wait`): what MPI reports, or the time is up. The
///           group is dead after it.
/// Owner:    the communicators stay until MPI ends: giving one back is a collective, which a
///           destructor may not do.
class MpiBackend : public c10d::Backend {
 public:
  /// `world_ranks`: the group's ranks as numbers of MPI_COMM_WORLD, in the group's order; `rank` is
  /// this process's index. Collective over those ranks; blocks, at most `timeout`.
  MpiBackend(MpiThread& mpi, int rank, std::vector<int> world_ranks,
             std::chrono::milliseconds timeout);

  const std::string getBackendName() const override { return "mpi"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void abort() override { mpi_.abort(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  /// Splits count rows of the first dimension; both empty: equal shares.
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  /// At most 1 GiB; `sourceRank()` of the Work is the sender.
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  struct Call {
    c10d::OpType type;
    std::string name;
    std::chrono::milliseconds timeout;
    Tensors results;
    std::function<void(MpiRequests&)> start;
    std::function<void()> finish = {};
  };
  WorkPtr launch(Call call);
  WorkPtr all_reduce_each(c10d::OpType type, const char* name, Tensors& tensors,
                          const c10d::AllreduceOptions& options);
  WorkPtr exchange(c10d::OpType type, const char* name, Tensors outputs, Tensors inputs,
                   std::chrono::milliseconds timeout);
  WorkPtr reduce_scatter_flat(const at::Tensor& output, const at::Tensor& input, c10d::OpType type,
                              const char* name, const c10d::ReduceScatterOptions& options);
  at::Tensor only(const Tensors& tensors, const char* name) const;
  int checked_rank(int64_t rank, const char* name) const;

  MpiThread& mpi_;
  std::atomic<std::chrono::milliseconds> timeout_;
  uint64_t sequence_ = 0;
  MPI_Comm comm_ = MPI_COMM_NULL;   // collectives, and messages that are part of one
  MPI_Comm peers_ = MPI_COMM_NULL;  // the caller's own messages
};

}  // namespace cohort::comm
