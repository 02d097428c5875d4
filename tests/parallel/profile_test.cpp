// SPDX-License-Identifier: Apache-2.0
// What a trace shows of data-parallel and sharded training.
#include <algorithm>
#include <fstream>
#include <gtest/gtest.h>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "cohort/comm/profiler.h"
#include "cohort/parallel/distributed_data_parallel.h"

#include "tests/base/temporary_folder.h"
#include "tests/parallel/sharding_support.h"
#include "tests/support/ranks.h"

namespace cohort::parallel {
namespace profile_test {

// How often each range occurs in the trace of two steps.
template <class Model>
std::map<std::string, int> ranges_of_two_steps(Model& model, const comm::ProcessGroup& group) {
  const TemporaryFolder folder;
  Profiler profiler({.file = folder / "trace.json", .skip_steps = 1, .num_steps = 2}, group.rank(),
                    group.size());
  for (int step = 0; step < 4; ++step) {
    profiler.step();
    test::sharding::loss_of(model(test::sharding::batch_of(group.rank(), step))).backward();
  }
  profiler.finish();
  std::ifstream stream(folder / (group.rank() == 0 ? "trace.json" : "trace.rank-1.json"));
  const auto trace = nlohmann::json::parse(stream);
  std::map<std::string, int> counts;
  double first = std::numeric_limits<double>::infinity(), last = 0;  // microseconds
  for (const auto& event : trace.at("traceEvents")) {
    if (event.value("ph", "") != "X") continue;
    ++counts[event.at("name")];
    const double begin = event.at("ts");
    first = std::min(first, begin);
    last = std::max(last, begin + event.at("dur").get<double>());
  }
  EXPECT_LT(last - first, 600e6) << "what a viewer shows first is all of the trace";
  return counts;
}

TEST(ProfileTest, AShardedModelShowsEachUnitsForwardGatherAndReduce) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    test::sharding::Tower net;
    FullyShardedDataParallel model(net, group, {}, net->units());
    auto counts = ranges_of_two_steps(model, group);
    EXPECT_EQ(counts["FullyShardedDataParallel.forward"], 2);
    EXPECT_EQ(counts["forward unit outer"], 2);
    EXPECT_EQ(counts["forward unit block"], 4);  // It runs twice in a step.
    const std::string inner = " unit outer.inner, outer.inner.first.weight and on";
    EXPECT_EQ(counts["gather" + inner], 4);  // For forward and for backward.
    EXPECT_EQ(counts["gather.wait" + inner], 4);
    EXPECT_EQ(counts["reduce" + inner], 2);
    EXPECT_EQ(counts["reduce.wait" + inner], 2);
    EXPECT_EQ(counts["reduce the parameters of no unit, table and on"], 2);
    const std::string frozen = " unit frozen, frozen.first.weight and on";
    EXPECT_EQ(counts["gather" + frozen], 2);  // The last unit stays until its backward.
    EXPECT_EQ(counts["reduce" + frozen], 0);
  });
}

TEST(ProfileTest, ADataParallelModelShowsItsForwardAndEachBucket) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    for (const bool hook : {false, true}) {
      test::sharding::Tower net;
      DistributedDataParallel model(
          net, group,
          {.bucket_layout = {
               {"table"},
               {"outer.scale"},
               {"block.first.weight", "block.first.bias", "block.second.weight",
                "block.second.bias", "outer.inner.first.weight", "outer.inner.first.bias",
                "outer.inner.second.weight", "outer.inner.second.bias"}}});
      if (hook) {
        model.register_comm_hook([](const comm::ProcessGroup& peers, const Bucket& bucket) {
          return start_all_reduce(peers, bucket.buffer.div_(peers.size()));
        });
      }
      auto counts = ranges_of_two_steps(model, group);
      EXPECT_EQ(counts["DistributedDataParallel.forward"], 2);
      for (const std::string bucket : {"bucket 0", "bucket 1", "bucket 2"}) {
        EXPECT_EQ(counts["all_reduce.wait " + bucket], 2) << bucket;
        EXPECT_EQ(counts["comm_hook " + bucket], hook ? 2 : 0) << bucket;
      }
      EXPECT_EQ(counts["all_reduce.wait bucket 3"], 0);
    }
  });
}

}  // namespace profile_test
}  // namespace cohort::parallel
