// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/sharding/sync_initial_state.h"

#include <numeric>
#include <sstream>

#include "cohort/parallel/mixed_precision.h"
#include "cohort/parallel/model_state.h"

namespace cohort::parallel {
namespace {

// What must agree between ranks beside the model.
std::string describe(const ShardingEngineOptions& options) {
  std::ostringstream out;
  out << "shard " << static_cast<int>(options.shard) << "\nreshard_after_forward "
      << options.reshard_after_forward << "\nreshard_ranks " << options.reshard_ranks
      << "\nprefetch " << options.prefetch << '\n'
      << describe(options.mixed_precision) << "cpu_offload " << options.cpu_offload << '\n';
  for (const std::string& name : options.ignored) out << "ignored " << name << '\n';
  for (const std::string& name : options.forward_order) out << "forward_order " << name << '\n';
  return out.str();
}

void check_reshard(const ShardingEngineOptions& options, int world_size) {
  const int ranks = options.reshard_ranks;
  TORCH_CHECK_VALUE(ranks == 0 || (ranks > 1 && world_size % ranks == 0),
                    "reshard_ranks: expected 0 or a divisor above 1 of the number of ranks, ",
                    world_size, ", got ", ranks,
                    ranks == 1 ? ": give reshard_after_forward = false" : "");
  TORCH_CHECK_VALUE(
      ranks == 0 || (options.shard == Shard::kParameters && options.reshard_after_forward),
      "reshard_ranks: expected reshard_after_forward and Shard::kParameters with it");
}

// Names of what lies on the meta device, and `ignored`.
std::vector<std::string> left_alone(const torch::nn::Module& model, const comm::ProcessGroup& group,
                                    const ShardingEngineOptions& options,
                                    const std::vector<std::string>& ignored) {
  std::vector<std::string> names = ignored;
  const auto look = [&](const std::string& name, const at::Tensor& tensor) {
    if (!tensor.is_meta()) return;
    TORCH_CHECK_VALUE(options.fill, "sharding: ", name,
                      " is on the meta device: expected ShardingOptions::fill");
    TORCH_CHECK_VALUE(options.fill_device.type() == group.device().type(), "sharding: ", name,
                      " is on the meta device: expected a fill_device that the group's backend "
                      "serves, ",
                      group.device(), ", got ", options.fill_device);
    names.push_back(name);
  };
  for (const auto& item : model.named_parameters()) look(item.key(), item.value());
  for (const auto& item : model.named_buffers()) look(item.key(), item.value());
  return names;
}

}  // namespace

void sync_initial_state(const torch::nn::Module& model, const comm::ProcessGroup& group,
                        const ShardingEngineOptions& options,
                        const std::vector<std::string>& ignored) {
  check_types(options.mixed_precision);
  check_reshard(options, group.size());
  const std::vector<std::string> alone = left_alone(model, group, options, ignored);
  verify_same_text("options of FullyShardedDataParallel", describe(options), group);
  verify_same_model(model, group, ignored);
  if (options.replicate_group) {
    verify_same_text("options of FullyShardedDataParallel", describe(options),
                     options.replicate_group);
    verify_same_model(model, options.replicate_group, ignored);
    broadcast_model(model, options.replicate_group, 0, alone);
  }
  broadcast_model(model, group, 0, alone);
}

comm::ProcessGroup make_reshard_group(const comm::ProcessGroup& group,
                                      const ShardingEngineOptions& options) {
  comm::ProcessGroup own;
  const int count = options.reshard_ranks;
  if (count == 0 || count == group.size()) return own;
  for (int first = 0; first < group.size(); first += count) {
    std::vector<int> ranks(static_cast<size_t>(count));
    std::iota(ranks.begin(), ranks.end(), first);
    if (auto made = group.subgroup(ranks, "reshard")) own = std::move(made);
  }
  return own;
}

}  // namespace cohort::parallel
