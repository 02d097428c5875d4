// SPDX-License-Identifier: Apache-2.0
// How soon ranks name the peer that they lost.
#pragma once
#include <algorithm>
#include <cstdio>
#include <functional>
#include <gtest/gtest.h>
#include <regex>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/base/trace_page.h"

#include "tests/support/ranks.h"

namespace cohort::test {

/// Runs `call` on a rank. Rethrows its PeerError, after a line that says how long the call took.
inline void time_error_of(const std::function<void()>& call) {
  const int64_t start = steady_now_ns();
  try {
    call();
  } catch (const PeerError&) {
    std::printf("named after %d ms\n", static_cast<int>((steady_now_ns() - start) / 1'000'000));
    std::fflush(stdout);
    throw;
  }
}

/// Of `ends`, of which the last rank was killed, those of the others. Expects of each that it ended
/// with kExitLostPeer and wrote `text`.
inline std::vector<RankEnd> survivors_that_wrote(const std::string& text,
                                                 std::vector<RankEnd> ends) {
  ends.pop_back();
  for (const RankEnd& end : ends) {
    EXPECT_EQ(end.exit_code, kExitLostPeer) << end.output;
    EXPECT_NE(end.output.find(text), std::string::npos) << end.output;
  }
  return ends;
}

/// Expects that line of each rank that `run_once` returns, with at most `most_ms`. A machine that
/// stands still for longer runs it again, twice at most.
inline void expect_named_within(int most_ms,
                                const std::function<std::vector<RankEnd>()>& run_once) {
  int longest = 0;
  for (int run = 0; run < 3; ++run) {
    longest = 0;
    for (const RankEnd& end : run_once()) {
      std::smatch match;
      ASSERT_TRUE(std::regex_search(end.output, match, std::regex("named after (\\d+) ms")))
          << end.output;
      longest = std::max(longest, std::stoi(match[1]));
    }
    if (longest <= most_ms) break;
    std::printf("run %d: named after %d ms, expected %d at most\n", run, longest, most_ms);
  }
  EXPECT_LE(longest, most_ms);
}

}  // namespace cohort::test
