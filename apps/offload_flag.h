// The flag --cpu-offload, of programs that share models out.
#pragma once
#include <CLI/CLI.hpp>
#include <c10/core/Device.h>
#include <string>

#include "cohort/base/error.h"
#include "cohort/parallel/strategy.h"

namespace cohort::apps {

inline CLI::Option* add_offload_flag(CLI::App& app, bool& offloads) {
  return app.add_flag("--cpu-offload", offloads,
                      "Keep what a rank holds of parameters, gradients and optimizer state in host "
                      "memory while a GPU computes (zero1, zero2, zero3 or fsdp, hybrid)");
}

/// Refuses what --cpu-offload cannot do: to share nothing out, or to offload what is in host memory
/// already, where the model computes on the CPU. Errors: ConfigError.
inline void check_offload(bool offloads, parallel::Strategy strategy, c10::Device computes_on) {
  if (!offloads) return;
  if (strategy == parallel::Strategy::kDdp)
    throw ConfigError("--cpu-offload: expected --strategy zero1, zero2, zero3, fsdp or hybrid");
  if (computes_on.is_cpu()) {
    throw ConfigError(
        "--cpu-offload: there is nothing to offload, for this program computes on the CPU and "
        "everything is in host memory; a strategy that shares out more holds less");
  }
}

}  // namespace cohort::apps
