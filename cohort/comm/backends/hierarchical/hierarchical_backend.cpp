// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backends/hierarchical/hierarchical_backend.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/comm/backends/gloo/gloo.h"
#include "cohort/comm/libtorch_version.h"
#include "cohort/comm/number_hash.h"
#include "cohort/comm/time_left.h"

namespace cohort::comm {
namespace {

using c10d::OpType;
using std::chrono::milliseconds;
using Tensors = HierarchicalBackend::Tensors;
using WorkPtr = HierarchicalBackend::WorkPtr;

const char* hierarchical_title(OpType type) {
  switch (type) {
    case OpType::BROADCAST:
      return "hierarchical:broadcast";
    case OpType::ALLREDUCE:
    case OpType::ALLREDUCE_COALESCED:
      return "hierarchical:all_reduce";
    case OpType::REDUCE:
      return "hierarchical:reduce";
    case OpType::ALLGATHER:
      return "hierarchical:all_gather";
    case OpType::REDUCE_SCATTER:
      return "hierarchical:reduce_scatter";
    default:
      return "hierarchical:barrier";
  }
}

void check_contiguous(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(
      tensor.layout() == at::kStrided && tensor.device().is_cpu() && tensor.is_contiguous(),
      "hierarchical ", name, ": expected a dense contiguous CPU tensor, got ", tensor.toString(),
      " of shape ", tensor.sizes());
}

const at::Tensor& only_contiguous(const Tensors& tensors, const char* name) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "hierarchical ", name, ": expected one tensor, got ",
                    tensors.size());
  check_contiguous(tensors[0], name);
  return tensors[0];
}

void check_whole(const at::Tensor& whole, const at::Tensor& part, int size, const char* name) {
  check_contiguous(whole, name);
  check_contiguous(part, name);
  TORCH_CHECK_VALUE(
      whole.scalar_type() == part.scalar_type() && whole.numel() == part.numel() * size,
      "hierarchical ", name, ": expected ", size, " parts of ", part.numel(), " x ",
      part.scalar_type(), ", got ", whole.numel(), " x ", whole.scalar_type());
}

void check_same_list(const Tensors& list, int size, const at::Tensor& like, const char* name) {
  TORCH_CHECK_VALUE(list.size() == static_cast<size_t>(size), "hierarchical ", name, ": expected ",
                    size, " tensors, got ", list.size());
  for (const at::Tensor& tensor : list) check_whole(tensor, like, 1, name);
}

at::Tensor flat_of(const at::Tensor& tensor) {
  return tensor.detach().view({-1});
}

// Of some ranks, who must be connected by `deadline`.
BackendRequest request_of(const BackendRequest& request, const std::string& name, int rank,
                          size_t size, std::chrono::steady_clock::time_point deadline) {
  BackendRequest part = request;
  part.timeout = time_left(deadline);
  part.store = c10::make_intrusive<c10d::PrefixStore>(name, request.store);
  part.rank = rank;
  part.world_size = static_cast<int>(size);
  part.memory.clear();
  return part;
}

std::vector<HostGroup> checked_groups(const BackendRequest& request) {
  TORCH_CHECK_VALUE(std::ssize(request.memory) == request.world_size,
                    "backend hierarchical: expected to know where ", request.world_size,
                    " ranks have their memory, got ", request.memory.size());
  return host_groups(request.memory);
}

int group_with(const std::vector<HostGroup>& groups, int rank) {
  const auto found = std::ranges::find_if(groups, [&](const HostGroup& group) {
    return std::ranges::find(group, rank) != group.end();
  });
  return static_cast<int>(found - groups.begin());
}

int index_in(const HostGroup& group, int rank) {
  return static_cast<int>(std::ranges::find(group, rank) - group.begin());
}

// Data of calls that differ never meet: neither their bytes nor their lengths are compared.
int tag_of(const SharedCall& call) {
  return NumberHash()
      .add(call.number)
      .add(call.operation)
      .add(call.dtype)
      .add(call.reduce_op)
      .add(call.root)
      .add(call.shape)
      .add(call.numel)
      .tag();
}

}  // namespace

