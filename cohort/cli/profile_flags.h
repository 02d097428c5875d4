// SPDX-License-Identifier: Apache-2.0
// The flags that trace some steps of a training program.
#pragma once
#include <CLI/CLI.hpp>

#include "cohort/cli/option_flags.h"
#include "cohort/comm/profile_options.h"

namespace cohort::cli {

/// Adds --profile, --profile-skip and --profile-steps to the group `group` of the help.
inline void add_profile_flags(CLI::App& app, ProfilerOptions& options, const std::string& group) {
  add_options(app, profile_options(options), group);
}

}  // namespace cohort::cli
