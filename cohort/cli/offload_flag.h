// SPDX-License-Identifier: Apache-2.0
// The flag --cpu-offload, of programs that shard models.
#pragma once
#include <CLI/CLI.hpp>
#include <string>

#include "cohort/base/error.h"

namespace cohort::cli {

inline CLI::Option* add_offload_flag(CLI::App& app, bool& offloads) {
  return app.add_flag("--cpu-offload", offloads,
                      "Keep each rank's shard and the optimizer in host memory, under a model on a "
                      "GPU (--device)");
}

/// Errors: ConfigError if `offloads` and the program computes on the CPU, where all is in host
///         memory, or under a `strategy` that does not shard.
inline void check_offload(bool offloads, bool on_cpu, const std::string& strategy) {
  if (!offloads) return;
  if (on_cpu) {
    throw ConfigError(
        "--cpu-offload: this run computes on the CPU, where there is nothing to offload: leave it "
        "out, or choose a --device");
  }
  if (strategy == "ddp" || strategy.starts_with("ps-"))
    throw ConfigError("--cpu-offload: expected a --strategy that shards, got " + strategy);
}

}  // namespace cohort::cli
