// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/ps/module/host_ranks.h"
#include "cohort/ps/module/session.h"

#include "examples/imagenet/optimizer.h"

namespace imagenet {
namespace {

using cohort::ConfigError;
namespace fs = std::filesystem;
namespace ps = cohort::ps;

// The others wait while servers write some gigabytes.
constexpr std::chrono::minutes kSaveLimit{30};

cohort::ps::TrainerInfo place_of(const cohort::comm::ProcessGroup& group, const Options& options,
                                 const OptimizerOptions& optimizer, const RunState& state) {
  const ps::Training training = cohort::ps::server_training(options.strategy).value();
  const bool async = training == ps::Training::kAsync;
  const std::string with = " with --strategy " + options.strategy;
  if (options.precision == "float64")
    throw ConfigError("--precision " + options.precision + ": expected float32" + with +
                      ": servers compute in it");
  if (options.precision == "float16")
    throw ConfigError("--precision float16: expected float32 or bfloat16" + with +
                      ": the ranks would leave out steps whose gradients overflow");
  if (options.start_epoch)
    throw ConfigError("--start-epoch: expected none" + with +
                      ": the servers count the steps, from 0 or from what they loaded");
  if (options.sync_bn && async)
    throw ConfigError("--sync-bn: expected none" + with +
                      ": its statistics would make trainers wait for each other");
  auto place = cohort::ps::trainer_info_from_environment(group, training, options.security,
                                                         options.ps_host_ranks);
  place.session.dense_rule = server_rule(optimizer, async ? place.session.trainers : 1);
  // Or to the beginning: they may hold what an earlier run or start has left.
  place.session.client.restore = state.servers;
  return place;
}

class ServerOptimizer final : public Optimizer {
 public:
  ServerOptimizer(Model& model, const cohort::comm::ProcessGroup& group, const Options& options,
                  const OptimizerOptions& optimizer, const RunState& state)
      : model_(model),
        group_(group),
        weight_decay_(optimizer.weight_decay),
        folder_(fs::absolute(options.output) / "servers"),  // Theirs may be another work folder.
        place_(place_of(group, options, optimizer, state)),
        session_(place_.session),
        no_sync_(model.no_sync()) {
    session_.add("resnet", *model_.module());
    // Trainer 0 alone sends the servers back to a checkpoint, before the others join.
    const bool is_first = place_.session.trainer == 0;
    if (is_first) session_.start();
    group.barrier("servers begin", kSaveLimit);
    if (!is_first) session_.start();
  }

  void begin_epoch(int64_t /*epoch*/) override {}  // The servers' schedule knows.

  void step() override {
    if (weight_decay_ > 0) {
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : model_.module()->parameters())
        if (parameter.grad().defined()) parameter.mutable_grad().add_(parameter, weight_decay_);
    }
    session_.push();
    session_.pull();
  }

  void wait_for_updates() override {
    session_.flush();
    group_.barrier("last pushes");
    session_.pull();
  }

  std::vector<cohort::train::TensorShard> momentum() override { return {}; }

  void save(RunState& state) override {
    state.servers = (folder_ / ("epoch-" + std::to_string(state.epochs_done))).string();
    if (group_.rank() == 0) session_.save(state.servers);
    group_.barrier("checkpoint of servers", kSaveLimit);  // No push of ps-async comes between.
  }

  void saved(const RunState& state) override {
    if (group_.rank() != 0) return;
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(folder_, ignored))
      if (entry.path() != fs::path(state.servers)) fs::remove_all(entry.path(), ignored);
  }

  // The servers' values are in the model since the start, the checkpoint's since now.
  void check_resumed(const std::string& checkpoint, const RunState& state) override {
    std::vector<at::Tensor> loaded;
    for (const at::Tensor& parameter : model_.module()->parameters())
      loaded.push_back(parameter.detach().clone());
    session_.pull();
    const auto parameters = model_.module()->parameters();
    if (std::equal(loaded.begin(), loaded.end(), parameters.begin(), at::equal)) return;
    throw ConfigError("--resume " + checkpoint + ": its weights are not those of " + state.servers +
                      ": expected two parts of one checkpoint");
  }

  void finish() override { session_.finish(); }

 private:
  Model& model_;
  cohort::comm::ProcessGroup group_;
  double weight_decay_;
  fs::path folder_;
  cohort::ps::TrainerInfo place_;
  ps::Session session_;
  cohort::parallel::NoSync no_sync_;  // Gradients go to the servers.
};

}  // namespace

std::unique_ptr<Optimizer> make_server_optimizer(Model& model,
                                                 const cohort::comm::ProcessGroup& group,
                                                 const Options& options,
                                                 const OptimizerOptions& optimizer,
                                                 const RunState& state) {
  return std::make_unique<ServerOptimizer>(model, group, options, optimizer, state);
}

}  // namespace imagenet
