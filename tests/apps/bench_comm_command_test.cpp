// SPDX-License-Identifier: Apache-2.0
// `cohort bench comm`: all ranks measure the same, whatever memory their hosts have.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/base/temporary_folder.h"
#include "tests/support/other_flags.h"
#include "tests/support/shell.h"

namespace cohort {
namespace bench_comm_command_test {

using test::bin;
using test::Ended;
using test::shell;

// Ranks 0 and 1 share memory on a host, rank 2 is alone on another.
TEST(BenchCommTest, ARankAloneOnItsHostMeasuresRegisteredTensorsWithTheOthers) {
  const Ended ended = shell(bin("cohort") +
                            " run --nproc-per-node 3 -- sh -c 'COHORT_HOST_NAME=host$((RANK / 2)) "
                            "exec " +
                            bin("cohort-bench") +
                            " comm --registered --backends hierarchical gloo --min-bytes 4096 "
                            "--max-bytes 4096 --rounds 1 --round-bytes 4096 --timeout 30 --json' "
                            "2>/dev/null");
  EXPECT_EQ(ended.code, 0) << ended.output;
  std::vector<std::string> backends;
  std::istringstream lines(ended.output);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("{")) continue;
    const auto result = nlohmann::json::parse(line);
    backends.push_back(result["backend"]);
    const double rate = 4096 / result["us"].get<double>() * 1e-3;  // GB/s
    EXPECT_NEAR(result["algbw_gb_per_s"].get<double>(), rate, 1e-9 * rate);
    // Each rank sends and receives 2 (n - 1) / n of the bytes of an all_reduce.
    EXPECT_NEAR(result["busbw_gb_per_s"].get<double>(), rate * 4 / 3, 1e-9 * rate);
    EXPECT_LE(result["least_us"].get<double>(), result["us"].get<double>());
    EXPECT_GT(result["cpu_us"].get<double>(), 0);
  }
  EXPECT_EQ(backends, (std::vector<std::string>{"hierarchical", "hierarchical-registered", "gloo"}))
      << ended.output;
}

TEST(BenchCommTest, ColumnsAreAlignedWhateverTheBackendsName) {
  const Ended ended = shell(bin("cohort") + " run --nproc-per-node 2 -- " + bin("cohort-bench") +
                            " comm --registered --backends hierarchical shm --min-bytes 4096 "
                            "--max-bytes 4096 --rounds 1 --round-bytes 4096 2>/dev/null");
  ASSERT_EQ(ended.code, 0) << ended.output;
  std::istringstream lines(ended.output);
  std::vector<size_t> lengths;
  for (std::string line; std::getline(lines, line);)
    if (!line.starts_with("#")) lengths.push_back(line.size());
  ASSERT_EQ(lengths.size(), 5U) << ended.output;
  // All columns but the first are flush right.
  EXPECT_EQ(lengths, std::vector<size_t>(5, lengths[0])) << ended.output;
}

TEST(BenchCommTest, LimitsThatLeaveNoSizeAreRefused) {
  const auto expect_refused = [](const std::string& flags, const std::string& text) {
    const Ended ended = shell(bin("cohort-bench") + " comm " + flags);
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_EQ(ended.output, "cohort bench: error: " + text + "\n");
  };
  expect_refused("--min-bytes 4096 --max-bytes 1024",
                 "--min-bytes 4096: expected at most --max-bytes 1024");
  expect_refused("--min-bytes 1 --max-bytes 3",
                 "--max-bytes 3: expected at least 4, a float32 number for each of 1 rank");
}

TEST(BenchCommTest, RanksWithOtherFlagsAreRefusedByTheFlagsName) {
  test::expect_other_flags_refused(bin("cohort-bench") + " comm --max-bytes 4096", "--rounds", "1",
                                   "2");
}

TEST(BenchCommTest, ATerminalSeesProgressAndAFileNone) {
  const TemporaryFolder folder;
  const std::string file = folder / "lines";
  const std::string command = bin("cohort-bench") +
                              " comm --min-bytes 4096 --max-bytes 4096 --rounds 2 --round-bytes "
                              "4096 --json ";
  const Ended seen =
      shell("LC_ALL=C TERM=xterm script -qec '" + command + "> " + file + "' /dev/null");
  EXPECT_EQ(seen.code, 0) << seen.output;
  EXPECT_NE(seen.output.find("4096 bytes ["), std::string::npos) << seen.output;
  EXPECT_NE(seen.output.find(" 2/2 "), std::string::npos) << seen.output;
  const std::string lines = read_file(file);
  EXPECT_EQ(nlohmann::json::parse(lines)["bytes"], 4096) << lines;
  EXPECT_EQ(shell(command + "2>&1 >/dev/null").output, "");
}

}  // namespace bench_comm_command_test
}  // namespace cohort
