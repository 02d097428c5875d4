// SPDX-License-Identifier: Apache-2.0
#include "examples/imagenet/checkpoint.h"

#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <torch/types.h>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/train/sharded_checkpoint.h"

namespace imagenet {
namespace {

using cohort::ConfigError;

std::string entry(const cohort::train::Metadata& metadata, const std::string& folder,
                  const std::string& key) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) {
    throw ConfigError(folder + "/manifest.json: no checkpoint of imagenet: " + key + " is missing");
  }
  return found->second;
}

std::string exact(double number) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), number).ptr};
}

cohort::train::ShardedParts parts_of(std::vector<cohort::train::TensorShard> weights,
                                     const std::vector<cohort::train::TensorShard>& momentum) {
  cohort::train::ShardedParts parts{{"weights", std::move(weights)}};
  if (!momentum.empty()) parts["optimizer"] = momentum;
  return parts;
}

}  // namespace

void save_run(const std::string& folder, Model& model,
              const std::vector<cohort::train::TensorShard>& momentum, const RunState& state) {
  const cohort::comm::ProcessGroup& writers = model.checkpoint_writers();
  if (!writers) return;
  cohort::train::Metadata metadata{{"arch", state.arch},
                                   {"epochs_done", std::to_string(state.epochs_done)},
                                   {"best_top1", exact(state.best_top1)}};
  if (!state.servers.empty()) metadata["servers"] = state.servers;
  if (state.loss_scale > 0) {
    metadata["loss_scale"] = exact(state.loss_scale);
    metadata["scale_age"] = std::to_string(state.scale_age);
  }
  if (const auto job = cohort::env_string("COHORT_JOB_ID")) metadata["job"] = *job;
  cohort::train::ShardedCheckpointWriter writer(writers);
  writer.begin(folder, parts_of(cohort::train::shards_of(model.state_to_save()), momentum),
               state.epochs_done, metadata);
  writer.commit();
}

bool is_of_this_job(const std::string& folder) {
  const auto job = cohort::env_string("COHORT_JOB_ID");
  if (!job || cohort::env_int("COHORT_ROUND").value_or(1) == 1) return false;
  if (!std::filesystem::exists(folder + "/manifest.json")) return false;
  const auto metadata = cohort::train::read_manifest(folder);
  const auto found = metadata.find("job");
  return found != metadata.end() && found->second == *job;
}

RunState read_run(const std::string& folder) {
  const auto metadata = cohort::train::read_manifest(folder);
  RunState state{.arch = entry(metadata, folder, "arch")};
  const auto refuse = [&](const std::string& key, const std::string& expected) {
    throw ConfigError(folder + "/manifest.json: " + key + ": expected " + expected + ", found " +
                      entry(metadata, folder, key));
  };
  const auto read = [&](const std::string& key, auto& number) {
    const std::string text = entry(metadata, folder, key);
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size()) refuse(key, "a number");
  };
  read("epochs_done", state.epochs_done);
  read("best_top1", state.best_top1);
  if (metadata.contains("loss_scale")) {
    read("loss_scale", state.loss_scale);
    if (!(state.loss_scale > 0 && std::isfinite(state.loss_scale)))
      refuse("loss_scale", "a finite number above 0");
    read("scale_age", state.scale_age);
    if (state.scale_age < 0) refuse("scale_age", "0 or more");
  }
  if (const auto servers = metadata.find("servers"); servers != metadata.end())
    state.servers = servers->second;
  return state;
}

void load_run(const std::string& folder, Model& model,
              const std::vector<cohort::train::TensorShard>& momentum,
              const cohort::comm::ProcessGroup& group) {
  cohort::train::load_shards(
      folder, parts_of(cohort::train::shards_of(model.state_to_load()), momentum), group);
}

void load_weights(const std::string& folder, ResNet& model) {
  cohort::train::load_checkpoint(folder, *model);
}

}  // namespace imagenet
