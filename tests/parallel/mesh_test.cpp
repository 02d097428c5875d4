// SPDX-License-Identifier: Apache-2.0
// Where ranks are in a mesh, the groups along its axes, and models on it.
#include "cohort/parallel/mesh.h"

#include <gtest/gtest.h>

#include "cohort/parallel/distributed_data_parallel.h"
#include "cohort/parallel/strategy.h"

#include "tests/parallel/sharding_support.h"
#include "tests/support/hosts.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace cohort::parallel {
namespace mesh_test {

using comm::ProcessGroup;
using test::message_of;

// The numbers in the job of a group's ranks, in its order.
std::vector<int> members(const ProcessGroup& group) {
  std::vector<int> members;
  for (int rank = 0; rank < group.size(); ++rank) members.push_back(group.global_rank(rank));
  return members;
}

TEST(MeshTest, RanksAreLaidOutRowByRow) {
  test::ranks(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh = init_device_mesh(world, {{"dp", 2}, {"tp", 2}});
    EXPECT_EQ(mesh.axis_names(), (std::vector<std::string>{"dp", "tp"}));
    EXPECT_EQ(mesh.describe(), "dp 2 x tp 2");
    EXPECT_EQ(mesh.size(), 4);
    EXPECT_EQ(mesh.coordinate("dp"), world.rank() / 2);
    EXPECT_EQ(mesh.coordinate("tp"), world.rank() % 2);
    EXPECT_EQ(mesh.group("tp").name(), "tp");
    EXPECT_EQ(mesh.group("tp").rank(), world.rank() % 2);
    EXPECT_EQ(mesh.group("tp").all_reduce_sum(world.rank()), world.rank() < 2 ? 1 : 5);
    EXPECT_EQ(mesh.group("dp").all_reduce_sum(world.rank()), world.rank() % 2 == 0 ? 2 : 4);
    EXPECT_EQ(mesh.group(), world) << "all ranks, in their order";
    EXPECT_EQ(mesh.world(), world);
  });
}

TEST(MeshTest, ASubMeshHasSomeAxes) {
  test::ranks(8, [](const ProcessGroup& world) {
    DeviceMesh tensor, data;
    {
      const DeviceMesh mesh =
          init_device_mesh(world, {{"dp_replicate", 2}, {"dp_shard", -1}, {"tp", 2}});
      tensor = mesh["tp"];
      data = mesh[{"dp_replicate", "dp_shard"}];
    }
    EXPECT_EQ(tensor.axis_names(), (std::vector<std::string>{"tp"}));
    EXPECT_EQ(tensor.size(), 2);
    EXPECT_EQ(tensor.coordinate("tp"), world.rank() % 2);
    EXPECT_TRUE(data.has("dp_shard"));
    EXPECT_FALSE(data.has("tp"));
    EXPECT_EQ(data.size(), 4);
    EXPECT_EQ(data.size("dp_shard"), 2);
    const int odd = world.rank() % 2;
    EXPECT_EQ(members(data.group()), (std::vector{odd, odd + 2, odd + 4, odd + 6}));
    EXPECT_EQ(data.group(), data.group()) << "made once";
    EXPECT_EQ(data.group().all_reduce_sum(world.rank()), 12 + 4 * odd);
    EXPECT_EQ(data["dp_shard"].group(), data.group("dp_shard"));
  });
}

TEST(MeshTest, OneProcessIsAMesh) {
  const ProcessGroup alone(comm::RankInfo{});
  const DeviceMesh mesh = init_device_mesh(alone, {{"dp", -1}, {"tp", 1}}, {.within_host = "tp"});
  EXPECT_EQ(mesh.size("dp"), 1);
  EXPECT_EQ(mesh.coordinate("tp"), 0);
  EXPECT_EQ(mesh.group("tp"), alone);
}

