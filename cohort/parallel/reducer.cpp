// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/reducer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <algorithm>
#include <cstring>
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <utility>

#include "cohort/comm/profiler.h"
#include "cohort/comm/shared_tensor.h"

namespace cohort::parallel {
namespace {

constexpr double kMiB = 1024 * 1024;

int64_t bytes(double mib) {
  return static_cast<int64_t>(mib * kMiB);
}

// The caps in bytes, in the order of sending.
std::vector<int64_t> caps(const DistributedDataParallelOptions& options) {
  std::vector<int64_t> result;
  for (const double cap : options.bucket_cap_mb_list) result.push_back(bytes(cap));
  if (result.empty()) {
    result = {bytes(std::min(options.first_bucket_mb, options.bucket_cap_mb)),
              bytes(options.bucket_cap_mb)};
  }
  return result;
}

// `order`: of all parameters. c10d closes a bucket with the parameter that fills it; one that fills a
// bucket alone would keep back the gradients before it.
BucketIndices cut_in_reverse(const std::vector<NamedTensor>& parameters,
                             const std::vector<size_t>& order, const std::vector<size_t>& limits) {
  std::vector<at::Tensor> tensors;
  std::vector<int64_t> indices;
  std::vector<bool> sparse;
  for (const NamedTensor& parameter : parameters) sparse.push_back(parameter.sparse_gradient);
  for (size_t i = order.size(); i-- > 0;) {
    tensors.push_back(parameters[order[i]].tensor);
    indices.push_back(static_cast<int64_t>(order[i]));
  }
  auto by_c10d =
      std::get<0>(c10d::compute_bucket_assignment_by_size(tensors, limits, sparse, indices));
  BucketIndices buckets;
  for (auto& bucket : by_c10d) {
    const size_t last = bucket.back();
    const bool fills_one = parameters[last].tensor.nbytes() >= limits.back();
    if (bucket.size() > 1 && fills_one) {
      bucket.pop_back();
      buckets.push_back(std::move(bucket));
      buckets.push_back({last});
    } else {
      buckets.push_back(std::move(bucket));
    }
  }
  return buckets;
}

}  // namespace

BucketIndices Reducer::layout() const {
  BucketIndices result;
  for (const Bucket& bucket : buckets_) result.push_back(bucket.variable_indices);
  return result;
}

bool Reducer::rebuild_buckets() {
  const bool may_rebuild = !has_rebuilt_bucket_;
  if (may_rebuild) gradient_memory_.withdraw();  // Offers hold the memory of the old buckets.
  const bool rebuilt = c10d::Reducer::rebuild_buckets();
  if (rebuilt) move_buckets();
  if (may_rebuild && hook_ != nullptr) offer_buckets();
  return rebuilt;
}

// libtorch would ask the backend itself, but for a variable of the environment.
void Reducer::move_buckets() {
  if (!comm::shares_tensors(group_)) return;
  for (Bucket& bucket : buckets_) {
    if (!bucket.gradients.defined() || bucket.expect_sparse_gradient ||
        !bucket.gradients.device().is_cpu())
      continue;
    c10::StorageImpl* storage = bucket.gradients.storage().unsafeGetStorageImpl();
    const auto bytes = static_cast<int64_t>(storage->nbytes());
    const at::Tensor shared = comm::empty_shared(group_, bytes, at::kByte);
    // Gradients of an earlier backward may lie there; the pages of the rest have never been written.
    if (gradient_as_bucket_view_)
      std::memcpy(shared.mutable_data_ptr(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(shared.storage().unsafeGetStorageImpl()->set_data_ptr(
        c10::DataPtr(nullptr, shared.device())));
  }
}

// Without a hook c10d would divide what lies there in a pass of its own, where a copy divides on
// the way.
void Reducer::offer_buckets() {
  if (!gradient_as_bucket_view_) return;
  for (const Bucket& bucket : buckets_) {
    if (!bucket.gradients.defined() || bucket.expect_sparse_gradient ||
        !bucket.gradients.device().is_cpu())
      continue;
    for (size_t i = 0; i < bucket.variables.size(); ++i)
      gradient_memory_.offer(bucket.variables[i],
                             [view = bucket.bucket_views_in[i]] { return alias_of(view); });
  }
}

class Reducer::HookAdapter : public c10d::CommHookInterface {
 public:
  explicit HookAdapter(const Reducer& reducer) : reducer_(reducer) {}
  void carry_by(CommHook hook, const std::string& name) {
    hook_ = std::move(hook);
    name_ = name;
  }

  TensorFuture runHook(c10d::GradBucket& bucket) override {
    const at::Tensor& buffer = bucket.getBufferRef();
    const auto& all = reducer_.buckets_;
    const size_t index = position_of(bucket);
    const std::string label = name_ + " bucket " + std::to_string(index);
    std::optional<ProfileScope> scope;
    if (!name_.empty()) scope.emplace(label);
    return hook_(reducer_.group_, {.index = static_cast<int64_t>(index),
                                   .is_last = reducer_.is_last_sent(index),
                                   .buffer = buffer,
                                   .gradients = buffer.is_sparse() ? std::vector<at::Tensor>{buffer}
                                                                   : bucket.getGradients(),
                                   .parameters = all[index].variables});
  }
  at::Tensor parseHookResult(const c10::IValue& result) override { return result.toTensor(); }

 private:
  // In the first backward of a static graph c10d calls every bucket the first one, so the tensor
  // decides. The zeros of a rank that shadows collectives are none of them, but have the right
  // number.
  size_t position_of(c10d::GradBucket& bucket) const {
    const auto& all = reducer_.buckets_;
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i].gradients.is_same(bucket.getBufferRef())) return i;
    }
    return bucket.getIndex();
  }

