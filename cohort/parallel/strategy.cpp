// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/strategy.h"

#include <algorithm>
#include <array>
#include <map>

#include "cohort/base/error.h"
#include "cohort/optim/adam.h"
#include "cohort/parallel/mixed_precision.h"
#include "cohort/parallel/model_state.h"

namespace cohort::parallel {
Strategy parse_strategy(const std::string& name) {
  for (const Strategy each :
       {Strategy::kDdp, Strategy::kZero1, Strategy::kZero2, Strategy::kZero3, Strategy::kHybrid})
    if (name == to_string(each)) return each;
  if (name == "fsdp") return Strategy::kZero3;
  throw ConfigError("--strategy " + name + ": expected ddp, zero1, zero2, zero3, fsdp or hybrid");
}

std::string to_string(Strategy strategy) {
  constexpr std::array kNames{"ddp", "zero1", "zero2", "zero3", "hybrid"};
  return kNames.at(static_cast<size_t>(strategy));
}

bool shards_parameters(Strategy strategy) {
  return strategy == Strategy::kZero3 || strategy == Strategy::kHybrid;
}

namespace {

// Whether models of `ranks_of_model` ranks fit into hosts.
bool fit_hosts(const comm::ProcessGroup& group, int ranks_of_model) {
  std::map<std::string, int> counts;
  for (const std::string& host : group.hosts()) ++counts[host];
  return std::ranges::all_of(counts,
                             [&](const auto& count) { return count.second % ranks_of_model == 0; });
}

}  // namespace

StrategyOptions resolve(StrategyOptions options) {
  DistributedDataParallelOptions& ddp = options.ddp;
  ShardingOptions& sharding = options.sharding;
  const bool is_ddp = options.strategy == Strategy::kDdp;
  const std::string unread = is_ddp ? "sharding" : "ddp";
  TORCH_CHECK_VALUE(options.tensor_parallel || !(ddp.tensor_parallel || sharding.tensor_parallel),
                    "strategy ", to_string(options.strategy),
                    ": expected the tensor_parallel of StrategyOptions, which all strategies read, "
                    "got that of its member ",
                    ddp.tensor_parallel ? "ddp" : "sharding");
  TORCH_CHECK_VALUE(ddp.ignored.empty() == sharding.ignored.empty() ||
                        !(is_ddp ? ddp.ignored : sharding.ignored).empty(),
                    "strategy ", to_string(options.strategy),
                    ": expected `ignored` in both members, got it in ", unread,
                    " alone, which this strategy does not read");
  ddp.tensor_parallel = sharding.tensor_parallel = options.tensor_parallel;
  sharding.shard = options.strategy == Strategy::kZero1   ? Shard::kOptimizer
                   : options.strategy == Strategy::kZero2 ? Shard::kGradients
                                                          : Shard::kParameters;
  if (options.mixed_precision) {
    ddp.mixed_precision = sharding.mixed_precision = *options.mixed_precision;
    return options;
  }
  const auto is_set = [](const MixedPrecision& types) {
    return describe(types) != describe(MixedPrecision{});
  };
  const auto& read = is_ddp ? ddp.mixed_precision : sharding.mixed_precision;
  const auto& other = is_ddp ? sharding.mixed_precision : ddp.mixed_precision;
  TORCH_CHECK_VALUE(is_set(read) || !is_set(other), "strategy ", to_string(options.strategy),
                    ": expected the mixed_precision that all strategies read, of StrategyOptions, "
                    "got only that of its member ",
                    unread, ", which this strategy does not read");
  return options;
}

DeviceMesh init_strategy_mesh(const comm::ProcessGroup& group, Strategy strategy,
                              int tensor_parallel, CallSite site) {
  if (tensor_parallel < 1 || group.size() % tensor_parallel != 0) {
    throw ConfigError("--tensor-parallel " + std::to_string(tensor_parallel) +
                      ": expected a divisor of the number of ranks, " +
                      std::to_string(group.size()));
  }
  const bool is_hybrid = strategy == Strategy::kHybrid;
  std::vector<MeshAxis> axes;
  if (is_hybrid) axes.push_back({"dp_replicate"});
  axes.push_back({is_hybrid ? "dp_shard" : "dp"});
  if (tensor_parallel > 1) axes.push_back({"tp", tensor_parallel});
  const auto hosts = group.hosts();
  if (is_hybrid && std::ranges::all_of(hosts, [&](const auto& host) { return host == hosts[0]; }))
    throw ConfigError("strategy hybrid: expected several hosts, got one: choose zero3");
  DeviceMeshOptions options;
  if (is_hybrid)
    options.within_host = "dp_shard";
  else if (tensor_parallel > 1 && fit_hosts(group, tensor_parallel))
    options.within_host = "tp";
  return init_device_mesh(group, std::move(axes), options, site);
}

comm::ProcessGroup checkpoint_writers_of(const DeviceMesh& mesh, Strategy strategy, CallSite site) {
  const CallSiteScope scope(site);
  const DeviceMesh data = data_axes(mesh), all = model_axes(mesh);
  if (strategy == Strategy::kDdp) {
    if (data.group().rank() > 0) return {};
    return all.has("tp") ? all.group("tp") : comm::ProcessGroup(comm::RankInfo{});
  }
  const size_t num_axes = strategy == Strategy::kHybrid ? 2 : 1;
  TORCH_CHECK_VALUE(data.axis_names().size() == num_axes, "strategy ", to_string(strategy),
                    ": expected a mesh with number of data axes ", num_axes, ", got ",
                    data.describe());
  const comm::ProcessGroup replicate = sharding_groups(data).replicate;
  const comm::ProcessGroup writers =
      (replicate ? model_axes(data["dp_shard"]) : all).group();  // Made on every rank.
  return replicate && replicate.rank() > 0 ? comm::ProcessGroup() : writers;
}

std::vector<LocalShard> full_shards_of(const torch::nn::Module& module) {
  std::vector<LocalShard> shards;
  for (const auto& [name, tensor] : optim::named_parameters(module))
    shards.push_back({name, tensor.sizes().vec(), 0, tensor.numel(), tensor});
  return shards;
}

std::vector<LocalShard> whole_state_of(const torch::nn::Module& module) {
  std::vector<LocalShard> state;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    state.push_back({item.key(), tensor.sizes().vec(), 0, tensor.numel(), tensor});
  }
  for (const NamedTensor& each : model_buffers(module))
    state.push_back({each.name, each.tensor.sizes().vec(), 0, each.tensor.numel(), each.tensor});
  return state;
}

}  // namespace cohort::parallel