TEST(MeshTest, WhatMakesNoMeshIsRefused) {
  const ProcessGroup alone(comm::RankInfo{});
  const auto refused = [&](std::vector<MeshAxis> axes, const DeviceMeshOptions& options = {}) {
    return message_of<c10::ValueError>([&] { init_device_mesh(alone, axes, options); });
  };
  EXPECT_EQ(refused({{"dp", 2}, {"tp", 3}}),
            "device mesh dp 2 x tp 3: expected sizes that multiply to the number of ranks, 1");
  EXPECT_EQ(refused({{"dp", -1}, {"tp", 3}}),
            "device mesh dp -1 x tp 3: expected sizes that multiply to the number of ranks, 1");
  EXPECT_EQ(refused({{"dp", 1 << 20}, {"tp", 1 << 20}}),
            "device mesh dp 1048576 x tp 1048576: expected sizes that multiply to the number of "
            "ranks");
  EXPECT_EQ(refused({{"dp", -1}, {"tp", -1}}),
            "device mesh dp -1 x tp -1: expected one axis of size -1 at most");
  EXPECT_EQ(refused({{"dp", 0}}),
            "device mesh dp 0: expected sizes of at least 1, or -1 for what is left");
  EXPECT_EQ(refused({{"dp", 1}, {"dp", 1}}),
            "device mesh dp 1 x dp 1: expected a name of its own for each axis");
  EXPECT_EQ(refused({}), "device mesh : expected at least one axis");
  EXPECT_EQ(refused({{"dp", 1}}, {.within_host = "tp"}),
            "device mesh dp 1: expected the axis \"tp\", to lie within a host");
}

TEST(MeshTest, AxesThatAreNotThereAreNamed) {
  const ProcessGroup alone(comm::RankInfo{});
  const DeviceMesh mesh = init_device_mesh(alone, {{"a", 1}, {"b", 1}, {"c", 1}});
  const auto refused = [](const auto& call) { return message_of<c10::ValueError>(call); };
  EXPECT_EQ(refused([&] { mesh.group("d"); }), "device mesh a 1 x b 1 x c 1 has no axis \"d\"");
  EXPECT_EQ(refused([&] { mesh["a"].coordinate("b"); }), "device mesh a 1 has no axis \"b\"");
  const std::string order =
      "device mesh a 1 x b 1 x c 1: expected axes in the mesh's order, each once";
  EXPECT_EQ(refused([&] { mesh[{"b", "a"}]; }), order);
  EXPECT_EQ(refused([&] { mesh[{"a", "a"}]; }), order);
  EXPECT_EQ(refused([&] { DeviceMesh().group(); }), "expected a device mesh, got an empty handle");
}

TEST(MeshTest, AWrapperKnowsAxesByTheirNames) {
  const ProcessGroup alone(comm::RankInfo{});
  const auto mesh = [&](const std::vector<std::string>& names) {
    std::vector<MeshAxis> axes;
    for (const std::string& name : names) axes.push_back({name, 1});
    return init_device_mesh(alone, axes);
  };
  EXPECT_EQ(data_axes(mesh({"dp_shard", "tp"})).describe(), "dp_shard 1");
  EXPECT_EQ(data_axes(mesh({"dp_replicate", "dp_shard", "tp"})).describe(),
            "dp_replicate 1 x dp_shard 1");
  EXPECT_EQ(data_axes(mesh({"pp", "dp", "tp"})["dp"]).describe(), "dp 1");
  EXPECT_EQ(model_axes(mesh({"pp", "dp", "tp"})["dp"]).describe(), "dp 1 x tp 1");
  const std::string expected =
      ": expected \"dp\", or \"dp_replicate\" and \"dp_shard\", as data axes, and \"tp\" for "
      "tensor "
      "parallelism, got \"pp\": pass the data axes alone, as mesh[\"dp\"]";
  const auto refused = [](const auto& call) { return message_of<c10::ValueError>(call); };
  torch::nn::Linear net(1, 1);
  EXPECT_EQ(refused([&] {
              DistributedDataParallel<torch::nn::Linear> ddp(net, mesh({"pp", "dp"}));
            }),
            "device mesh pp 1 x dp 1" + expected);
  EXPECT_EQ(refused([&] {
              FullyShardedDataParallel<torch::nn::Linear> fsdp(net, mesh({"pp", "dp"}));
            }),
            "device mesh pp 1 x dp 1" + expected);
  EXPECT_EQ(
      refused([&] { data_axes(mesh({"tp"})); }),
      "device mesh tp 1: expected a data axis, \"dp\", or \"dp_replicate\" and \"dp_shard\"; it "
      "may have size 1");
  EXPECT_EQ(
      refused([&] {
        sharding_groups(mesh({"dp", "dp_shard"}));
      }),
      "sharding: expected the data axis \"dp\", or \"dp_replicate\" and \"dp_shard\", got dp 1 x "
      "dp_shard 1");
}

