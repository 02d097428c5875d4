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

/// Errors: ConfigError if `offloads` and `device`, of --device, is the CPU: all is in host memory
///         there.
inline void check_offload(bool offloads, const std::string& device) {
  if (offloads && device == "cpu") {
    throw ConfigError(
        "--cpu-offload: this run computes on the CPU, where there is nothing to offload: leave it "
        "out, or choose a --device");
  }
}

}  // namespace cohort::cli
