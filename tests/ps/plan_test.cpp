// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/plan.h"

#include <algorithm>
#include <functional>
#include <gtest/gtest.h>

#include "cohort/base/error.h"

namespace cohort::ps {
namespace plan_test {

const char* const kTwoServers = "a:1,b:2";
const char* const kThreeServers = "a:1,b:2,c:3";

PlanOptions with_servers(const std::string& pservers) {
  PlanOptions options;
  options.pservers = pservers;
  return options;
}

std::vector<int64_t> sizes_of(const Plan& plan) {
  std::vector<int64_t> sizes;
  for (const Block& block : plan.blocks) sizes.push_back(block.size());
  return sizes;
}

std::vector<int> servers_of(const Plan& plan) {
  std::vector<int> servers;
  for (const Block& block : plan.blocks) servers.push_back(block.server);
  return servers;
}

std::vector<int64_t> cut(const std::vector<int64_t>& shape, const std::string& pservers) {
  return sizes_of(plan({{"w", shape}}, with_servers(pservers)));
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const ConfigError& error) {
    return one_line(error);
  }
  return "no error";
}

std::vector<ParameterShape> deep_model() {
  return {{"deep.0.weight", {400, 429}}, {"deep.0.bias", {400}},      {"deep.1.weight", {400, 400}},
          {"deep.1.bias", {400}},        {"deep.2.weight", {1, 400}}, {"deep.2.bias", {1}}};
}

using Sizes = std::vector<int64_t>;

// Computed by hand from the formula in the header.
TEST(PlanTest, SlicesAreFluids) {
  EXPECT_EQ(cut({400, 429}, kTwoServers), (Sizes{85800, 85800}));  // 200 whole rows each
  EXPECT_EQ(cut({5, 8192}, kThreeServers), (Sizes{16384, 16384, 8192}));
  EXPECT_EQ(cut({4, 8192}, kThreeServers), (Sizes{16384, 16384}));  // rounding up leaves two
  EXPECT_EQ(cut({20001}, kThreeServers), (Sizes{10001, 10000}));    // at most 20001 / 8192 = 2
  EXPECT_EQ(cut({8192}, kThreeServers), (Sizes{8192}));
  EXPECT_EQ(cut({16383}, kThreeServers), (Sizes{16383}));
  EXPECT_EQ(cut({16384}, kThreeServers), (Sizes{8192, 8192}));
  EXPECT_EQ(cut({}, kThreeServers), (Sizes{1}));
  EXPECT_EQ(cut({2, 3, 8192}, kThreeServers), (Sizes{24576, 24576}));
}

TEST(PlanTest, BlocksCoverEveryParameterInOrder) {
  for (const bool slice : {true, false}) {
    for (const int64_t min_block_size : {1, 7, 8192}) {
      PlanOptions options = with_servers(kThreeServers);
      options.slice_var_up = slice;
      options.min_block_size = min_block_size;
      const Plan made = plan(deep_model(), options);
      size_t next = 0;
      for (size_t p = 0; p < made.parameters.size(); ++p) {
        int64_t covered = 0;
        for (; next < made.blocks.size() && made.blocks[next].parameter == static_cast<int>(p);
             ++next) {
          EXPECT_EQ(made.blocks[next].begin, covered);
          EXPECT_GT(made.blocks[next].size(), 0);
          covered = made.blocks[next].end;
        }
        EXPECT_EQ(covered, made.parameters[p].numel());
      }
      EXPECT_EQ(next, made.blocks.size());
    }
  }
}

TEST(PlanTest, RoundRobinTakesTurnsOverBlocks) {
  const Plan made = plan(deep_model(), with_servers(kTwoServers));
  EXPECT_EQ(servers_of(made), (std::vector<int>{0, 1, 0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(made.blocks[0].name, "deep.0.weight.block0");
  EXPECT_EQ(made.blocks[2].name, "deep.0.bias");
  EXPECT_EQ(made.elements_of(0), 85800 + 400 + 80000 + 400);
  EXPECT_EQ(made.blocks_of(1).size(), 4u);
}

// Computed apart from the code: another machine or library must place them alike.
TEST(PlanTest, HashedNamesStayWhereTheyAreInOtherModels) {
  PlanOptions options = with_servers(kThreeServers);
  options.split_method = split_method_named("HashName");
  const std::vector<ParameterShape> parameters{
      {"fc.0.weight", {4}}, {"fc.0.bias", {4}}, {"fc.1.weight", {4}}, {"fc.1.bias", {4}}};
  EXPECT_EQ(servers_of(plan(parameters, options)), (std::vector<int>{2, 1, 0, 1}));
  EXPECT_EQ(servers_of(plan({parameters[2], parameters[1]}, options)), (std::vector<int>{0, 1}));
}

TEST(PlanTest, WholeParametersDoNotPutAllWeightsOnOneServer) {
  std::vector<ParameterShape> parameters;
  for (int layer = 0; layer < 8; ++layer) {
    parameters.push_back({"weight" + std::to_string(layer), {100, 100}});
    parameters.push_back({"bias" + std::to_string(layer), {100}});
  }
  PlanOptions options = with_servers(kTwoServers);
  options.slice_var_up = false;
  const Plan made = plan(parameters, options);
  ASSERT_EQ(made.blocks.size(), parameters.size());
  EXPECT_EQ(made.blocks_of(0).size(), 8u);
  for (const int server : {0, 1}) EXPECT_GE(made.elements_of(server), 2 * 10000);
  // The number of trainers and which one asks make no difference.
  options.trainers = 5;
  options.trainer_id = 3;
  EXPECT_EQ(servers_of(plan(parameters, options)), servers_of(made));
}

TEST(PlanTest, UsersFunctionPlacesBlocks) {
  PlanOptions options = with_servers(kThreeServers);
  options.split_method = {"last", [](const Block& block, int64_t number, int num_servers) {
                            EXPECT_EQ(number, block.parameter);
                            return num_servers - 1;
                          }};
  EXPECT_EQ(servers_of(plan({{"a", {1}}, {"b", {1}}}, options)), (std::vector<int>{2, 2}));
  options.split_method.server = [](const Block&, int64_t, int) { return 3; };
  EXPECT_EQ(error_of([&] {
              plan({{"a", {1}}}, options);
            }),
            "split_method last: expected a server from 0 to 2 for a, got 3");
}

TEST(PlanTest, TrainerZeroInitialises) {
  PlanOptions options = with_servers(kTwoServers);
  options.trainers = 2;
  EXPECT_TRUE(plan(deep_model(), options).initialises());
  options.trainer_id = 1;
  EXPECT_FALSE(plan(deep_model(), options).initialises());
  options.trainer_id = 0;
  options.current_endpoint = "b:2";
  const Plan server = plan(deep_model(), options);
  EXPECT_FALSE(server.initialises());
  EXPECT_EQ(server.server_id(), 1);
}

TEST(PlanTest, CollectiveGivesTheGroupsPlace) {
  PlanOptions options;
  options.mode = plan_mode_named("collective");
  options.trainer_endpoints = "a:1,b:2,c:3";
  options.trainer_id = 2;
  options.current_endpoint = "c:3";
  const Plan made = plan(deep_model(), options);
  ASSERT_TRUE(made.group);
  EXPECT_EQ(made.group->rank, 2);
  EXPECT_EQ(made.group->world_size, 3);
  EXPECT_EQ(made.group->endpoints.front(), "a:1");
  EXPECT_TRUE(made.blocks.empty());
  EXPECT_FALSE(made.initialises());
  EXPECT_NE(made.text().find("a process group of 3 trainers"), std::string::npos);
  options.current_endpoint = "b:2";
  EXPECT_EQ(error_of([&] { plan(deep_model(), options); }),
            "current_endpoint: expected that of trainer 2 in trainer_endpoints, c:3, got b:2");
}

TEST(PlanTest, PrintsWhatLivesWhere) {
  PlanOptions options = with_servers(kTwoServers);
  options.trainers = 2;
  const Plan made = plan({{"w", {4, 8192}}, {"b", {4}}}, options);
  EXPECT_EQ(made.text(),
            "mode pserver, sync: 2 trainers, 2 servers, RoundRobin, blocks of 8192 elements or "
            "more\n"
            "  block     shape      elements        count  server\n"
            "  w.block0  [4, 8192]  [0, 16384)      16384  0 a:1\n"
            "  w.block1  [4, 8192]  [16384, 32768)  16384  1 b:2\n"
            "  b         [4]        [0, 4)          4      0 a:1\n"
            "server 0 a:1: 2 blocks, 16388 elements, 50.0 %\n"
            "server 1 b:2: 1 block, 16384 elements, 50.0 %\n"
            "trainer 0 initialises\n");
}

TEST(PlanTest, BadOptionsAreNamed) {
  const auto refusal = [](const std::function<void(PlanOptions&)>& change,
                          std::vector<ParameterShape> parameters = {{"w", {4}}}) {
    PlanOptions options = with_servers(kTwoServers);
    change(options);
    return error_of([&] { plan(std::move(parameters), options); });
  };
  EXPECT_EQ(refusal([](auto& o) { o.pservers = ""; }),
            "pservers: expected host:port,host:port (or unix:PATH), got ''");
  EXPECT_EQ(refusal([](auto& o) { o.trainers = 0; }), "trainers: expected 1 or more, got 0");
  EXPECT_EQ(refusal([](auto& o) { o.trainer_id = 1; }),
            "trainer_id: expected 0 to trainers - 1 = 0, got 1");
  EXPECT_EQ(refusal([](auto& o) { o.min_block_size = 0; }),
            "min_block_size: expected 1 or more elements, got 0");
  EXPECT_EQ(refusal([](auto& o) { o.current_endpoint = "c:3"; }),
            "current_endpoint: expected one of a:1,b:2, got 'c:3'");
  EXPECT_EQ(refusal([](auto& o) {
              o.split_method = {"mine", nullptr};
            }),
            "split_method: expected a function, got none under the name 'mine'");
  EXPECT_EQ(refusal([](auto& o) { o.mode = PlanOptions::Mode::kCollective; }),
            "pservers: expected none in mode collective, got a:1,b:2");
  EXPECT_EQ(refusal([](auto&) {}, {{"w", {4}}, {"w", {4}}}),
            "parameter w: expected each name once, got it twice");
  EXPECT_EQ(refusal([](auto&) {}, {{"w", {4, 0}}}),
            "parameter w: expected positive dimensions, got 0");
  EXPECT_EQ(refusal([](auto&) {}, {{"w", {int64_t{1} << 40, int64_t{1} << 40}}}),
            "parameter w: expected at most 2^60 elements, got more");
  EXPECT_EQ(error_of([] { split_method_named("Hash"); }),
            "split_method: expected RoundRobin or HashName, got Hash");
  EXPECT_EQ(error_of([] { plan_mode_named("nccl2"); }),
            "mode: expected pserver or collective, got nccl2");
}

}  // namespace plan_test
}  // namespace cohort::ps