// It was taken for hybrid sharding, and ranks that hold parts of one model were averaged.
TEST(MeshTest, AModelOnAMeshWithTensorParallelismNeedsItsPlan) {
  test::ranks(2, [](const ProcessGroup& world) {
    const DeviceMesh mesh = init_device_mesh(world, {{"dp_shard", 1}, {"tp", 2}});
    torch::nn::Linear net(1, 1);
    for (const DeviceMesh& part : {mesh, mesh["dp_shard"]}) {
      const auto refused = [](const auto& call) {
        EXPECT_EQ(message_of<c10::ValueError>(call),
                  "device mesh dp_shard 1 x tp 2: the ranks along \"tp\" hold parts of one model: "
                  "expected the option tensor_parallel, which names the parameters that are cut");
      };
      refused([&] { DistributedDataParallel<torch::nn::Linear> ddp(net, part); });
      refused([&] { FullyShardedDataParallel<torch::nn::Linear> fsdp(net, part); });
      refused([&] { ParallelModel<torch::nn::Linear> model(net, part); });
    }
  });
}

// Each host's second rank is another one in the order of numbers than its first.
TEST(MeshTest, InnerAxesLieWithinHostsWhateverTheirRanksNumbers) {
  test::ranks(4, [](const ProcessGroup& group) {
    test::on_hosts(group, {"a", "b", "b", "a"}, [](const ProcessGroup& world) {
      const DeviceMesh mesh = init_device_mesh(world, {{"dp_replicate", -1}, {"dp_shard", -1}},
                                               {.within_host = "dp_shard"});
      EXPECT_EQ(mesh.describe(), "dp_replicate 2 x dp_shard 2");
      const bool on_a = world.rank() % 3 == 0, is_second = world.rank() >= 2;
      EXPECT_EQ(mesh.coordinate("dp_replicate"), on_a ? 0 : 1);
      EXPECT_EQ(mesh.coordinate("dp_shard"), is_second ? 1 : 0);
      const ProcessGroup shard = mesh.group("dp_shard"), replicate = mesh.group("dp_replicate");
      EXPECT_EQ(members(shard), on_a ? (std::vector{0, 3}) : (std::vector{1, 2}));
      EXPECT_EQ(members(replicate), is_second ? (std::vector{3, 2}) : (std::vector{0, 1}));
      EXPECT_EQ(shard.rank(), mesh.coordinate("dp_shard"));
      EXPECT_EQ(replicate.rank(), mesh.coordinate("dp_replicate"));
      EXPECT_EQ(replicate.all_reduce_sum(world.rank()), is_second ? 5 : 1);
      EXPECT_EQ(members(mesh.group()), (std::vector{0, 3, 1, 2}));
      EXPECT_EQ(mesh.group().broadcast_object(std::to_string(world.rank()), 1), "3");
    });
  });
}

TEST(MeshTest, HostsThatDoNotFitAreNamed) {
  test::ranks(3, [](const ProcessGroup& group) {
    test::on_hosts(group, {"left", "right", "left"}, [](const ProcessGroup& world) {
      const auto refused = [&](int size) {
        return message_of<c10::ValueError>([&] {
          init_device_mesh(world, {{"dp", -1}, {"tp", size}}, {.within_host = "tp"});
        });
      };
      EXPECT_EQ(refused(-1),
                "device mesh dp -1 x tp -1: expected as many ranks on each host, because tp lies "
                "within a host; got 2 on left, 1 on right");
      EXPECT_EQ(refused(2),
                "device mesh dp -1 x tp 2: expected a multiple of 2 ranks on each host, because tp "
                "lies within a host; got 2 on left, 1 on right");
      EXPECT_EQ(init_device_mesh(world, {{"dp", -1}, {"tp", 1}}, {.within_host = "tp"}).size("dp"),
                3);
    });
  });
}

