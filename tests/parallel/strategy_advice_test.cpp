// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/strategy_advice.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <map>

#include "cohort/base/error.h"

namespace cohort::parallel {
namespace strategy_advice_test {

constexpr int64_t kMillion = 1'000'000;
constexpr int64_t kGib = int64_t{1} << 30;

std::map<std::string, StrategyFit> by_name(const StrategyAdvice& advice) {
  std::map<std::string, StrategyFit> found;
  for (const StrategyFit& each : advice.strategies) found[each.strategy] = each;
  return found;
}

TEST(StrategyAdviceTest, BytesAndTrafficAreThoseOfTheFormulas) {
  const auto four = by_name(advise({.parameters = 100 * kMillion,
                                    .largest_unit = 10 * kMillion,
                                    .world_size = 4,
                                    .local_world_size = 4,
                                    .host_memory_bytes = 64 * kGib}));
  ASSERT_EQ(four.size(), 4) << "one host has nothing to be hybrid with";
  EXPECT_DOUBLE_EQ(four.at("ddp").bytes, 1600e6);
  EXPECT_DOUBLE_EQ(four.at("zero1").bytes, 1000e6 + 40e6 * 2);
  EXPECT_DOUBLE_EQ(four.at("zero2").bytes, 700e6 + 40e6 * 4);
  EXPECT_DOUBLE_EQ(four.at("zero3").bytes, 400e6 + 40e6 * 4.5);
  for (const char* strategy : {"ddp", "zero1", "zero2"})
    EXPECT_DOUBLE_EQ(four.at(strategy).sent, 1.5) << strategy;
  EXPECT_DOUBLE_EQ(four.at("zero3").sent, 2.25);

  const auto hosts = by_name(advise({.parameters = 100 * kMillion,
                                     .world_size = 8,
                                     .local_world_size = 4,
                                     .host_memory_bytes = 64 * kGib}));
  EXPECT_DOUBLE_EQ(hosts.at("zero3").bytes, 200e6);
  EXPECT_DOUBLE_EQ(hosts.at("hybrid").bytes, 400e6);
  EXPECT_DOUBLE_EQ(hosts.at("hybrid").sent, 3 * 0.75 + 2 * 0.5 / 4);
  EXPECT_NE(hosts.at("hybrid").reason.find("4 bytes a parameter: 381.5 MiB of "), std::string::npos)
      << hosts.at("hybrid").reason;
}

// 100 M parameters on 4 ranks: 1.6, 1.0, 0.7 and 0.4 GB, of which 70 % of a rank's memory may be.
TEST(StrategyAdviceTest, TheCheapestThatFitsIsChosen) {
  const auto chosen = [](double rank_gb, int local = 4, int world_size = 4) {
    const auto host = static_cast<int64_t>(rank_gb * 1e9 * local);
    return advise({.parameters = 100 * kMillion,
                   .world_size = world_size,
                   .local_world_size = local,
                   .host_memory_bytes = host});
  };
  EXPECT_EQ(chosen(2.30).chosen, "ddp");
  EXPECT_EQ(chosen(2.27).chosen, "zero1");
  EXPECT_EQ(chosen(1.42).chosen, "zero2");
  EXPECT_EQ(chosen(0.99).chosen, "zero3");
  EXPECT_EQ(chosen(0.58).chosen, "zero3");
  EXPECT_FALSE(chosen(0.56).chosen);
  EXPECT_EQ(chosen(0.60, 4, 8).chosen, "hybrid") << "within the host there is room";
  EXPECT_EQ(chosen(0.30, 4, 8).chosen, "zero3");
  EXPECT_EQ(chosen(2.30, 1, 1).chosen, "ddp");
}

TEST(StrategyAdviceTest, WhereNothingFitsItSaysWhatWould) {
  AdviceRequest request{.parameters = 1000 * kMillion,
                        .world_size = 4,
                        .local_world_size = 2,
                        .host_memory_bytes = 2'000'000'000};
  // 16 GB / 0.7 GB a rank: 22.9, so 24 on hosts of 2.
  const StrategyAdvice advice = advise(request);
  EXPECT_FALSE(advice.chosen);
  EXPECT_EQ(advice.reason, "none fits on 4 ranks: zero3 does on 24, 2 a host");
  request.world_size = 24;
  EXPECT_EQ(advise(request).chosen, "zero3");
  request.largest_unit = 100 * kMillion;
  EXPECT_EQ(
      advise(request).reason,
      "none fits on 24 ranks, nor on more: gathered units and their gradients take 1.86 GiB of a "
      "rank");
}

TEST(StrategyAdviceTest, WhatAProgramKeepsBesideCounts) {
  const AdviceRequest request{.parameters = 100 * kMillion,
                              .largest_unit = 10 * kMillion,
                              .world_size = 8,
                              .local_world_size = 4,
                              .host_memory_bytes = 64 * kGib,
                              .saved_bytes = 16,
                              .gathers_whole = true};
  const auto found = by_name(advise(request));
  EXPECT_DOUBLE_EQ(found.at("ddp").bytes, 1600e6 + 1600e6 / 4) << "one rank of the host's four";
  EXPECT_DOUBLE_EQ(found.at("zero1").bytes, 900e6 + 200e6 + 40e6 * 2.5);
  EXPECT_DOUBLE_EQ(found.at("zero2").bytes, 550e6 + 200e6 + 40e6 * 4.5);
  EXPECT_DOUBLE_EQ(found.at("zero3").bytes, 200e6 + 200e6 + 350e6) << "whole, without gradients";
  EXPECT_DOUBLE_EQ(found.at("hybrid").bytes, 400e6 + 400e6 + 300e6);
  AdviceRequest large = request;
  large.largest_unit = 60 * kMillion;
  EXPECT_DOUBLE_EQ(by_name(advise(large)).at("zero3").bytes, 400e6 + 240e6 * 4.75)
      << "the larger of both";
  EXPECT_NE(found.at("zero1").reason.find("9 bytes a parameter, 2 more in copies to be saved"),
            std::string::npos)
      << found.at("zero1").reason;
}

// 1000 M parameters on 4 ranks of a host. Bytes of a rank, in GB: zero3 11; where two ranks compute
// one model ddp 12, zero1 10; where all four do, ddp 8.
TEST(StrategyAdviceTest, RanksComputeOneModelWhereNothingElseFits) {
  AdviceRequest request{.parameters = 1000 * kMillion,
                        .world_size = 4,
                        .local_world_size = 4,
                        .saved_bytes = 16,
                        .gathers_whole = true};
  const auto with = [&](double rank_gb) {
    request.host_memory_bytes = static_cast<int64_t>(rank_gb * 1e9 * 4 / kShareAtRest);
    return advise(request);
  };
  EXPECT_EQ(with(11.1).tensor_parallel, 1);
  EXPECT_EQ(with(11.1).chosen, "zero2");
  EXPECT_EQ(with(10.1).tensor_parallel, 2);
  EXPECT_EQ(with(10.1).chosen, "zero1");
  EXPECT_NE(with(10.1).reason.find("2 ranks of a host must compute one model"), std::string::npos);
  EXPECT_EQ(with(8.1).tensor_parallel, 4);
  EXPECT_EQ(with(8.1).chosen, "ddp");
  EXPECT_FALSE(with(7.9).chosen);
  EXPECT_EQ(with(7).reason, "none fits on 4 ranks: zero3 does on 12, 4 a host");
  EXPECT_EQ(
      with(3.9).reason,
      "none fits on 4 ranks, nor on more: gathered units and their gradients take 3.73 GiB of a "
      "rank");
}

TEST(StrategyAdviceTest, NumbersOutOfRangeAreRefused) {
  const AdviceRequest good{.parameters = 1, .host_memory_bytes = kGib};
  EXPECT_NO_THROW(advise(good));
  for (const auto change : {+[](AdviceRequest& request) { request.parameters = 0; },
                            +[](AdviceRequest& request) { request.largest_unit = 2; },
                            +[](AdviceRequest& request) { request.world_size = 0; },
                            +[](AdviceRequest& request) { request.local_world_size = 2; },
                            +[](AdviceRequest& request) { request.host_memory_bytes = 0; }}) {
    AdviceRequest bad = good;
    change(bad);
    EXPECT_THROW(advise(bad), ConfigError);
  }
}

TEST(StrategyAdviceTest, ParameterCountsAreRead) {
  EXPECT_EQ(parse_parameter_count("93M"), 93 * kMillion);
  EXPECT_EQ(parse_parameter_count("1.5B"), 1500 * kMillion);
  EXPECT_EQ(parse_parameter_count("350k"), 350'000);
  EXPECT_EQ(parse_parameter_count("93255680"), 93'255'680);
  for (const char* bad :
       {"", "M", "0", "-3M", "93MB", "93 M", "1e9", "nan", "0.1", "1.2.3", "9999999B"})
    EXPECT_FALSE(parse_parameter_count(bad)) << bad;
}

}  // namespace strategy_advice_test
}  // namespace cohort::parallel