HierarchicalBackend::HierarchicalBackend(const BackendRequest& request)
    : QueuedBackend(request.rank, request.world_size, request.timeout, "cohort-hosts",
                    hierarchical_title),
      groups_(checked_groups(request)),
      runs_(host_runs(groups_)),
      host_(group_with(groups_, request.rank)) {
  const auto deadline = std::chrono::steady_clock::now() + request.timeout;
  const HostGroup& own = own_group();
  const int index = index_in(own, rank_);
  all_ = make_gloo_backend(
      request_of(request, "all", request.rank, static_cast<size_t>(request.world_size), deadline));
  if (own.size() > 1)
    inside_ = c10::make_intrusive<ShmBackend>(
        request_of(request, "host/" + std::to_string(host_), index, own.size(), deadline), own);
  if (index == 0)
    leaders_.emplace(
        make_gloo_backend(request_of(request, "leaders", host_, groups_.size(), deadline)));
  init();
}

HierarchicalBackend::~HierarchicalBackend() {
  end_queue();
}

void HierarchicalBackend::setTimeout(milliseconds timeout) {
  QueuedBackend::setTimeout(timeout);
  all_->setTimeout(timeout);
}

void HierarchicalBackend::abort() {
  if (inside_) inside_->abort();
  if (leaders_) leaders_->abort();
  all_->abort();
}

int HierarchicalBackend::host_of(int rank) const {
  return group_with(groups_, rank);
}

HierarchicalBackend::Reduced HierarchicalBackend::reduced(const c10d::ReduceOp& op,
                                                          at::ScalarType type) const {
  const bool scales = op == c10d::ReduceOp::AVG || op == c10d::ReduceOp::PREMUL_SUM;
  return {.between = reduction_of(op, type, size_),
          .inside = scales ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op};
}

void HierarchicalBackend::begin(const BackendCall& call) {
  deadline_ = std::chrono::steady_clock::now() + call.timeout;
  if (inside_) inside_->number_next(call.shared.number);
  if (leaders_) leaders_->begin(tag_of(call.shared), deadline_);
}

WorkPtr HierarchicalBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = only_contiguous(tensors, "broadcast");
  const int root = checked_rank(options.rootRank, "broadcast");
  BackendCall call = backend_call(OpType::BROADCAST, options, tensors, tensor, timeout());
  call.run = [this, bytes = flat_of(tensor).view(at::kByte), root] { broadcast_all(bytes, root); };
  return launch(std::move(call));
}

WorkPtr HierarchicalBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].is_sparse())
    return gloo_collective().allreduce(tensors, options);
  const at::Tensor tensor = only_contiguous(tensors, "allreduce");
  const Reduced how = reduced(options.reduceOp, tensor.scalar_type());
  BackendCall call = backend_call(OpType::ALLREDUCE, options, tensors, tensor, timeout());
  call.run = [this, flat = flat_of(tensor), how] { reduce_all(flat, how, -1); };
  return launch(std::move(call));
}

WorkPtr HierarchicalBackend::allreduce_coalesced(Tensors& tensors,
                                                 const c10d::AllreduceCoalescedOptions& options) {
  std::vector<std::pair<at::Tensor, Reduced>> parts;
  BackendCall call = backend_call(OpType::ALLREDUCE_COALESCED, options, tensors, {}, timeout());
  call.shared.numel = 0;
  for (const at::Tensor& tensor : tensors) {
    check_contiguous(tensor, "allreduce_coalesced");
    parts.emplace_back(flat_of(tensor), reduced(options.reduceOp, tensor.scalar_type()));
    call.shared.numel += tensor.numel();
    call.shared.shape = hash_of_shape(call.shared.shape, tensor);
  }
  call.run = [this, parts] {
    for (const auto& [flat, how] : parts) reduce_all(flat, how, -1);
  };
  return launch(std::move(call));
}

WorkPtr HierarchicalBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor tensor = only_contiguous(tensors, "reduce");
  const int root = checked_rank(options.rootRank, "reduce");
  const Reduced how = reduced(options.reduceOp, tensor.scalar_type());
  BackendCall call = backend_call(OpType::REDUCE, options, tensors, tensor, timeout());
  call.run = [this, flat = flat_of(tensor), how, root] { reduce_all(flat, how, root); };
  return launch(std::move(call));
}

WorkPtr HierarchicalBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::AllgatherOptions& options) {
  check_whole(output, input, size_, "_allgather_base");
  BackendCall call = backend_call(OpType::ALLGATHER, options, {output}, input, timeout());
  call.run = [this, to = flat_of(output).view(at::kByte), from = flat_of(input).view(at::kByte)] {
    gather_all(to, from);
  };
  return launch(std::move(call));
}

