// SPDX-License-Identifier: Apache-2.0
#include "examples/imagenet/optimizer.h"

#include <cmath>
#include <torch/optim/sgd.h>
#include <torch/types.h>

namespace imagenet {
namespace {

class RankOptimizer final : public Optimizer {
 public:
  RankOptimizer(Model& model, const OptimizerOptions& options)
      : model_(model),
        learning_rate_(options.learning_rate),
        sgd_(trained(model), torch::optim::SGDOptions(options.learning_rate)
                                 .momentum(options.momentum)
                                 .weight_decay(options.weight_decay)) {}

  void begin_epoch(int64_t epoch) override {
    const double rate = learning_rate_ * std::pow(0.1, static_cast<double>(epoch / kEpochsPerRate));
    for (auto& group : sgd_.param_groups()) group.options().set_lr(rate);
  }

  void step() override {
    sgd_.step();
    sgd_.zero_grad();
  }

  // One shard per parameter's; one that has taken no step yet has zeros, which come to the same.
  std::vector<cohort::train::TensorShard> momentum() override {
    std::vector<cohort::train::TensorShard> shards;
    for (const auto& [name, shape, begin, end, tensor] : model_.local_shards()) {
      auto& state = sgd_.state()[tensor.unsafeGetTensorImpl()];
      if (!state) state = std::make_unique<torch::optim::SGDParamState>();
      auto& own = static_cast<torch::optim::SGDParamState&>(*state);
      if (!own.momentum_buffer().defined()) own.momentum_buffer(at::zeros_like(tensor.detach()));
      shards.push_back({name, shape, begin, end, own.momentum_buffer()});
    }
    return shards;
  }

  // Every rank has what it needs.
  void wait_for_updates() override {}
  void save(RunState& /*state*/) override {}
  void saved(const RunState& /*state*/) override {}
  void check_resumed(const std::string& /*checkpoint*/, const RunState& /*state*/) override {}
  void finish() override {}

 private:
  static std::vector<at::Tensor> trained(const Model& model) {
    std::vector<at::Tensor> tensors;
    for (const auto& [name, tensor] : model.named_parameters()) tensors.push_back(tensor);
    return tensors;
  }

  Model& model_;
  double learning_rate_;
  torch::optim::SGD sgd_;
};

}  // namespace

std::unique_ptr<Optimizer> make_rank_optimizer(Model& model, const OptimizerOptions& options) {
  return std::make_unique<RankOptimizer>(model, options);
}

}  // namespace imagenet
