// SPDX-License-Identifier: Apache-2.0
// `cohort run`: flags to options.
#pragma once
#include <vector>

#include "cohort/cli/flag_list.h"

/// Reads the flags in argv[1..], runs the workers, and returns the job's exit code.
/// Errors: ConfigError.
int run_command(int argc, char** argv);

/// The flags of `cohort run`, for shell completion.
std::vector<cohort::cli::FlagLine> flags_of_run();
