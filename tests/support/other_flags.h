// SPDX-License-Identifier: Apache-2.0
// Ranks that were started with different flags.
#pragma once
#include <gtest/gtest.h>
#include <string>

#include "tests/support/shell.h"

namespace cohort::test {

/// Runs `command <flag> <value>` on two ranks, with `first` on rank 0 and `second` on rank 1, and
/// expects one line that names the flag and both values.
inline void expect_other_flags_refused(const std::string& command, const std::string& flag,
                                       const std::string& first, const std::string& second) {
  const Ended ended =
      shell(bin("cohort") + " run --nproc-per-node 2 -- sh -c 'exec " + command + " --timeout 30 " +
            flag + " $([ $RANK = 0 ] && echo " + first + " || echo " + second + ")'");
  EXPECT_EQ(ended.code, 2) << ended.output;
  EXPECT_NE(ended.output.find("error: " + flag + ": expected the same on all ranks, got " + first +
                              " on rank 0 and " + second + " on rank 1\n"),
            std::string::npos)
      << ended.output;
  EXPECT_EQ(ended.output.find("raised at"), std::string::npos) << ended.output;
}

}  // namespace cohort::test
