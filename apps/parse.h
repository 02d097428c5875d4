// Reads a command line with CLI11; errors are Cohort's.
#pragma once
#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "cohort/base/error.h"

namespace cohort::apps {

/// Reads the flags. Returns nothing, or the exit code to end with when help was asked for and has
/// been printed. Errors: ConfigError with CLI11's text and, in brackets, `hint`.
inline std::optional<int> parse(CLI::App& app, int argc, char** argv,
                                const std::string& hint = "") {
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    throw ConfigError(error.what() + (hint.empty() ? "" : " (" + hint + ")"));
  }
  return {};
}

}  // namespace cohort::apps
