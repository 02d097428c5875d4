// SPDX-License-Identifier: Apache-2.0
// Ranks that were started with different flags.
#pragma once
#include <cstdint>
#include <gtest/gtest.h>
#include <string>

#include "tests/support/shell.h"

namespace cohort::test {

/// Runs `cohort-bench <arguments> <flag> <value>` on two ranks, with `value` on rank 0 and one more
/// on rank 1, and expects one line that names the flag and both values.
inline void expect_other_flags_refused(const std::string& arguments, const std::string& flag,
                                       int64_t value) {
  const Ended ended =
      shell(bin("cohort") + " run --nproc-per-node 2 -- sh -c 'exec " + bin("cohort-bench") + " " +
            arguments + " --timeout 30 " + flag + " $((RANK + " + std::to_string(value) + "))'");
  EXPECT_EQ(ended.code, 2) << ended.output;
  EXPECT_NE(ended.output.find("error: " + flag + ": expected the same on all ranks, got " +
                              std::to_string(value) + " on rank 0 and " +
                              std::to_string(value + 1) + " on rank 1\n"),
            std::string::npos)
      << ended.output;
  EXPECT_EQ(ended.output.find("raised at"), std::string::npos) << ended.output;
}

}  // namespace cohort::test
