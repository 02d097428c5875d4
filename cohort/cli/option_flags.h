// SPDX-License-Identifier: Apache-2.0
// Tables of options (cohort/base/option.h) as flags.
#pragma once
#include <CLI/CLI.hpp>
#include <string>

#include "cohort/base/option.h"

namespace cohort::cli {

/// Adds a flag for each of `options` to the group `group` of the help, if one is given. What their values point to
/// must outlive `app`; it holds the defaults that help shows.
void add_options(CLI::App& app, const Options& options, const std::string& group = "");

}  // namespace cohort::cli
