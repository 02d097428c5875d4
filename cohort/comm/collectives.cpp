// SPDX-License-Identifier: Apache-2.0
// The collectives of ProcessGroup, and the object collectives made of them.
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <algorithm>
#include <cstring>

#include "cohort/comm/operations.h"

namespace cohort::comm {
namespace {

std::string with_subject(const std::string& operation, const std::string& of) {
  return of.empty() ? operation : operation + " (" + of + ')';
}

std::string bytes_of(const at::Tensor& bytes, int64_t offset, int64_t length) {
  return {static_cast<const char*>(bytes.const_data_ptr()) + offset, static_cast<size_t>(length)};
}

at::Tensor padded_bytes(const std::string& object, int64_t length) {
  at::Tensor bytes = at::zeros({length}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), object.data(), object.size());
  return bytes;
}

std::vector<std::string> unpack(const at::Tensor& all, const std::vector<int64_t>& lengths) {
  const int64_t stride = all.numel() / static_cast<int64_t>(lengths.size());
  std::vector<std::string> objects;
  for (size_t rank = 0; rank < lengths.size(); ++rank) {
    objects.push_back(bytes_of(all, static_cast<int64_t>(rank) * stride, lengths[rank]));
  }
  return objects;
}

std::vector<int64_t> gather_lengths(const ProcessGroup& group, const std::string& object,
                                    CallSite site) {
  const at::Tensor lengths = at::empty({group.size()}, at::kLong);
  group.all_gather_into(lengths, at::tensor({static_cast<int64_t>(object.size())}), site);
  const auto* values = lengths.const_data_ptr<int64_t>();
  return {values, values + group.size()};
}

}  // namespace

at::Tensor ProcessGroup::all_reduce(const at::Tensor& tensor, ReduceOp op, CallSite site) const {
  impl().run(all_reduce_of(c10d_group(), tensor, op, site));
  return tensor;
}

Work ProcessGroup::all_reduce_async(const at::Tensor& tensor, ReduceOp op, CallSite site) const {
  return impl().start(all_reduce_of(c10d_group(), tensor, op, site));
}

int64_t ProcessGroup::all_reduce_sum(int64_t value, CallSite site) const {
  return all_reduce(at::tensor({value}), ReduceOp::kSum, site).item<int64_t>();
}

at::Tensor ProcessGroup::reduce(const at::Tensor& tensor, int root, ReduceOp op,
                                CallSite site) const {
  impl().run(reduce_of(c10d_group(), tensor, root, op, site));
  return tensor;
}

Work ProcessGroup::reduce_async(const at::Tensor& tensor, int root, ReduceOp op,
                                CallSite site) const {
  return impl().start(reduce_of(c10d_group(), tensor, root, op, site));
}

at::Tensor ProcessGroup::broadcast(const at::Tensor& tensor, int root, CallSite site) const {
  impl().run(broadcast_of(c10d_group(), tensor, root, site));
  return tensor;
}

Work ProcessGroup::broadcast_async(const at::Tensor& tensor, int root, CallSite site) const {
  return impl().start(broadcast_of(c10d_group(), tensor, root, site));
}

std::vector<at::Tensor> ProcessGroup::all_gather(const at::Tensor& tensor, CallSite site) const {
  check_tensor(tensor, "all_gather", c10d_group());
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape.insert(shape.begin(), size());
  const at::Tensor output = at::empty(shape, tensor.options());
  all_gather_into(output, tensor, site);
  return output.unbind(0);
}

Work ProcessGroup::all_gather_async(const std::vector<at::Tensor>& outputs,
                                    const at::Tensor& tensor, CallSite site) const {
  return impl().start(all_gather_of(c10d_group(), outputs, tensor, site));
}

void ProcessGroup::all_gather_into(const at::Tensor& output, const at::Tensor& input,
                                   CallSite site) const {
  impl().run(all_gather_of(c10d_group(), output, input, site));
}

Work ProcessGroup::all_gather_into_async(const at::Tensor& output, const at::Tensor& input,
                                         const std::string& of, CallSite site) const {
  Operation operation = all_gather_of(c10d_group(), output, input, site);
  operation.call.operation = with_subject(operation.call.operation, of);
  return impl().start(operation);
}

std::vector<at::Tensor> ProcessGroup::gather(const at::Tensor& tensor, int root,
                                             CallSite site) const {
  check_tensor(tensor, "gather", c10d_group());
  Tensors outputs;
  if (rank() == root) {
    for (int peer = 0; peer < size(); ++peer)
      outputs.push_back(at::empty(tensor.sizes(), tensor.options()));
  }
  impl().run(gather_of(c10d_group(), outputs, tensor, root, site));
  return outputs;
}

