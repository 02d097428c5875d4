// SPDX-License-Identifier: Apache-2.0
// c10d::Backend for ranks of several hosts: shared memory inside each, Gloo between them.
#pragma once
#include <chrono>
#include <optional>
#include <vector>

#include "cohort/comm/backend.h"
#include "cohort/comm/backends/hierarchical/host_groups.h"
#include "cohort/comm/backends/hierarchical/leader_exchange.h"
#include "cohort/comm/backends/queued_backend.h"
#include "cohort/comm/backends/shm/shm_backend.h"

namespace cohort::comm {

/// The ranks of one group on several hosts.
///
/// The first rank of each host leads. all_reduce, reduce and reduce_scatter first reduce inside each
/// host, into the leader's memory; the leaders then reduce among themselves, and hand the result out
/// inside. all_gather, broadcast and barrier go the same way. Large tensors go in pieces, so that
/// one piece crosses the network while the next is reduced inside. What gains nothing by that,
/// all_to_all, gather, scatter, sums of sparse tensors and messages, goes over Gloo among all ranks.
///
/// Operations run one after another, as QueuedBackend says; those over Gloo among all ranks as
/// Gloo's.
/// Shapes:   contiguous CPU tensors; lists as c10d's ProcessGroup passes them.
/// Cost:     sent by a leader, of N bytes on L hosts: all_reduce 2 (L-1)/L N; reduce (L-1)/L N, and
///           N/L to the root's leader; both (L-1) N of at most 16 KiB; reduce_scatter N less its own
///           host's part; all_gather L-1 times its own host's part; broadcast N along a chain, whose
///           last leader sends nothing, of at most 1 MiB along a binomial tree, where the root's
///           leader sends ceil(log2 L) N. Other ranks send nothing. Connections: Gloo's among all
///           ranks and, once more, among leaders.
/// Numerics: the same bits on every rank and in every run. Values are combined in the order of ranks
///           inside a host, and the hosts' results in the order of their leaders. What crosses the
///           network has the tensor's dtype: bfloat16 and float16 are combined in float32 and rounded
///           once inside, once between hosts. AVG and PREMUL_SUM are the sum and then one division
///           or multiplication, at the end.
/// Memory:   reduce_scatter takes its host's part of the sum, and all operations some 6 MiB, on
///           leaders; `allgather` and `reduce_scatter` of lists one tensor of all ranks' elements, on
///           every rank.
/// Threads:  one caller at a time; `abort` any.
/// Errors:   as ShmBackend, and what Gloo throws. The group is dead after it, on all ranks.
class HierarchicalBackend final : public QueuedBackend {
 public:
  /// Collective over the request's ranks; blocks, at most its timeout.
  explicit HierarchicalBackend(const BackendRequest& request);
  ~HierarchicalBackend() override;

  const std::string getBackendName() const override { return "hierarchical"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void abort() override;
  /// Leaders whose numbers differ only wait for each other, so the group must compare calls itself.
  bool compares_numbers() const override { return false; }

  /// Of ShmBackend, inside the host. Hosts may differ: a rank alone on one has ordinary memory.
  bool supportsTensorAlloc(c10::DeviceIndex device) override {
    return inside_ && inside_->supportsTensorAlloc(device);
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return inside_->allocateTensor(size, options);
  }

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
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  // A reduction in both halves.
  struct Reduced {
    Reduction between;      // what is left to do to the hosts' results
    c10d::ReduceOp inside;  // without the division or multiplication
  };
  void begin(const BackendCall& call) override;
  c10d::Backend& gloo_collective();  // among all ranks, for the next collective

  const HostGroup& own_group() const { return groups_[static_cast<size_t>(host_)]; }
  int host_of(int rank) const;
  Reduced reduced(const c10d::ReduceOp& op, at::ScalarType type) const;

  void reduce_all(const at::Tensor& flat, const Reduced& reduced, int root);
  void broadcast_all(const at::Tensor& bytes, int root);
  void gather_all(const at::Tensor& output, const at::Tensor& input);
  void scatter_reduced(const at::Tensor& output, const at::Tensor& input, const Reduced& reduced);

  void reduce_inside(const at::Tensor& tensor, const c10d::ReduceOp& op);
  void broadcast_inside(const at::Tensor& tensor, int root);

  const std::vector<HostGroup> groups_;
  const std::vector<HostRun> runs_;
  const int host_;  // index of this rank's group
  c10::intrusive_ptr<c10d::Backend> all_;
  c10::intrusive_ptr<ShmBackend> inside_;  // none where this rank is alone on its host
  std::vector<std::byte> scratch_;         // outlives the messages of leaders_
  at::Tensor scatter_scratch_;             // so does it; the ranks of the host read it
  std::optional<LeaderExchange> leaders_;  // of leaders

  std::chrono::steady_clock::time_point deadline_{};  // of the operation under way
};

/// Connects the ranks of the request, as BackendPlugin::make.
/// Errors: as make_gloo_backend and make_shm_backend.
c10::intrusive_ptr<c10d::Backend> make_hierarchical_backend(const BackendRequest& request);

}  // namespace cohort::comm
