// The flags that trace some steps of a training program.
#pragma once
#include <CLI/CLI.hpp>

#include "cohort/cli/parse.h"
#include "cohort/comm/profiler.h"

namespace cohort::cli {

/// Adds --profile, --profile-skip and --profile-steps to the group `group` of the help.
inline void add_profile_flags(CLI::App& app, ProfilerOptions& options, const std::string& group) {
  app.add_option("--profile", options.file,
                 "Write a trace of some steps for Perfetto or chrome://tracing; rank r > 0 writes "
                 "NAME.rank-r.EXT")
      ->type_name(kFile)
      ->group(group);
  app.add_option("--profile-skip", options.skip_steps, "Steps before the first one in the trace")
      ->capture_default_str()
      ->needs("--profile")
      ->check(zero_or_more())
      ->group(group);
  app.add_option("--profile-steps", options.num_steps, "Steps in the trace")
      ->capture_default_str()
      ->needs("--profile")
      ->check(above_zero())
      ->group(group);
}

}  // namespace cohort::cli
