// SPDX-License-Identifier: Apache-2.0
// Updates of a translator on a device whose memory the host may not touch: bit by bit those of the
// CPU with the same operations.
#include <algorithm>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "cohort/comm/backends/gloo/host_staging.h"
#include "cohort/translate/corpus.h"
#include "cohort/translate/updater.h"

#include "tests/device/host_operators.h"
#include "tests/device/same_bits.h"
#include "tests/device/second_device.h"
#include "tests/support/aten_kernels.h"
#include "tests/support/hosts.h"
#include "tests/support/message_of.h"
#include "tests/support/sentences.h"

namespace cohort::translate {
namespace updater_device_test {

using parallel::Strategy;

constexpr int kNumUpdates = 4;

struct Case {
  Strategy strategy = Strategy::kDdp;
  bool cpu_offload = false;
  bool gradient_checkpointing = false;
  int tensor_parallel = 1;
};

nmt::Transformer model_of(at::Device device,
                          const std::shared_ptr<const nmt::TensorParallelContext>& context =
                              std::make_shared<nmt::TensorParallelContext>()) {
  auto options = test::tiny_options();
  options.dropout = 0.2;
  nmt::Transformer model(options, nmt::Precision::kFloat32, device, context);
  model->initialise(7);
  return model;
}

UpdaterOptions options_of(const Case& c) {
  return {.strategy = c.strategy,
          .cpu_offload = c.cpu_offload,
          .gradient_checkpointing = c.gradient_checkpointing,
          .schedule = {.factor = 0.05, .width = 16, .warmup = 3},
          .clip_norm = 0.8,
          .exponential_smoothing = 0.75};
}

// Two of this rank's own.
std::vector<nmt::Batch> batches_of(int update, const comm::ProcessGroup& group) {
  std::vector<nmt::Batch> batches;
  for (int i = 0; i < 2; ++i) {
    const auto seed = static_cast<uint32_t>(10 * update + 2 * group.rank() + i);
    batches.push_back(test::make_test_batch(test::make_sentences(4, seed)));
    if (!group.device().is_cpu()) batches.back() = pinned(batches.back());
  }
  return batches;
}

// All that a checkpoint holds, and what the updates said, on the CPU.
std::vector<at::Tensor> results_on(const comm::ProcessGroup& group, const Case& c) {
  UpdaterOptions options = options_of(c);
  options.mesh = parallel::init_strategy_mesh(group, c.strategy, c.tensor_parallel);
  const auto context = c.tensor_parallel > 1
                           ? make_tensor_parallel_context(options.mesh.group("tp"))
                           : std::make_shared<nmt::TensorParallelContext>();
  const comm::ProcessGroup data_group = parallel::data_axes(options.mesh).group();
  Updater updater(model_of(group.device(), context), group, options);
  std::vector<at::Tensor> results;
  for (int update = 0; update < kNumUpdates; ++update) {
    const UpdateReport report = updater.update(batches_of(update, data_group));
    EXPECT_FALSE(report.skipped);
    // The order of a norm's sum in float64 depends on where a shard lies in memory: it is rounded.
    results.push_back(at::tensor({report.nll_sum}, at::kDouble));
    results.push_back(at::tensor({report.gradient_norm}, at::kFloat));
  }
  const at::Device kept = c.cpu_offload ? at::Device(at::kCPU) : group.device();
  for (const auto& [part, shards] : updater.parts()) {
    for (const auto& shard : shards) {
      EXPECT_EQ(shard.tensor.device(), kept) << part << ": " << shard.name;
      results.push_back(shard.tensor.detach().cpu());
    }
  }
  return results;
}

void expect_bits_of_the_cpu(const comm::ProcessGroup& group, const Case& c) {
  SCOPED_TRACE(to_string(c.strategy) + (c.cpu_offload ? ", offload" : "") +
               (c.gradient_checkpointing ? ", gradient checkpointing" : "") +
               (c.tensor_parallel > 1 ? ", tensor parallel" : ""));
  const test::AtenKernels same_operations;
  const auto expected = results_on(test::on_cpu(group), c);
  test::expect_same_bits(results_on(group, c), expected);
}

TEST(UpdaterDeviceTest, OneRankUpdatesAsOnTheCpu) {
  test::device_ranks(1, [](const comm::ProcessGroup& group) {
    EXPECT_EQ(group.device(), test::second_device());
    expect_bits_of_the_cpu(group, {});
    expect_bits_of_the_cpu(group, {.gradient_checkpointing = true});
  });
}

TEST(UpdaterDeviceTest, TwoRanksOfEachStrategyUpdateAsOnTheCpu) {
  test::device_ranks(2, [](const comm::ProcessGroup& group) {
    for (const Strategy strategy :
         {Strategy::kDdp, Strategy::kZero1, Strategy::kZero2, Strategy::kZero3})
      expect_bits_of_the_cpu(group, {.strategy = strategy});
    expect_bits_of_the_cpu(group, {.strategy = Strategy::kZero3, .gradient_checkpointing = true});
    for (const Strategy strategy : {Strategy::kZero1, Strategy::kZero3})
      expect_bits_of_the_cpu(group, {.strategy = strategy, .cpu_offload = true});
  });
}

TEST(UpdaterDeviceTest, TwoRanksOfOneModelUpdateAsOnTheCpu) {
  test::device_ranks(2, [](const comm::ProcessGroup& group) {
    expect_bits_of_the_cpu(group, {.tensor_parallel = 2});
  });
}

TEST(UpdaterDeviceTest, TwoShardedModelsOfTwoRanksUpdateAsOnTheCpu) {
  test::device_ranks(4, [](const comm::ProcessGroup& group) {
    for (const Strategy strategy : {Strategy::kZero1, Strategy::kZero3})
      expect_bits_of_the_cpu(group, {.strategy = strategy, .tensor_parallel = 2});
  });
}

TEST(UpdaterDeviceTest, ThreeRanksUpdateAsOnTheCpu) {
  test::device_ranks(3, [](const comm::ProcessGroup& group) {
    for (const Strategy strategy : {Strategy::kDdp, Strategy::kZero3})
      expect_bits_of_the_cpu(group, {.strategy = strategy});
  });
}

TEST(UpdaterDeviceTest, TwoHostsOfTwoRanksUpdateAsOnTheCpu) {
  test::device_ranks(4, [](const comm::ProcessGroup& group) {
    const auto on_two_hosts = [](const comm::ProcessGroup& world) {
      EXPECT_EQ(world.device(), test::second_device());
      for (const bool cpu_offload : {false, true})
        expect_bits_of_the_cpu(world, {.strategy = Strategy::kHybrid, .cpu_offload = cpu_offload});
    };
    test::on_hosts(group, {"a", "b", "b", "a"}, on_two_hosts, {.backend = "second"});
  });
}

// What carries two ranks on one card.
TEST(UpdaterDeviceTest, RanksOfGlooThroughTheHostUpdateAsOnTheCpu) {
  if (std::getenv("COHORT_TEST_RANK") != nullptr)
    comm::register_backend("gloo_second", comm::gloo_through_host(test::second_device().type()));
  const auto body = [](const comm::ProcessGroup& group) {
    EXPECT_EQ(group.device(), test::second_device());
    for (const Strategy strategy : {Strategy::kDdp, Strategy::kZero3})
      expect_bits_of_the_cpu(group, {.strategy = strategy});
  };
  for (const auto& end : test::run_ranks(2, body, {.backend = "gloo_second"}))
    EXPECT_EQ(end.exit_code, 0) << end.output;
}

// What a step asks of the device. A batch is six tensors.
TEST(UpdaterDeviceTest, AnUpdateWaitsForTheDeviceOnce) {
  test::device_ranks(2, [](const comm::ProcessGroup& group) {
    for (const Strategy strategy :
         {Strategy::kDdp, Strategy::kZero1, Strategy::kZero2, Strategy::kZero3}) {
      SCOPED_TRACE(to_string(strategy));
      Updater updater(model_of(group.device()), group, options_of({.strategy = strategy}));
      test::DeviceCounts counts;
      int64_t least_new_blocks = 1;  // A collective's thread may give a block back a moment late.
      for (int update = 0; update < kNumUpdates; ++update) {
        const auto batches = batches_of(0, group);
        test::reset_device_counts();
        EXPECT_FALSE(updater.update(batches).skipped);
        counts = test::device_counts();
        if (update > 0) least_new_blocks = std::min(least_new_blocks, counts.new_blocks);
      }
      EXPECT_EQ(counts.synchronisations, 1) << "for the norm";
      EXPECT_EQ(counts.device_to_host, 2) << "norms and loss";
      EXPECT_EQ(counts.host_to_device, 2 * 6) << "two batches";
      EXPECT_EQ(least_new_blocks, 0);
    }
  });
}

TEST(UpdaterDeviceTest, ABatchIsCopiedWhileTheOneBeforeIsComputed) {
  test::device_ranks(1, [](const comm::ProcessGroup& group) {
    const nmt::Transformer model = model_of(group.device());
    Updater updater(model, group, options_of({}));
    std::vector<int64_t> copies;  // When a batch's last gradient is there.
    model->named_parameters()["source_embedding"].register_hook(
        [&](const at::Tensor&) { copies.push_back(test::device_counts().side_copies); });
    auto batches = batches_of(0, group);
    batches.push_back(batches.front());
    for (int update = 0; update < 2; ++update) {
      copies.clear();
      test::reset_device_counts();
      EXPECT_FALSE(updater.update(batches).skipped);
      EXPECT_EQ(copies, (std::vector<int64_t>{2 * 6, 3 * 6, 3 * 6}));
      const test::DeviceCounts counts = test::device_counts();
      EXPECT_EQ(counts.side_copies, 3 * 6);
      EXPECT_GE(counts.stream_waits, 3);
      EXPECT_EQ(counts.early_frees, 0);
    }
  });
}

// But for what ranks tell each other: a number for each parameter at most. A batch has more tokens.
TEST(UpdaterDeviceTest, NothingIsComputedOnTheHost) {
  test::device_ranks(2, [](const comm::ProcessGroup& group) {
    for (const Strategy strategy :
         {Strategy::kDdp, Strategy::kZero1, Strategy::kZero2, Strategy::kZero3}) {
      SCOPED_TRACE(to_string(strategy));
      const nmt::Transformer model = model_of(group.device());
      const auto num_parameters = std::ssize(model->parameters());
      Updater updater(model, group, options_of({.strategy = strategy}));
      int64_t num_gradients = 0;
      for (const at::Tensor& parameter : model->parameters())
        parameter.register_hook([&](const at::Tensor& gradient) {
          EXPECT_EQ(gradient.device(), group.device());
          ++num_gradients;
        });
      // The loader's work.
      const std::vector batches{pinned(test::make_test_batch(test::make_sentences(40, 1))),
                                pinned(test::make_test_batch(test::make_sentences(40, 2)))};
      ASSERT_GT(batches[0].num_target_tokens, num_parameters);
      updater.update(batches);  // Ranks compare, as text, what they call for the first time.
      num_gradients = 0;
      const test::HostOperators host(num_parameters);
      EXPECT_FALSE(updater.update(batches).skipped);
      EXPECT_EQ(host.found(), std::vector<std::string>());
      EXPECT_GT(host.on_device(), 100) << "it sees operators";
      EXPECT_EQ(num_gradients, 2 * num_parameters);
      for (const auto& [part, shards] : updater.parts())
        for (const auto& shard : shards)
          EXPECT_EQ(shard.tensor.device(), group.device()) << part << ": " << shard.name;
    }
  });
}

TEST(UpdaterDeviceTest, ABadGradientSkipsTheUpdate) {
  test::device_ranks(2, [](const comm::ProcessGroup& group) {
    const nmt::Transformer model = model_of(group.device());
    bool spoil = group.rank() == 1;
    model->named_parameters()["encoder.layers.1.linear1.weight"].register_hook(
        [&](const at::Tensor& gradient) { return spoil ? gradient * NAN : gradient; });
    Updater updater(model, group, options_of({}));
    const UpdateReport bad = updater.update(batches_of(0, group));
    EXPECT_TRUE(bad.skipped);
    EXPECT_EQ(bad.bad.rank, 1);
    EXPECT_EQ(bad.bad.parameter, "encoder.layers.1.linear1.weight");
    spoil = false;
    EXPECT_FALSE(updater.update(batches_of(1, group)).skipped);
    EXPECT_EQ(updater.num_updates(), 1);
  });
}

TEST(UpdaterDeviceTest, AModelElsewhereThanTheGroupIsRefused) {
  test::device_ranks(1, [](const comm::ProcessGroup& group) {
    const std::string error = test::message_of<c10::ValueError>(
        [&] { Updater(model_of(at::kCPU), group, options_of({})); });
    EXPECT_NE(error.find("parameter source_embedding is on the CPU"), std::string::npos) << error;
  });
}

}  // namespace updater_device_test
}  // namespace cohort::translate
