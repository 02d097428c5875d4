// SPDX-License-Identifier: Apache-2.0
// The flag --cpu-offload, of programs that shard models.
#pragma once
#include <CLI/CLI.hpp>

#include "cohort/base/error.h"

namespace cohort::cli {

/// Takes the flag, so that refuse_offload can say why it is of no use.
inline CLI::Option* add_offload_flag(CLI::App& app, bool& offloads) {
  return app.add_flag("--cpu-offload", offloads,
                      "Rejected: it is for models on a GPU, and this program computes on the CPU");
}

/// Errors: ConfigError if `offloads`: the programs compute on the CPU, where all is in host memory.
inline void refuse_offload(bool offloads) {
  if (offloads) {
    throw ConfigError(
        "--cpu-offload: this program computes on the CPU, where there is nothing to offload: leave "
        "it out");
  }
}

}  // namespace cohort::cli
