// SPDX-License-Identifier: Apache-2.0
// Sharded models of which a part is frozen, ignored, or kept by few ranks: results and memory.
#include <gtest/gtest.h>

#include "cohort/parallel/sharding/graph_section.h"
#include "cohort/parallel/sharding/unit_parameters.h"
#include "cohort/translate/tensor_memory.h"

#include "bench/sent_bytes.h"
#include "tests/parallel/sharding_support.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace cohort {
namespace sharding_partial_test {

using comm::ProcessGroup;
using parallel::LocalShard;
using test::message_of;
using test::sharding::batch_of;
using test::sharding::expect_plain_training;
using test::sharding::FullyShardedDataParallel;
using test::sharding::kShards;
using test::sharding::loss_of;
using test::sharding::Shard;
using test::sharding::ShardingOptions;
using test::sharding::Tower;

constexpr int64_t kWidth = 256;
constexpr int64_t kLayerBytes = kWidth * kWidth * 4;

// A large matrix that is frozen beside two narrow ones that are trained.
struct LoraLayerImpl : torch::nn::Module {
  explicit LoraLayerImpl(bool trained) {
    large = register_parameter("large", at::eye(kWidth), /*requires_grad=*/false);
    down = register_parameter("down", at::full({kWidth, 2}, 1e-2), trained);
    up = register_parameter("up", at::full({2, kWidth}, 1e-2), trained);
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::tanh(at::matmul(x, large) + at::matmul(at::matmul(x, down), up));
  }
  at::Tensor large, down, up;
};
TORCH_MODULE(LoraLayer);

// Layers, the first of which runs again at the end.
struct LoraImpl : torch::nn::Module {
  static constexpr int kLayers = 8;
  explicit LoraImpl(int first_trained) {
    for (int i = 0; i < kLayers; ++i)
      layers.push_back(register_module(std::to_string(i), LoraLayer(i >= first_trained)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = test::sharding::unit(layer, x);
    return test::sharding::unit(layers.front(), x);
  }
  std::vector<torch::nn::Module*> units() {
    std::vector<torch::nn::Module*> all;
    for (auto& layer : layers) all.push_back(layer.get());
    return all;
  }
  std::vector<LoraLayer> layers;
};
TORCH_MODULE(Lora);

at::Tensor wide_batch(int rank) {
  return at::arange(2 * kWidth, at::kFloat).mul(1 + rank).cos().view({2, kWidth});
}

// The layer that computes, the next one, and the last one of forward.
void expect_frozen_units_freed(const ProcessGroup& group) {
  // All are trained; the last half; none but the whole model's own (which has none).
  for (const int first_trained : {0, 4, 7}) {
    Lora plain(first_trained);
    for (int rank = 0; rank < group.size(); ++rank)
      (loss_of(plain->forward(wide_batch(rank))) / group.size()).backward();
    Lora model(first_trained);
    FullyShardedDataParallel<Lora> sharded(model, group, {}, model->units());
    const translate::TensorMemory memory;
    for (int step = 0; step < 2; ++step) {
      for (const LocalShard& local_shard : sharded.local_shards())
        local_shard.tensor.mutable_grad().reset();
      loss_of(sharded(wide_batch(group.rank()))).backward();
      EXPECT_LE(memory.now(), kLayerBytes / 8) << "after backward gradients alone are held";
    }
    EXPECT_LE(memory.peak(), 3 * kLayerBytes + kLayerBytes / 4)
        << "first trained " << first_trained;
    const auto expected = plain->named_parameters();
    for (const LocalShard& local_shard : sharded.local_shards()) {
      const at::Tensor& whole = expected[local_shard.name].grad();
      ASSERT_EQ(local_shard.tensor.grad().defined(), whole.defined()) << local_shard.name;
      if (!whole.defined()) continue;
      // A sum of two or three, each of few hundred float32 products.
      EXPECT_TRUE(local_shard.tensor.grad().allclose(
          whole.reshape({-1}).narrow(0, local_shard.begin, local_shard.end - local_shard.begin),
          1e-4, 1e-5))
          << local_shard.name;
    }
  }
}

TEST(ShardingPartialTest, AFrozenUnitIsFreedAsSoonAsBackwardHasPassedIt) {
  for (const int ranks : {2, 3}) test::ranks(ranks, expect_frozen_units_freed);
}

TEST(ShardingPartialTest, AFrozenModelsForwardHoldsNothingAfterwards) {
  test::ranks(2, [](const ProcessGroup& group) {
    Lora model(LoraImpl::kLayers);
    FullyShardedDataParallel<Lora> sharded(model, group, {}, model->units());
    const translate::TensorMemory memory;
    at::Tensor x = wide_batch(0);
    sharded(x.requires_grad_(false));
    EXPECT_LE(memory.now(), kLayerBytes / 8);
    EXPECT_LE(memory.peak(), 2 * kLayerBytes + kLayerBytes / 4);
  });
}

TEST(GraphSectionTest, FirstNodesAreThoseThatGradientsLeaveBy) {
  const at::Tensor leaf = at::ones({2}).requires_grad_(true);
  const at::Tensor input = leaf * 2;
  const uint64_t position = parallel::recording_position();
  EXPECT_TRUE(parallel::first_nodes({input}, position).empty()) << "recorded before";
  const at::Tensor inner = input.exp();
  const at::Tensor output = inner.sin() + leaf;
  const auto nodes = parallel::first_nodes({output, inner, at::Tensor(), leaf}, position);
  EXPECT_EQ(std::set<const void*>(nodes.begin(), nodes.end()),
            (std::set<const void*>{inner.grad_fn().get(), output.grad_fn().get()}));
}

// A model that gives nobody away by a name: a part with other values and sizes on each rank.
struct WithOwnImpl : torch::nn::Module {
  explicit WithOwnImpl(int rank) {
    shared = register_module("shared", test::sharding::Block(3));
    own = register_module("own", test::sharding::Block(3));
    offset = register_parameter("offset", at::full({1 + rank}, 1.0 + rank, at::kDouble));
    count = own->register_buffer("count", at::full({1}, rank, at::kDouble));
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    double phase = 0;
    for (auto& parameter : shared->parameters())
      parameter.copy_(
          at::arange(parameter.numel(), at::kDouble).add(++phase).sin().view(parameter.sizes()));
    for (auto& parameter : own->parameters()) parameter.fill_(0.1 * (1 + rank));
  }
  at::Tensor forward(const at::Tensor& x) {
    return test::sharding::unit(own, test::sharding::unit(shared, x)) * offset.sum();
  }
  test::sharding::Block shared{nullptr}, own{nullptr};
  at::Tensor offset, count;
};
TORCH_MODULE(WithOwn);

void expect_ignored_parameters_kept(const ProcessGroup& group) {
  const at::Tensor x = at::arange(6, at::kDouble).add(group.rank()).view({2, 3});
  WithOwn plain(group.rank());
  loss_of(plain->forward(x)).backward();
  for (const Shard shard : kShards) {
    WithOwn model(group.rank());
    FullyShardedDataParallel<WithOwn> sharded(model, group,
                                              {.shard = shard, .ignored = {"own", "offset"}},
                                              {model->shared.get(), model->own.get()});
    for (const LocalShard& local_shard : sharded.local_shards())
      EXPECT_TRUE(local_shard.name.starts_with("shared.")) << local_shard.name;
    EXPECT_EQ(model->offset.numel(), 1 + group.rank());
    EXPECT_EQ(model->count.item<double>(), group.rank());
    loss_of(sharded(x)).backward();
    const auto expected = plain->named_parameters();
    for (const auto& item : model->named_parameters()) {
      if (item.key().starts_with("shared.")) continue;
      EXPECT_TRUE(item.value().equal(expected[item.key()])) << item.key();
      EXPECT_TRUE(item.value().grad().allclose(expected[item.key()].grad(), 1e-12, 1e-12))
          << item.key() << ": of this rank alone, not divided";
    }
    // The shared part's is the mean of all ranks'.
    at::Tensor mean = plain->shared->first->weight.grad().clone();
    group.all_reduce(mean, comm::ReduceOp::kAvg);
    for (const LocalShard& local_shard : sharded.local_shards()) {
      if (local_shard.name != "shared.first.weight") continue;
      EXPECT_TRUE(local_shard.tensor.grad().allclose(
          mean.view({-1}).narrow(0, local_shard.begin, local_shard.end - local_shard.begin), 1e-12,
          1e-12));
    }
  }
  WithOwn model(0);
  const auto shard = [&](const std::vector<std::string>& ignored) {
    FullyShardedDataParallel<WithOwn>(model, group, {.ignored = ignored});
  };
  const std::string text = message_of<c10::ValueError>([&] { shard({"offset", "ow"}); });
  EXPECT_NE(text.find("ignored ow: expected a parameter or buffer"), std::string::npos) << text;
}

TEST(ShardingPartialTest, IgnoredParametersStayEachRanksOwn) {
  for (const int ranks : {2, 3}) test::ranks(ranks, expect_ignored_parameters_kept);
}

TEST(ShardingPartialTest, FourRanksOfWhichTwoKeepAUnitTrainAsOneProcess) {
  test::ranks(4, [](const ProcessGroup& group) {
    expect_plain_training(group, {.options = {.reshard_ranks = 2}, .delay = 2, .clip = 0.5});
    expect_plain_training(group, {.options = {.reshard_ranks = 2, .prefetch = false}});
  });
}

struct LinearsImpl : torch::nn::Module {
  LinearsImpl() {
    const at::NoGradGuard no_grad;
    for (int i = 0; i < 8; ++i) {
      torch::nn::Linear linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false));
      linear->weight.copy_(at::eye(kWidth) + 1e-3 * i);
      linears.push_back(register_module(std::to_string(i), linear));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& linear : linears) x = at::tanh(test::sharding::unit(linear, x));
    return x;
  }
  std::vector<torch::nn::Module*> units() {
    std::vector<torch::nn::Module*> all;
    for (auto& linear : linears) all.push_back(linear.get());
    return all;
  }
  std::vector<torch::nn::Linear> linears;
};
TORCH_MODULE(Linears);

// Against ZeRO-3: every bit of the gradients, what lies there between forward and backward, and
// what goes over the network: 8 units are gathered by 4 ranks, 7 of them again by 2.
TEST(ShardingPartialTest, TwoOfFourRanksKeepHalfOfEachUnitAndGatherItBetweenThem) {
  test::ranks(
      4,
      [](const ProcessGroup& group) {
        const at::Tensor x = wide_batch(group.rank());
        std::vector<at::Tensor> expected;
        for (const int ranks : {0, 2}) {
          Linears model;
          FullyShardedDataParallel<Linears> sharded(model, group, {.reshard_ranks = ranks},
                                                    model->units());
          const translate::TensorMemory memory;
          for (int step = 0; step < 2; ++step) {
            for (const LocalShard& local_shard : sharded.local_shards())
              local_shard.tensor.mutable_grad().reset();
            group.barrier("forward");
            at::Tensor loss = loss_of(sharded(x));
            const auto held = static_cast<double>(memory.now()) / kLayerBytes;
            const int64_t sent = bench::tcp_bytes_sent();
            loss.backward();
            const auto bytes = static_cast<double>(bench::tcp_bytes_sent() - sent) / kLayerBytes;
            group.barrier("bytes counted");  // A rank that has ended closes its connections.
            // In the first step nobody knows yet which unit comes last: all eight go, and come again.
            const double again = step == 0 ? 8 : 7;
            EXPECT_NEAR(held, (ranks == 0 ? 0 : again / 2) + 8 - again, 0.2);
            EXPECT_NEAR(bytes, again * (ranks == 0 ? 0.75 : 0.5) + 8 * 0.75, 0.2);
            EXPECT_LE(static_cast<double>(memory.now()) / kLayerBytes, 8.0 / 4 + 0.2)
                << "gradients";
          }
          for (size_t i = 0; i < sharded.local_shards().size(); ++i) {
            const at::Tensor& gradient = sharded.local_shards()[i].tensor.grad();
            if (ranks == 0) {
              expected.push_back(gradient);
            } else {
              EXPECT_TRUE(gradient.equal(expected[i])) << sharded.local_shards()[i].name;
            }
          }
        }
      },
      {.backend = "gloo"});
}

TEST(ShardingPartialTest, ReshardRanksThatDivideNothingAreRefused) {
  ProcessGroup alone(comm::RankInfo{});
  const auto text_of = [&](const ShardingOptions& options) {
    return message_of<c10::ValueError>(
        [&] { FullyShardedDataParallel<Tower>(Tower(), alone, options); });
  };
  EXPECT_EQ(text_of({.reshard_ranks = 2}),
            "reshard_ranks: expected 0 or a divisor above 1 of the number of ranks, 1, got 2");
  EXPECT_EQ(text_of({.reshard_ranks = 1}),
            "reshard_ranks: expected 0 or a divisor above 1 of the number of ranks, 1, got 1: give "
            "reshard_after_forward = false");
}

// Two weights, of which the second is used for a while.
struct RestingImpl : torch::nn::Module {
  RestingImpl() {
    always = register_parameter("always", at::full({5}, 0.5, at::kDouble));
    at_first = register_parameter("at_first", at::full({5}, 0.5, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x, bool uses_both) {
    const at::Tensor y = at::tanh(x * always);
    return uses_both ? y * at_first : y;
  }
  at::Tensor always, at_first;
};
TORCH_MODULE(Resting);

// One parameter of `mib` MiB, of a few bytes if that is 0.
struct TableImpl : torch::nn::Module {
  explicit TableImpl(int64_t mib) {
    weight = register_parameter("weight", at::empty({(mib << 18) + 4}));
  }
  at::Tensor weight;
};
TORCH_MODULE(Table);

// What is in no unit lies around two units.
struct FrameImpl : torch::nn::Module {
  FrameImpl() {
    for (auto& [name, mib] : {std::pair{"source", 1}, {"target", 1}})
      register_module(name, Table(mib));
    units.push_back(register_module("encoder", Table(2)).get());
    register_module("middle", Table(0));
    units.push_back(register_module("decoder", Table(2)).get());
    for (auto& [name, mib] : {std::pair{"norm", 0}, {"large", 26}, {"last", 1}})
      register_module(name, Table(mib));
  }
  std::vector<torch::nn::Module*> units;
};
TORCH_MODULE(Frame);

using Names = std::vector<std::vector<std::string>>;

Names buckets_of(const parallel::UnitParameters& unit) {
  Names names;
  for (const auto& bucket : unit.buckets) {
    names.emplace_back();
    for (const auto& each : bucket) names.back().push_back(each.name);
  }
  return names;
}

TEST(UnitParametersTest, ABucketEndsWhereGradientsOfAnotherUnitComeBetween) {
  Frame frame;
  const auto registered = parallel::divide_into_units(*frame, frame->units, {});
  EXPECT_EQ(
      buckets_of(registered[0]),
      (Names{{"source.weight", "target.weight", "middle.weight", "norm.weight", "last.weight"},
             {"large.weight"}}))
      << "what fills a bucket closes no other";
  EXPECT_EQ(buckets_of(registered[1]), Names{{"encoder.weight"}});
  const std::vector<std::string> order{"source.weight", "encoder.weight", "middle.weight",
                                       "target.weight", "decoder.weight", "norm.weight",
                                       "large.weight",  "last.weight"};
  const auto ordered = parallel::divide_into_units(*frame, frame->units, {}, order);
  EXPECT_EQ(buckets_of(ordered[0]), (Names{{"norm.weight", "last.weight"},
                                           {"large.weight"},
                                           {"middle.weight", "target.weight"},
                                           {"source.weight"}}));
}

TEST(UnitParametersTest, AForwardOrderHasEveryParameterThatIsNotIgnoredOnce) {
  Frame frame;
  const auto text_of = [&](const std::vector<std::string>& order) {
    return message_of<c10::ValueError>([&] {
      parallel::divide_into_units(*frame, frame->units,
                                  {"source.weight", "target.weight", "middle.weight", "norm.weight",
                                   "large.weight", "last.weight"},
                                  order);
    });
  };
  EXPECT_EQ(text_of({"decoder.weight", "encoder.weight"}), "nothing was thrown");
  EXPECT_EQ(text_of({"decoder.weight"}),
            "forward_order: expected each parameter of the model once, it lacks encoder.weight");
  const std::string other = "forward_order: expected each parameter of the model once, got ";
  EXPECT_EQ(
      text_of({"decoder.weight", "encoder.weight", "decoder.weight"}),
      other +
          "decoder.weight twice, not of the model, ignored, or the second name of a shared one");
  EXPECT_EQ(
      text_of({"last.weight"}),
      other + "last.weight twice, not of the model, ignored, or the second name of a shared one");
}

TEST(UnitParametersTest, AForwardOrderNeedNotNameFrozenParameters) {
  Frame frame;
  frame->named_parameters()["source.weight"].set_requires_grad(false);
  const std::vector<std::string> order{"encoder.weight", "middle.weight", "target.weight",
                                       "decoder.weight", "norm.weight",   "large.weight",
                                       "last.weight"};
  const auto ordered = parallel::divide_into_units(*frame, frame->units, {}, order);
  EXPECT_EQ(buckets_of(ordered[0]), (Names{{"source.weight"},
                                           {"norm.weight", "last.weight"},
                                           {"large.weight"},
                                           {"middle.weight", "target.weight"}}));
}

// Zeros in place of no gradient would let its moments move it. Rank 0 uses it longest.
TEST(ShardingPartialTest, AParameterThatNoRankUsesStaysWhereItIs) {
  for (const int size : {1, 2, 3}) {
    test::ranks(size, [](const ProcessGroup& group) {
      const int world = group.size();
      const auto uses = [](int rank, int step, int batch) {
        return step < 2 || (step == 2 && rank == 0 && batch == 0);
      };
      const auto x = [](int rank, int step, int batch) {
        return at::linspace(-1, 1 + rank + 3 * step + 0.1 * batch, 5, at::kDouble);
      };
      for (const Shard shard : kShards) {
        for (const bool no_sync : {false, true}) {
          Resting plain, model;
          optim::Adam plain_adam({{"always", plain->always}, {"at_first", plain->at_first}});
          FullyShardedDataParallel<Resting> sharded(model, group, {.shard = shard});
          optim::Adam adam(sharded.named_parameters());
          for (int step = 0; step < 5; ++step) {
            for (int batch = 0; batch < 2; ++batch) {
              at::Tensor loss = at::zeros({}, at::kDouble);
              for (int rank = 0; rank < world; ++rank)
                loss = loss + plain(x(rank, step, batch), uses(rank, step, batch)).sum() / world;
              loss.backward();
              std::optional<parallel::NoSync> local;
              if (no_sync && batch == 0) local.emplace(sharded);
              const int rank = group.rank();
              sharded(x(rank, step, batch), uses(rank, step, batch)).sum().backward();
            }
            for (const LocalShard& local_shard : sharded.local_shards())
              EXPECT_EQ(local_shard.tensor.grad().defined(),
                        plain->named_parameters()[local_shard.name].grad().defined())
                  << local_shard.name << ", step " << step << ", shard " << static_cast<int>(shard);
            for (optim::Adam* each : {&plain_adam, &adam}) {
              each->step(1e-2);
              each->zero_grad();
            }
          }
          for (const LocalShard& local_shard : sharded.local_shards()) {
            const at::Tensor expected = plain->named_parameters()[local_shard.name].detach();
            EXPECT_TRUE(at::allclose(local_shard.tensor.detach(),
                                     expected.slice(0, local_shard.begin, local_shard.end), 1e-13,
                                     1e-15))
                << local_shard.name << ", shard " << static_cast<int>(shard) << ", no_sync "
                << no_sync;
          }
        }
      }
    });
  }
}

}  // namespace sharding_partial_test
}  // namespace cohort
