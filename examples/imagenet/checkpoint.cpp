#include "examples/imagenet/checkpoint.h"

#include <array>
#include <charconv>
#include <memory>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/train/sharded_checkpoint.h"

namespace imagenet {
namespace {

using cohort::ConfigError;

// One slice per parameter's; one that has taken no step yet has zeros, which come to the same.
std::vector<cohort::train::TensorSlice> momentum_of(const Model& model, torch::optim::SGD& sgd) {
  std::vector<cohort::train::TensorSlice> momentum;
  for (const auto& [name, shape, begin, end, tensor] : model.slices()) {
    auto& state = sgd.state()[tensor.unsafeGetTensorImpl()];
    if (!state) state = std::make_unique<torch::optim::SGDParamState>();
    auto& own = static_cast<torch::optim::SGDParamState&>(*state);
    if (!own.momentum_buffer().defined()) own.momentum_buffer(at::zeros_like(tensor.detach()));
    momentum.push_back({name, shape, begin, end, own.momentum_buffer()});
  }
  return momentum;
}

// Buffers are whole on every rank.
cohort::train::SlicedParts parts_of(Model& model, torch::optim::SGD& sgd, bool with_buffers) {
  auto weights = cohort::train::slices_of(model.slices());
  if (with_buffers) {
    cohort::train::NamedTensors buffers;
    for (const auto& item : model->named_buffers()) buffers.emplace_back(item.key(), item.value());
    const auto whole = cohort::train::whole_slices(buffers);
    weights.insert(weights.end(), whole.begin(), whole.end());
  }
  return {{"weights", weights}, {"optimizer", momentum_of(model, sgd)}};
}

std::string fact(const cohort::train::Facts& facts, const std::string& folder,
                 const std::string& key) {
  const auto found = facts.find(key);
  if (found == facts.end()) {
    throw ConfigError(folder + "/manifest.json: no checkpoint of imagenet: " + key + " is missing");
  }
  return found->second;
}

std::string exact(double number) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), number).ptr};
}

}  // namespace

void save_run(const std::string& folder, Model& model, torch::optim::SGD& sgd,
              const RunState& state) {
  cohort::comm::ProcessGroup* savers = model.savers();
  if (savers == nullptr) return;
  cohort::train::ShardedCheckpointWriter writer(*savers);
  writer.begin(folder, parts_of(model, sgd, /*with_buffers=*/savers->rank() == 0),
               state.epochs_done,
               {{"arch", state.arch},
                {"epochs_done", std::to_string(state.epochs_done)},
                {"best_top1", exact(state.best_top1)}});
  writer.commit();
}

RunState read_run(const std::string& folder) {
  const auto facts = cohort::train::read_manifest(folder);
  RunState state{.arch = fact(facts, folder, "arch")};
  const auto read = [&](const std::string& key, auto& number) {
    const std::string text = fact(facts, folder, key);
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size()) {
      throw ConfigError(folder + "/manifest.json: " + key + ": expected a number, found " + text);
    }
  };
  read("epochs_done", state.epochs_done);
  read("best_top1", state.best_top1);
  return state;
}

void load_run(const std::string& folder, Model& model, torch::optim::SGD& sgd,
              cohort::comm::ProcessGroup& group) {
  cohort::train::load_slices(folder, parts_of(model, sgd, /*with_buffers=*/true), group);
}

void load_weights(const std::string& folder, ResNet& model) {
  cohort::train::load_checkpoint(folder, *model);
}

}  // namespace imagenet
