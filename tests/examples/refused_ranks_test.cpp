// SPDX-License-Identifier: Apache-2.0
// The examples with a number of ranks that their rows cannot be dealt out to.
#include <gtest/gtest.h>
#include <tuple>

#include "tests/support/shell.h"

namespace refused_ranks_test {

using cohort::test::bin;
using cohort::test::Ended;
using cohort::test::shell;

TEST(RefusedRanksTest, ANumberOfRanksThatDoesNotDivideTheRowsIsOneLine) {
  for (const auto& [example, ranks, text] :
       {std::tuple{"checkpoints", "--nproc-per-node 5",
                   "expected a number of ranks that divides 12 rows, got 5"},
        {"zero", "--nproc-per-node 5", "expected a number of ranks that divides 64 rows, got 5"},
        {"servers", "--servers 1 --trainers 3",
         "expected a number of trainers that divides 64 ids, got 3"},
        {"tensor_parallel", "--nproc-per-node 6",
         "expected a number of pairs of ranks that divides 16 rows, got 3"}}) {
    const Ended ended =
        shell("timeout 60 " + bin("cohort") + " run " + ranks + " -- " + bin(example));
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_NE(ended.output.find(text), std::string::npos) << ended.output << "expected: " << text;
  }
}

}  // namespace refused_ranks_test
