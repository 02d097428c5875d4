// SPDX-License-Identifier: Apache-2.0
// The options of a Profiler as flags.
#pragma once
#include "cohort/base/option.h"
#include "cohort/comm/profiler.h"

namespace cohort {

/// Returns --profile, --profile-skip and --profile-steps. Their values point into `options`.
inline Options profile_options(ProfilerOptions& options) {
  return {
      {"--profile", &options.file,
       "Write a trace of some steps for Perfetto or chrome://tracing; rank r > 0 writes "
       "NAME.rank-r.EXT",
       rule(kFile)},
      {"--profile-skip",
       &options.skip_steps,
       "Steps before the first one in the trace",
       {.limits = kZeroOrMore, .needs = "--profile"}},
      {"--profile-steps",
       &options.num_steps,
       "Steps in the trace",
       {.limits = kAboveZero, .needs = "--profile"}},
  };
}

}  // namespace cohort
