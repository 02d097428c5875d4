// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/zero_redundancy_optimizer.h"

#include <map>
#include <sstream>
#include <torch/types.h>
#include <tuple>

#include "cohort/parallel/model_state.h"
#include "cohort/parallel/sharding/flat_bucket.h"

namespace cohort::parallel {
namespace {

using Named = std::vector<std::pair<std::string, at::Tensor>>;

// Those to be trained, each shared one once, by what can lie in one buffer.
std::vector<std::vector<NamedTensor>> by_kind(const Named& parameters) {
  std::vector<std::vector<NamedTensor>> kinds;
  std::map<std::tuple<at::ScalarType, std::string>, size_t> places;
  std::map<const at::TensorImpl*, std::string> seen;
  for (const auto& [name, tensor] : parameters) {
    if (!tensor.requires_grad()) continue;
    if (!seen.emplace(tensor.unsafeGetTensorImpl(), name).second) continue;
    const auto [place, fresh] =
        places.try_emplace({tensor.scalar_type(), tensor.device().str()}, kinds.size());
    if (fresh) kinds.emplace_back();
    kinds[place->second].push_back({.name = name, .tensor = tensor});
  }
  return kinds;
}

std::string describe(const std::vector<std::vector<NamedTensor>>& kinds) {
  std::ostringstream out;
  for (const auto& kind : kinds) {
    for (const NamedTensor& each : kind) {
      out << each.name << ' ' << each.tensor.sizes() << ' ' << each.tensor.dtype();
      if (!each.tensor.is_contiguous()) out << " strides " << each.tensor.strides();
      out << '\n';
    }
  }
  return out.str();
}

}  // namespace

struct OptimizerShards::Impl {
  std::vector<std::unique_ptr<FlatBucket>> buckets;
  std::vector<LocalShard> local_shards;
  std::map<std::string, at::Tensor> parameters;
};

OptimizerShards::OptimizerShards(const Named& parameters, const comm::ProcessGroup& group,
                                 CallSite site)
    : impl_(std::make_unique<Impl>()) {
  const CallSiteScope scope(site);
  auto kinds = by_kind(parameters);
  TORCH_CHECK_VALUE(!kinds.empty(),
                    "ZeroRedundancyOptimizer: expected a parameter that requires a gradient");
  for (const auto& kind : kinds) {
    for (const NamedTensor& each : kind) {
      TORCH_CHECK_VALUE(each.tensor.is_floating_point() && each.tensor.layout() == at::kStrided,
                        "ZeroRedundancyOptimizer: expected dense floating-point parameters; ",
                        each.name, " is not");
      TORCH_CHECK_VALUE(impl_->parameters.emplace(each.name, each.tensor).second,
                        "ZeroRedundancyOptimizer: two parameters have the name ", each.name);
    }
  }
  verify_same_text("parameters of ZeroRedundancyOptimizer", describe(kinds), group);
  for (auto& kind : kinds) {
    impl_->buckets.push_back(std::make_unique<FlatBucket>(
        std::move(kind), group, ShardingEngineOptions{{.shard = Shard::kOptimizer}, {}},
        BucketPlace{.name = "parameters of ZeroRedundancyOptimizer"}));
    const auto& shards = impl_->buckets.back()->local_shards();
    impl_->local_shards.insert(impl_->local_shards.end(), shards.begin(), shards.end());
  }
}

OptimizerShards::~OptimizerShards() = default;

const std::vector<LocalShard>& OptimizerShards::local_shards() const {
  return impl_->local_shards;
}

void OptimizerShards::take_gradients() {
  const at::NoGradGuard no_grad;
  for (LocalShard& shard : impl_->local_shards) {
    const at::Tensor& gradient = impl_->parameters.at(shard.name).grad();
    if (!gradient.defined()) continue;
    TORCH_CHECK_VALUE(!gradient.is_sparse(), "ZeroRedundancyOptimizer: ", shard.name,
                      " has a sparse gradient: expected dense ones");
    shard.tensor.mutable_grad() =
        gradient.contiguous().view({-1}).narrow(0, shard.begin, shard.end - shard.begin);
  }
}

void OptimizerShards::all_gather_updates() {
  for (LocalShard& shard : impl_->local_shards) shard.tensor.mutable_grad().reset();
  for (const auto& bucket : impl_->buckets) {
    bucket->free();
    bucket->begin_gather();
  }
  for (const auto& bucket : impl_->buckets) bucket->gather();
  // What arrives in the buffer is no change that a parameter would know of.
  for (const auto& [name, tensor] : impl_->parameters) tensor.unsafeGetTensorImpl()->bump_version();
}

void OptimizerShards::zero_grad() {
  for (const auto& [name, tensor] : impl_->parameters) tensor.mutable_grad().reset();
}

}  // namespace cohort::parallel
