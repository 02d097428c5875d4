// SPDX-License-Identifier: Apache-2.0
// `cohort run --max-restarts` with servers: all trainers restart, the servers stay.
#include <gtest/gtest.h>
#include <string>

#include "tests/base/temporary_folder.h"
#include "tests/support/shell.h"

namespace restart_command_test {

using cohort::read_file;
using cohort::TemporaryFolder;
using cohort::test::bin;
using cohort::test::Ended;
using cohort::test::shell;

TEST(RestartCommandTest, TrainersStartAfreshWhenOneHadPushedTheStepAndTheOtherNot) {
  for (const std::string first : {"0", "1"}) {
    const TemporaryFolder folder;
    const Ended ended = shell(
        bin("cohort") + " run --max-restarts 1 --servers 2 --trainers 2 --grace 1 --log-dir " +
        folder / "logs" + " --server-arg=--on-trainer-loss=fail --server-arg=--trainer-timeout=30" +
        " -- " + bin("ps_restart_trainer") + " " + folder.path().string() + " " + first);
    EXPECT_EQ(ended.code, 0) << ended.output;
    EXPECT_NE(ended.output.find("was killed by signal 9 (Killed); restart 1 of 1"),
              std::string::npos)
        << ended.output;
    // Two pushes of each step: the one of step 2 that was there is not made twice.
    for (const std::string number : {"0", "1"})
      EXPECT_EQ(read_file(folder / ("result." + number)), "weight 8 after step 4");
  }
}

}  // namespace restart_command_test
