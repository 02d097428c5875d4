#include "cohort/parallel/strategy.h"

#include <array>
#include <set>

#include "cohort/base/error.h"
#include "cohort/optim/adam.h"
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

StrategyGroups::StrategyGroups(const comm::ProcessGroup& group, Strategy strategy) : group_(group) {
  if (strategy == Strategy::kDdp) {
    if (group.rank() == 0) checkpoint_writers_ = comm::ProcessGroup(comm::RankInfo{});
    return;
  }
  if (strategy != Strategy::kHybrid) {
    checkpoint_writers_ = group;
    return;
  }
  const int per_host = group.rank_info().local_world_size;
  const auto all = group.all_gather_object(std::to_string(per_host));
  const int num_hosts = group.size() / per_host;
  if (std::set(all.begin(), all.end()).size() != 1 || per_host * num_hosts != group.size())
    throw ConfigError("--strategy hybrid: expected as many ranks on each host");
  if (num_hosts == 1)
    throw ConfigError("--strategy hybrid: expected several hosts, got one: give --strategy zero3");
  hosts_ = make_rank_grid(group, per_host, "host", "across hosts");
  if (group.rank() < per_host) checkpoint_writers_ = hosts_.row;
}

std::vector<LocalShard> full_shards_of(const torch::nn::Module& module) {
  std::vector<LocalShard> shards;
  for (const auto& [name, tensor] : optim::named_parameters(module))
    shards.push_back({name, tensor.sizes().vec(), 0, tensor.numel(), tensor});
  return shards;
}

std::vector<LocalShard> whole_state_of(const torch::nn::Module& module) {
  std::vector<LocalShard> state = full_shards_of(module);
  for (const NamedTensor& each : model_buffers(module))
    state.push_back({each.name, each.tensor.sizes().vec(), 0, each.tensor.numel(), each.tensor});
  return state;
}

double gradient_norm_of(const torch::nn::Module& module) {
  return std::sqrt(optim::gradient_norm_squared(module.parameters()));
}

}  // namespace cohort::parallel