WorkPtr HierarchicalBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) {
  const at::Tensor input = only_contiguous(inputs, "allgather");
  TORCH_CHECK_VALUE(outputs.size() == 1, "hierarchical allgather: expected one list, got ",
                    outputs.size());
  check_same_list(outputs[0], size_, input, "allgather");
  BackendCall call = backend_call(OpType::ALLGATHER, options, outputs[0], input, timeout());
  call.run = [this, list = outputs[0], input] {
    const at::Tensor all = at::empty({size_, input.numel()}, input.options());
    gather_all(flat_of(all).view(at::kByte), flat_of(input).view(at::kByte));
    for (int64_t rank = 0; rank < size_; ++rank)
      list[static_cast<size_t>(rank)].detach().view({-1}).copy_(all[rank]);
  };
  return launch(std::move(call));
}

WorkPtr HierarchicalBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::ReduceScatterOptions& options) {
  check_whole(input, output, size_, "_reduce_scatter_base");
  const Reduced how = reduced(options.reduceOp, output.scalar_type());
  BackendCall call = backend_call(OpType::REDUCE_SCATTER, options, {output}, output, timeout());
  call.run = [this, to = flat_of(output), from = flat_of(input), how] {
    scatter_reduced(to, from, how);
  };
  return launch(std::move(call));
}

WorkPtr HierarchicalBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ReduceScatterOptions& options) {
  const at::Tensor output = only_contiguous(outputs, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs.size() == 1, "hierarchical reduce_scatter: expected one list, got ",
                    inputs.size());
  check_same_list(inputs[0], size_, output, "reduce_scatter");
  const Reduced how = reduced(options.reduceOp, output.scalar_type());
  BackendCall call = backend_call(OpType::REDUCE_SCATTER, options, outputs, output, timeout());
  call.run = [this, to = flat_of(output), list = inputs[0], how] {
    const at::Tensor all = at::empty({size_, to.numel()}, to.options());
    for (int64_t rank = 0; rank < size_; ++rank)
      all[rank].copy_(list[static_cast<size_t>(rank)].detach().view({-1}));
    scatter_reduced(to, flat_of(all), how);
  };
  return launch(std::move(call));
}

WorkPtr HierarchicalBackend::barrier(const c10d::BarrierOptions& options) {
  BackendCall call = backend_call(OpType::BARRIER, options, {}, {}, timeout());
  call.run = [this, one = at::zeros({1}, at::kByte),
              how = reduced(c10d::ReduceOp(c10d::ReduceOp::MAX), at::kByte)] {
    reduce_all(one, how, -1);
  };
  return launch(std::move(call));
}

c10d::Backend& HierarchicalBackend::gloo_collective() {
  dynamic_cast<NumberedBackend&>(*all_).number_next(take_number());
  return *all_;
}

WorkPtr HierarchicalBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::GatherOptions& options) {
  return gloo_collective().gather(outputs, inputs, options);
}
WorkPtr HierarchicalBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ScatterOptions& options) {
  return gloo_collective().scatter(outputs, inputs, options);
}
WorkPtr HierarchicalBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                           std::vector<int64_t>& output_splits,
                                           std::vector<int64_t>& input_splits,
                                           const c10d::AllToAllOptions& options) {
  return gloo_collective().COHORT_ALL_TO_ALL_SINGLE(output, input, output_splits, input_splits,
                                                    options);
}
WorkPtr HierarchicalBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                      const c10d::AllToAllOptions& options) {
  return gloo_collective().alltoall(outputs, inputs, options);
}
WorkPtr HierarchicalBackend::send(Tensors& tensors, int destination, int tag) {
  return all_->send(tensors, destination, tag);
}
WorkPtr HierarchicalBackend::recv(Tensors& tensors, int source, int tag) {
  return all_->recv(tensors, source, tag);
}
WorkPtr HierarchicalBackend::recvAnysource(Tensors& tensors, int tag) {
  return all_->recvAnysource(tensors, tag);
}

c10::intrusive_ptr<c10d::Backend> make_hierarchical_backend(const BackendRequest& request) {
  return c10::make_intrusive<HierarchicalBackend>(request);
}

}  // namespace cohort::comm
