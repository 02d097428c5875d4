// SPDX-License-Identifier: Apache-2.0
// Reads a command line with CLI11; errors are Cohort's.
#pragma once
#include <CLI/CLI.hpp>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/option.h"

namespace cohort::cli {

inline std::string in_brackets(const std::string& hint) {
  return hint.empty() ? "" : " (" + hint + ")";
}

/// Accepts numbers below 9e18 for which `holds`, and else says what was `expected`.
inline CLI::Validator number_that(bool (*holds)(double), const std::string& expected) {
  return CLI::Validator(
      [=](const std::string& text) -> std::string {
        double number = 0;
        const bool good =
            CLI::detail::lexical_cast(text, number) && std::isfinite(number) && holds(number);
        if (!good) return text + ": expected " + expected;
        return std::abs(number) < 9e18 ? "" : text + ": expected " + expected + " and below 9e18";
      },
      "");
}
inline CLI::Validator number_that(const Limits& limits) {
  return number_that(limits.holds, limits.expected);
}
inline CLI::Validator above_zero() {
  return number_that(kAboveZero);
}
inline CLI::Validator zero_or_more() {
  return number_that(kZeroOrMore);
}
inline CLI::Validator finite() {
  return number_that(kFinite);
}
inline CLI::Validator whole_number() {
  return number_that(kWholeNumber);
}
/// Accepts seconds above 0 that to_milliseconds (milliseconds.h) takes.
inline CLI::Validator time_limit() {
  return number_that([](double n) { return n > 0 && n < 1e7; },
                     "seconds above 0 and below 10000000");
}

/// Accepts one of `words`, and else names them; help lists and shells complete them.
CLI::Validator one_of(const std::vector<std::string>& words);

/// Reads the flags, after those of configuration files for commands that have --config
/// (config_file.h). Returns nothing, or the exit code to end with when what was asked for has been
/// printed: help, --dump-config, or the flags themselves (flag_list.h).
/// Errors: ConfigError with CLI11's text and, in brackets, `hint` ("program --help lists flags") for
/// the command that was named; for a value from a configuration file it begins with file and line.
std::optional<int> parse(CLI::App& app, std::vector<std::string> arguments,
                         const std::string& hint = "");
/// The same of main's arguments.
std::optional<int> parse(CLI::App& app, int argc, char** argv, const std::string& hint = "");

}  // namespace cohort::cli
