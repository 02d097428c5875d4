// SPDX-License-Identifier: Apache-2.0
// Runs the body of a test on several ranks, each a process of its own.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "cohort/comm/process_group.h"

namespace cohort::test {

/// How one rank's process ended, and what it wrote to stdout and stderr.
struct RankEnd {
  int exit_code = 0;  ///< 128 + n for signal n.
  std::string output;
};

/// Runs `body` on `world_size` ranks and returns how each ended.
///
/// The test binary is executed again per rank (never forked: libtorch has threads), with the rank's
/// environment and the running case as its filter, so the same call is reached and runs `body`
/// there; it does not return in a child. COHORT_TEST_BACKEND names a backend for those who ask for
/// none. A child ends with run_program's codes; failed expectations
/// give 1.
std::vector<RankEnd> run_ranks(int world_size,
                               const std::function<void(const comm::ProcessGroup&)>& body,
                               const comm::ProcessGroupOptions& options = {});

/// The same, and expects every rank to end with 0.
void ranks(int world_size, const std::function<void(const comm::ProcessGroup&)>& body,
           const comm::ProcessGroupOptions& options = {});

}  // namespace cohort::test
