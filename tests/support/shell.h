// SPDX-License-Identifier: Apache-2.0
// Runs the built programs as a user does, from a shell.
#pragma once
#include <string>

namespace cohort::test {

/// How a command ended.
struct Ended {
  int code = -1;       ///< 128 + n if signal n ended it.
  std::string output;  ///< stdout and stderr.
};

/// Returns the path of a built program.
std::string bin(const std::string& program);

/// Runs a command line to its end.
Ended shell(const std::string& command);

}  // namespace cohort::test
