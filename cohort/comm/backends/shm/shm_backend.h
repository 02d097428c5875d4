// SPDX-License-Identifier: Apache-2.0
// c10d::Backend over memory that the ranks of one host share.
#pragma once
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "cohort/comm/backend.h"
#include "cohort/comm/backends/queued_backend.h"
#include "cohort/comm/backends/shm/arena.h"
#include "cohort/comm/backends/shm/mailbox.h"
#include "cohort/comm/backends/shm/shared_exchange.h"
#include "cohort/comm/backends/shm/shared_memory.h"

namespace cohort::comm {

/// The ranks of one group, all on one host.
///
/// Collectives run one after another, as QueuedBackend says. Messages between two ranks have a
/// thread of their own.
/// Shapes:   contiguous CPU tensors; lists as c10d's ProcessGroup passes them; all_reduce also
///           sparse ones.
/// Memory:   tensors of `allocateTensor` lie in memory that all ranks see. all_reduce, reduce,
///           broadcast, all_gather, gather, reduce_scatter and equal all_to_all of some length, whose
///           tensors that are read lie there on all ranks, at any offset, read them in place. The
///           tensors may outlive the group, and are missing in a child that only forks.
/// Numerics: the same bits on every rank and in every run: values are combined in the order of
///           ranks; bfloat16 and float16 in float32, rounded once. AVG is the sum and one division.
/// Threads:  one caller at a time; `abort` any.
/// Errors:   c10::ValueError: bad tensors or an unsupported dtype, before anything moves.
///           c10::DistBackendError (thrown by `wait`): a rank has ended, left, or calls something
///           else; the time is up; `abort`. The group is dead after it, on all ranks.
class ShmBackend final : public QueuedBackend {
 public:
  /// Collective over the request's ranks; blocks, at most its timeout. `names`: what errors of
  /// collectives call the ranks; empty: by their numbers.
  explicit ShmBackend(const BackendRequest& request, std::vector<int> names = {})
      : ShmBackend(request, std::move(names), std::chrono::steady_clock::now() + request.timeout) {}
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  void abort() override;
  bool compares_numbers() const override { return true; }

  /// False where this rank is alone, or the system limits the size of files or the addresses of one
  /// of the ranks: the same on all.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return arena_ != nullptr; }
  /// Arena::empty. Local: the ranks need not allocate alike.
  /// Threads: any.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

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
  /// `sourceRank()` of the Work is the sender.
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  ShmBackend(const BackendRequest& request, std::vector<int> names,
             std::chrono::steady_clock::time_point deadline);
  void begin(const BackendCall& call) override;
  WorkPtr receive(c10d::OpType type, const at::Tensor& tensor, int from, int tag);
  void gather_into(const Tensors& list, const at::Tensor& input);
  void exchange(const Tensors& outputs, const Tensors& inputs);
  bool writes_to_sent(const Tensors& outputs, const Tensors& inputs) const;
  void all_reduce_sparse(at::Tensor tensor);
  void scatter_sums(const at::Tensor& output, const Tensors& inputs, const Reduction& reduction);

  const std::vector<int> names_;    // by rank
  size_t room_each_;                // bytes of addresses for the tensors of a rank, on all alike
  std::vector<PeerProcess> peers_;  // by rank
  const std::shared_ptr<const SharedMemory> memory_;
  const std::shared_ptr<Arena> arena_;  // may be none
  SharedExchange exchange_;
  Mailbox mailbox_;
};

/// Connects the ranks of the request, as BackendPlugin::make.
/// Errors: ConfigError if a rank is on another host, or the system has not what it needs.
c10::intrusive_ptr<c10d::Backend> make_shm_backend(const BackendRequest& request);

/// For SharedCall::shape: of the dtype and shape of a tensor, and `before`, that of tensors before
/// it. Never 0.
uint32_t hash_of_shape(uint32_t before, const at::Tensor& tensor);

/// Says with which ranks of its host this process can share memory: those for which this returns
/// the same text. Empty: with none, for the system lacks memfd_create or pidfd_open (Linux 5.3),
/// forbids them, or limits the size of files (`ulimit -f`).
std::string memory_sharing();

/// Why memory_sharing() is empty; "" where it is not.
std::string why_no_memory_sharing();

/// The most ranks that a group of this backend has.
inline constexpr int kMostShmRanks = 128;

}  // namespace cohort::comm
