// SPDX-License-Identifier: Apache-2.0
// `cohort completion SHELL`: the script that completes cohort's commands, flags and values.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "cohort/cli/flag_list.h"

namespace cohort::cli {

/// Returns the script for "bash", "zsh" or "fish".
///
/// It holds the flags of `lines` as words, so completing starts no program. Files are completed
/// for FILE, folders for FOLDER, the words of a choice, and behind "--" another program's command
/// line; if that is cohort's, its own.
std::string completion_script(const std::string& shell, const std::vector<FlagLine>& lines);

/// The commands and flags that `program` prints of itself; none if it does not know how.
/// Errors: ConfigError if it cannot start.
std::vector<FlagLine> flags_of_program(const std::filesystem::path& program);

}  // namespace cohort::cli