TEST(MeshTest, AStrategysMeshFollowsTheHosts) {
  test::ranks(4, [](const ProcessGroup& group) {
    EXPECT_EQ(init_strategy_mesh(group, Strategy::kZero3).group(), group);
    EXPECT_EQ(message_of<ConfigError>([&] { init_strategy_mesh(group, Strategy::kHybrid); }),
              "strategy hybrid: expected several hosts, got one: choose zero3");
    EXPECT_EQ(message_of<ConfigError>([&] { init_strategy_mesh(group, Strategy::kDdp, 3); }),
              "--tensor-parallel 3: expected a divisor of the number of ranks, 4");
    test::on_hosts(group, {"a", "b", "a", "b"}, [](const ProcessGroup& world) {
      const DeviceMesh tensor = init_strategy_mesh(world, Strategy::kZero1, 2);
      EXPECT_EQ(tensor.describe(), "dp 2 x tp 2");
      EXPECT_EQ(tensor.group("tp").all_reduce_sum(world.rank()), world.rank() % 2 == 0 ? 2 : 4)
          << "one host's";
      const DeviceMesh hybrid = init_strategy_mesh(world, Strategy::kHybrid, 2);
      EXPECT_EQ(hybrid.describe(), "dp_replicate 2 x dp_shard 1 x tp 2");
      EXPECT_EQ(data_axes(hybrid).describe(), "dp_replicate 2 x dp_shard 1");
    });
    test::on_hosts(group, {"a", "b", "b", "b"}, [](const ProcessGroup& world) {
      const DeviceMesh tensor = init_strategy_mesh(world, Strategy::kDdp, 2);
      EXPECT_EQ(tensor.group("tp").all_reduce_sum(world.rank()), world.rank() < 2 ? 1 : 5)
          << "neighbours, where models do not fit into hosts";
    });
  });
}

TEST(MeshTest, AModelShardedWithinScatteredHostsTrainsAsOneProcess) {
  test::ranks(4, [](const ProcessGroup& group) {
    test::on_hosts(group, {"a", "b", "b", "a"}, [](const ProcessGroup& world) {
      test::sharding::expect_plain_training(
          world, {.delay = 2, .clip = 0.5, .mesh = init_strategy_mesh(world, Strategy::kHybrid)});
    });
  });
}

TEST(MeshTest, DistributedDataParallelAveragesAlongTheGivenAxes) {
  test::ranks(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh = init_device_mesh(world, {{"dp_replicate", 2}, {"dp_shard", 2}});
    for (const DeviceMesh& part : {mesh["dp_replicate"], mesh}) {
      torch::nn::Linear net(1, 1);
      DistributedDataParallel<torch::nn::Linear> ddp(net, part);
      const at::Tensor x = at::full({1, 1}, world.rank(), at::kFloat);
      ddp(x).sum().backward();
      const double mean = part.size() == 4 ? 1.5 : world.rank() % 2 == 0 ? 1 : 2;
      EXPECT_EQ(net->weight.grad().item<double>(), mean);
    }
  });
}

TEST(MeshTest, AStrategyRefusesAMeshOfOtherAxes) {
  const ProcessGroup alone(comm::RankInfo{});
  const DeviceMesh mesh = init_device_mesh(alone, {{"dp_replicate", 1}, {"dp_shard", 1}});
  torch::nn::Linear net(1, 1);
  EXPECT_EQ(message_of<c10::ValueError>([&] {
              ParallelModel<torch::nn::Linear> model(net, mesh, {.strategy = Strategy::kZero3});
            }),
            "strategy zero3: expected a mesh with number of data axes 1, got dp_replicate 1 x "
            "dp_shard 1");
}

}  // namespace mesh_test
}  // namespace cohort::parallel
