// SPDX-License-Identifier: Apache-2.0
// When ranks compare their calls, and that different calls have different numbers.
#include "cohort/comm/call_matcher.h"

#include <algorithm>
#include <gtest/gtest.h>

#include "cohort/comm/numbered_backend.h"

#include "tests/support/message_of.h"

namespace cohort::comm {
namespace call_matcher_test {

bool agree(const std::vector<CallMatcher>& ranks) {
  std::array<int64_t, 2> maxima = ranks.front().fingerprint();
  for (const CallMatcher& rank : ranks) {
    const auto mine = rank.fingerprint();
    for (size_t i = 0; i < 2; ++i) maxima[i] = std::max(maxima[i], mine[i]);
  }
  return CallMatcher::agree(maxima);
}

TEST(CallMatcherTest, RanksAgreeAsLongAsTheirCallsAreTheSame) {
  std::vector<CallMatcher> ranks(3, CallMatcher(CheckCollectives::kOn));
  EXPECT_TRUE(agree(ranks));
  for (int call = 0; call < 5; ++call) {
    for (CallMatcher& rank : ranks) rank.add("all_reduce of float32[" + std::to_string(call) + "]");
    EXPECT_TRUE(agree(ranks));
    EXPECT_EQ(ranks[0].data_number(), ranks[2].data_number());
  }
  for (size_t odd = 0; odd < ranks.size(); ++odd) {
    auto others = ranks;
    for (size_t rank = 0; rank < ranks.size(); ++rank) others[rank].add(rank == odd ? "a" : "b");
    EXPECT_FALSE(agree(others)) << "rank " << odd;
    EXPECT_NE(others[odd].data_number(), others[(odd + 1) % 3].data_number());
    // What differed once differs for good.
    for (CallMatcher& rank : others) rank.add("barrier");
    EXPECT_FALSE(agree(others));
  }
}

TEST(CallMatcherTest, OrderAndBordersOfCallsCount) {
  CallMatcher a(CheckCollectives::kOn), b(CheckCollectives::kOn), c(CheckCollectives::kOn);
  for (const char* what : {"x", "y"}) a.add(what);
  for (const char* what : {"y", "x"}) b.add(what);
  c.add("xy");
  EXPECT_FALSE(agree({a, b}));
  EXPECT_FALSE(agree({a, c}));
}

TEST(CallMatcherTest, AKindIsComparedOnce) {
  CallMatcher matcher(CheckCollectives::kOn);
  for (const bool is_new : {true, false, false}) {
    matcher.add("all_reduce");
    EXPECT_EQ(matcher.must_compare(/*always=*/false), is_new);
    matcher.add("broadcast");
    EXPECT_EQ(matcher.must_compare(/*always=*/false), is_new);
    matcher.add("barrier");
    EXPECT_TRUE(matcher.must_compare(/*always=*/true));
  }
}

TEST(CallMatcherTest, EveryCallOrNoneIsComparedOnRequest) {
  CallMatcher always(CheckCollectives::kAlways), off(CheckCollectives::kOff);
  for (int call = 0; call < 3; ++call) {
    always.add("all_reduce");
    off.add("all_reduce");
    EXPECT_TRUE(always.must_compare(/*always=*/false));
    EXPECT_FALSE(off.must_compare(/*always=*/true));
  }
  EXPECT_TRUE(always.is_on());
  EXPECT_FALSE(off.is_on());
}

TEST(CallMatcherTest, ComparisonsAndDataHaveDifferentNumbers) {
  CallMatcher matcher(CheckCollectives::kOn);
  for (uint32_t call = 0; call < 1000; ++call) {
    matcher.add(std::to_string(call));
    EXPECT_EQ(matcher.next_comparison(), call);
    EXPECT_GE(matcher.data_number(), 1U << 31);
  }
}

TEST(CallMatcherTest, WhatIsSentIsWhatIsExpected) {
  // By rank, what it sends to ranks 0 and 1, then what it expects of them.
  EXPECT_NO_THROW(check_split_bytes(std::vector<int64_t>{1, 2, 1, 3, 3, 4, 2, 4}, 2));
  EXPECT_NO_THROW(check_split_bytes(std::vector<int64_t>{0, 0}, 1));
  EXPECT_EQ(test::message_of<CallMismatch>([] {
              check_split_bytes(std::vector<int64_t>{1, 2, 1, 5, 3, 4, 2, 4}, 2);
            }),
            "rank 0 expects 5 bytes of rank 1, which sends 3");
}

}  // namespace call_matcher_test
}  // namespace cohort::comm
