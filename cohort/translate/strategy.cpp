#include "cohort/translate/strategy.h"

#include <cmath>

#include "cohort/base/error.h"
#include "cohort/optim/adam.h"
#include "cohort/parallel/distributed_data_parallel.h"
#include "cohort/parallel/sharding/sharded_data_parallel.h"

namespace cohort::translate {
namespace {

class Replicated : public ParallelModel {
 public:
  Replicated(nmt::Transformer model, comm::ProcessGroup& group)
      : model_(model), ddp_(std::move(model), group, {.gradient_as_bucket_view = true}) {}

  std::tuple<at::Tensor, at::Tensor> forward(const nmt::Batch& batch) override {
    return ddp_(batch);
  }
  void backward(const at::Tensor& loss, const at::Tensor& gradient) override {
    ddp_.backward(loss, gradient);
  }
  bool set_synchronized(bool on) override { return ddp_.engine().set_synchronized(on); }
  std::vector<std::pair<std::string, at::Tensor>> parameters() override {
    return optim::named_parameters(*model_);
  }
  double gradient_norm() override {
    return std::sqrt(optim::gradient_norm_squared(model_->parameters()));
  }

 private:
  nmt::Transformer model_;
  parallel::DistributedDataParallel<nmt::Transformer> ddp_;
};

class Sharded : public ParallelModel {
 public:
  Sharded(nmt::Transformer model, comm::ProcessGroup& group, parallel::Shard shard)
      : sharded_(model, group, {.shard = shard}, model->layers()) {
    model->set_layer_runner([](const torch::nn::Module& layer, const auto& forward) {
      return parallel::run_unit(layer, forward);
    });
  }

  std::tuple<at::Tensor, at::Tensor> forward(const nmt::Batch& batch) override {
    return sharded_(batch);
  }
  void backward(const at::Tensor& loss, const at::Tensor& gradient) override {
    sharded_.backward(loss, gradient);
  }
  bool set_synchronized(bool on) override { return sharded_.engine().set_synchronized(on); }
  std::vector<std::pair<std::string, at::Tensor>> parameters() override {
    return sharded_.named_slices();
  }
  double gradient_norm() override { return sharded_.engine().gradient_norm(); }

 private:
  parallel::ShardedDataParallel<nmt::Transformer> sharded_;
};

}  // namespace

Strategy parse_strategy(const std::string& name) {
  for (const Strategy each : {Strategy::kDdp, Strategy::kZero1, Strategy::kZero2, Strategy::kZero3})
    if (name == to_string(each)) return each;
  if (name == "fsdp") return Strategy::kZero3;
  throw ConfigError("--strategy " + name + ": expected ddp, zero1, zero2, zero3 or fsdp");
}

std::string to_string(Strategy strategy) {
  switch (strategy) {
    case Strategy::kDdp:
      return "ddp";
    case Strategy::kZero1:
      return "zero1";
    case Strategy::kZero2:
      return "zero2";
    case Strategy::kZero3:
      break;
  }
  return "zero3";
}

std::unique_ptr<ParallelModel> make_parallel_model(nmt::Transformer model,
                                                   comm::ProcessGroup& group, Strategy strategy) {
  switch (strategy) {
    case Strategy::kDdp:
      return std::make_unique<Replicated>(std::move(model), group);
    case Strategy::kZero1:
      return std::make_unique<Sharded>(std::move(model), group, parallel::Shard::kOptimizer);
    case Strategy::kZero2:
      return std::make_unique<Sharded>(std::move(model), group, parallel::Shard::kGradients);
    case Strategy::kZero3:
      break;
  }
  return std::make_unique<Sharded>(std::move(model), group, parallel::Shard::kParameters);
}

}  // namespace cohort::translate