  CommHook hook_;
  std::string name_;
  const Reducer& reducer_;
};

void Reducer::carry_by(CommHook hook, const std::string& name) {
  if (hook_ == nullptr) {
    auto adapter = std::make_unique<HookAdapter>(*this);
    hook_ = adapter.get();
    register_comm_hook(std::move(adapter));
    offer_buckets();
  }
  hook_->carry_by(std::move(hook), name);
}

bool Reducer::is_unused(size_t index) const {
  return std::find(unused_parameters_.begin(), unused_parameters_.end(), index) !=
         unused_parameters_.end();
}

bool Reducer::is_last_sent(size_t bucket) const {
  const auto is_skipped = [this](const c10d::Reducer::Bucket& other) {
    return skip_all_reduce_unused_params_ &&
           std::ranges::all_of(other.variable_indices,
                               [this](size_t index) { return is_unused(index); });
  };
  return std::all_of(buckets_.begin() + static_cast<std::ptrdiff_t>(bucket) + 1, buckets_.end(),
                     is_skipped);
}

bool Reducer::awaits(size_t index) const {
  const auto found = numGradHooksTriggeredMapPerIteration_.find(index);
  return found != numGradHooksTriggeredMapPerIteration_.end() && found->second > 0;
}

void Reducer::forget_unsynchronized() {
  num_bwd_calls_ = 0;
  first_autograd_hook_called_ = false;
  numGradHooksTriggeredMap_.clear();
}

void Reducer::wait_for_averages() {
  if (timer_ && should_collect_runtime_stats()) {
    record_backward_compute_end_time();
    end_of_compute_ = timer_->getTimeRef(c10d::Timer::Event::kBackwardComputeEnd);
  }
  for (size_t i = 0; i < buckets_.size(); ++i) {
    const std::string label = "all_reduce.wait bucket " + std::to_string(i);
    const ProfileScope scope(label);
    if (buckets_[i].future_work) buckets_[i].future_work->waitAndThrow();
  }
  if (find_unused_parameters_ && !static_graph_ && local_used_work_) local_used_work_->wait();
}

void Reducer::restore_end_of_compute() {
  if (timer_ && should_collect_runtime_stats())
    timer_->getTimeRef(c10d::Timer::Event::kBackwardComputeEnd) = end_of_compute_;
}

void Reducer::abandon_backward() {
  const bool rebuilt = has_rebuilt_bucket_;
  reset_state();
  has_rebuilt_bucket_ = rebuilt;
  // All of them: the first backward of a static graph does not count those that it has sent.
  for (Bucket& bucket : buckets_) {
    if (const auto sent = std::exchange(bucket.future_work, nullptr)) sent->waitAndThrow();
  }
}

void Reducer::shadow_collectives() {
  for (Bucket& bucket : buckets_) {
    if (!bucket.expect_sparse_gradient || bucket.gradients.defined()) continue;
    // A rank that never had a gradient does not know its form: rows of an embedding, none of them.
    const at::Tensor& weight = bucket.variables.front();
    bucket.gradients = at::sparse_coo_tensor(
        at::empty({1, 0}, weight.options().dtype(at::kLong).requires_grad(false)),
        at::empty({0, weight.size(1)}, weight.options().requires_grad(false)), weight.sizes());
  }
  std::vector<TensorFuture> futures;
  auto zeros = get_grad_buckets(/*return_zero_tensors=*/true);
  for (c10d::GradBucket& bucket : zeros) futures.push_back(run_comm_hook(bucket));
  for (const TensorFuture& future : futures) future->waitAndThrow();
  if (find_unused_parameters_ && !static_graph_) {
    // Zeros: the Reducer's own map holds the sums of this rank's last step.
    std::vector<at::Tensor> used{at::zeros_like(get_local_used_map_on_device())};
    process_group_->allreduce(used)->wait();
  }
  push_rebuilt_params_for_all_indices();
}

BucketIndices initial_buckets(const std::vector<NamedTensor>& parameters,
                              const DistributedDataParallelOptions& options) {
  if (!options.bucket_layout.empty())
    return indices_of("bucket_layout", options.bucket_layout, parameters);
  std::vector<size_t> order(parameters.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (!options.forward_order.empty())
    order = indices_of("forward_order", {options.forward_order}, parameters).front();
  // Before the order of gradients is known one bucket is as good as any cut.
  if (options.rebuild_buckets) return cut_in_reverse(parameters, order, {SIZE_MAX});
  const std::vector<int64_t> limits = caps(options);
  return cut_in_reverse(parameters, order, std::vector<size_t>(limits.begin(), limits.end()));
}

std::shared_ptr<Reducer> make_reducer(const std::vector<NamedTensor>& parameters,
                                      const comm::ProcessGroup& group,
                                      const DistributedDataParallelOptions& options) {
  std::vector<at::Tensor> tensors;
  std::vector<bool> sparse;
  std::unordered_map<size_t, std::string> names;
  for (const NamedTensor& parameter : parameters) {
    names[tensors.size()] = parameter.name;
    tensors.push_back(parameter.tensor);
    sparse.push_back(parameter.sparse_gradient);
  }
  const std::vector<int64_t> limits = caps(options);
  auto reducer = std::make_shared<Reducer>(
      group, tensors, initial_buckets(parameters, options), sparse, limits.back(),
      options.find_unused_parameters, options.gradient_as_bucket_view, names, limits.front(),
      options.skip_all_reduce_unused_params, /*use_python_reducer=*/false,
      options.bucket_cap_mb_list.empty() ? std::vector<int64_t>{} : limits);
  if (!options.rebuild_buckets || !options.bucket_layout.empty()) reducer->keep_layout();
  return reducer;
}

}  // namespace cohort::parallel
