// SPDX-License-Identifier: Apache-2.0
// Typed reading of environment variables. A value that does not parse is an error, never a default.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace cohort {

/// Returns the variable's text; nothing if it is unset or empty.
std::optional<std::string> env_string(const char* name);

/// Returns the variable as a decimal integer; nothing if it is unset or empty.
/// Errors: ConfigError that names the variable if the text is not an integer in [min, max].
std::optional<int64_t> env_int(const char* name, int64_t min = INT64_MIN, int64_t max = INT64_MAX);

}  // namespace cohort
