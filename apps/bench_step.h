// SPDX-License-Identifier: Apache-2.0
// `cohort bench step`: where the time of a training step of the translator goes, and how far each part is from its limit.
#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "cohort/cli/group_flags.h"

namespace cohort::apps {

/// The command and its flags.
class BenchStep {
 public:
  /// Adds the command to `bench`.
  explicit BenchStep(CLI::App& bench);
  /// Whether it was asked for.
  bool parsed() const { return command_.parsed(); }
  /// Measures and prints a table, or JSON, on rank 0; returns the exit code. Collective; blocks.
  /// Errors: ConfigError for sizes and a precision that cannot be, and if ranks have other flags.
  int run();

 private:
  CLI::App& command_;
  cli::GroupFlags flags_;
  std::string preset_ = "base";
  std::string precision_ = "auto";
  int64_t vocabulary_ = 32000;
  int64_t depth_ = 0;  // 0: the preset's
  int64_t words_ = 4096;
  int64_t steps_ = 3;
  int64_t warmup_ = 1;
  int rounds_ = 3;
  uint64_t seed_ = 1;
  bool json_ = false;
};

}  // namespace cohort::apps