Work ProcessGroup::gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& tensor,
                                int root, CallSite site) const {
  return impl().start(gather_of(c10d_group(), outputs, tensor, root, site));
}

void ProcessGroup::scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                           int root, CallSite site) const {
  impl().run(scatter_of(c10d_group(), output, inputs, root, site));
}

Work ProcessGroup::scatter_async(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                                 int root, CallSite site) const {
  return impl().start(scatter_of(c10d_group(), output, inputs, root, site));
}

void ProcessGroup::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                  CallSite site) const {
  impl().run(reduce_scatter_of(c10d_group(), output, input, op, site));
}

Work ProcessGroup::reduce_scatter_async(const at::Tensor& output, const at::Tensor& input,
                                        ReduceOp op, const std::string& of, CallSite site) const {
  Operation operation = reduce_scatter_of(c10d_group(), output, input, op, site);
  operation.call.operation = with_subject(operation.call.operation, of);
  return impl().start(operation);
}

void ProcessGroup::all_to_all(const at::Tensor& output, const at::Tensor& input,
                              const std::vector<int64_t>& output_splits,
                              const std::vector<int64_t>& input_splits, CallSite site) const {
  impl().run(all_to_all_of(c10d_group(), output, input, output_splits, input_splits,
                           impl().compares_splits(), site));
}

Work ProcessGroup::all_to_all_async(const at::Tensor& output, const at::Tensor& input,
                                    const std::vector<int64_t>& output_splits,
                                    const std::vector<int64_t>& input_splits, CallSite site) const {
  return impl().start(all_to_all_of(c10d_group(), output, input, output_splits, input_splits,
                                    impl().compares_splits(), site));
}

std::string ProcessGroup::broadcast_object(const std::string& object, int root,
                                           CallSite site) const {
  const at::Tensor length =
      broadcast(at::tensor({static_cast<int64_t>(object.size())}), root, site);
  const at::Tensor bytes = at::empty({length.item<int64_t>()}, at::kByte);
  if (rank() == root) std::memcpy(bytes.mutable_data_ptr(), object.data(), object.size());
  if (bytes.numel() > 0) broadcast(bytes, root, site);
  return bytes_of(bytes, 0, bytes.numel());
}

std::vector<std::string> ProcessGroup::all_gather_object(const std::string& object,
                                                         CallSite site) const {
  const auto lengths = gather_lengths(*this, object, site);
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  const at::Tensor all = at::empty({size() * longest}, at::kByte);
  if (longest > 0) all_gather_into(all, padded_bytes(object, longest), site);
  return unpack(all, lengths);
}

std::vector<std::string> ProcessGroup::gather_object(const std::string& object, int root,
                                                     CallSite site) const {
  const auto lengths = gather_lengths(*this, object, site);
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<std::string> objects;
  if (longest == 0) return rank() == root ? std::vector<std::string>(lengths.size()) : objects;
  const auto all = gather(padded_bytes(object, longest), root, site);
  for (size_t peer = 0; peer < all.size(); ++peer)
    objects.push_back(bytes_of(all[peer], 0, lengths[peer]));
  return objects;
}

namespace {

BackendWork begin_barrier(c10d::ProcessGroup& group, std::chrono::milliseconds timeout,
                          bool async_op) {
  Tensors tensors{at::zeros({1}, at::kByte)};
  c10d::AllreduceOptions options;
  options.timeout = timeout;
  options.asyncOp = async_op;
  return group.allreduce(tensors, options);
}

std::string barrier_text(const std::string& name) {
  return "barrier \"" + name + "\"";
}

}  // namespace

void ProcessGroup::barrier(const std::string& name, std::optional<std::chrono::milliseconds> limit,
                           CallSite site) const {
  if (limit) check_limit(*limit, barrier_text(name));
  impl().run(
      {.call = {.operation = barrier_text(name), .site = site, .limit = limit, .moves_data = false},
       .begin = [&](bool async_op) {
         // The comparison of calls is itself a barrier.
         if (impl_->matcher.is_on() || size() == 1) return BackendWork();
         return begin_barrier(c10d_group(), limit.value_or(impl_->timeout), async_op);
       }});
}

Work ProcessGroup::barrier_async(const std::string& name, CallSite site) const {
  return impl().start(
      {.call = {.operation = barrier_text(name), .site = site}, .begin = [&](bool async_op) {
         return begin_barrier(c10d_group(), impl_->timeout, async_op);
       }});
}

}  // namespace cohort::comm
