// Reads a command line with CLI11; errors are Cohort's.
#pragma once
#include <CLI/CLI.hpp>
#include <cmath>
#include <optional>
#include <string>

#include "cohort/base/error.h"

namespace cohort::apps {

inline std::string in_brackets(const std::string& hint) {
  return hint.empty() ? "" : " (" + hint + ")";
}

/// Accepts finite numbers for which `holds`, and else says what was `expected`.
inline CLI::Validator number_that(bool (*holds)(double), const std::string& expected) {
  return CLI::Validator(
      [=](const std::string& text) -> std::string {
        double number = 0;
        const bool good =
            CLI::detail::lexical_cast(text, number) && std::isfinite(number) && holds(number);
        return good ? "" : text + ": expected " + expected;
      },
      "");
}
inline CLI::Validator above_zero() {
  return number_that([](double n) { return n > 0; }, "a number above 0");
}
inline CLI::Validator zero_or_more() {
  return number_that([](double n) { return n >= 0; }, "0 or more");
}
inline CLI::Validator finite() {
  return number_that([](double) { return true; }, "a finite number");
}
inline CLI::Validator whole_number() {
  return number_that([](double n) { return n >= 0 && n < 9e18 && n == std::floor(n); },
                     "a whole number of 0 or more");
}

/// Reads the flags. Returns nothing, or the exit code to end with when help was asked for and has
/// been printed. Errors: ConfigError with CLI11's text and, in brackets, `hint`.
inline std::optional<int> parse(CLI::App& app, int argc, char** argv,
                                const std::string& hint = "") {
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::RequiredError& error) {
    // What was written wrongly explains more than what is therefore missing.
    if (const auto unknown = app.remaining(/*recurse=*/true); !unknown.empty())
      throw ConfigError(unknown.front() + ": there is no such flag or command" + in_brackets(hint));
    throw ConfigError(error.what() + in_brackets(hint));
  } catch (const CLI::ParseError& error) {
    throw ConfigError(error.what() + in_brackets(hint));
  }
  return {};
}

}  // namespace cohort::apps
