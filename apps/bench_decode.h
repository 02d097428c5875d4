// SPDX-License-Identifier: Apache-2.0
// `cohort bench decode`: where the time of a translator's search goes.
#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <span>
#include <string>

namespace cohort::nmt {
class TransformerImpl;
}

namespace cohort::apps {

/// The command and its flags.
class BenchDecode {
 public:
  /// Adds the command to `bench`.
  explicit BenchDecode(CLI::App& bench);
  /// Whether it was asked for.
  bool parsed() const { return command_.parsed(); }
  /// Measures and prints a table, or JSON; returns the exit code. Local, on the CPU.
  /// Errors: ConfigError for a model that cannot be loaded and a precision that cannot be.
  int run();

 private:
  // `seconds`: of a batch, by section.
  void print(std::span<const double> seconds, double wall, const nmt::TransformerImpl& model) const;

  CLI::App& command_;
  std::string model_dir_;  // empty: the preset with random weights
  std::string preset_ = "base";
  std::string precision_ = "auto";
  std::string shortlist_;
  int64_t beam_size_ = 1;
  int64_t rows_ = 32;
  int64_t source_tokens_ = 25;
  int64_t output_tokens_ = 30;
  int64_t threads_ = 1;
  int64_t rounds_ = 5;
  uint64_t seed_ = 1;
  bool json_ = false;
};

}  // namespace cohort::apps
