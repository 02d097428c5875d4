// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <gtest/gtest.h>
#include <random>
#include <thread>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/parallel/comm_hooks/all_reduce.h"
#include "cohort/parallel/comm_hooks/compress.h"
#include "cohort/parallel/comm_hooks/local_sgd.h"
#include "cohort/parallel/comm_hooks/power_sgd.h"
#include "cohort/parallel/distributed_data_parallel.h"

#include "tests/support/hosts.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace cohort::parallel {
namespace comm_hooks_test {

using comm::ProcessGroup;
using Tensors = std::vector<at::Tensor>;

// float64 arithmetic on matrices of some 10 rows in another order: 1e-12 is 100 times its rounding.
constexpr double kBound64 = 1e-12;

double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

// Gradients of one rank at one step; any rank can make any other's.
Tensors make_gradients(const std::vector<std::vector<int64_t>>& shapes, int rank, int step,
                       at::ScalarType type = at::kDouble) {
  torch::manual_seed(static_cast<uint64_t>(1000 * step + rank));
  Tensors gradients;
  for (const auto& shape : shapes) gradients.push_back(at::randn(shape, at::kDouble).to(type));
  return gradients;
}

Tensors mean_gradients(const std::vector<std::vector<int64_t>>& shapes, int world_size, int step,
                       at::ScalarType type = at::kDouble) {
  Tensors mean;
  for (int rank = 0; rank < world_size; ++rank) {
    const Tensors own = make_gradients(shapes, rank, step, type);
    for (size_t i = 0; i < own.size(); ++i) {
      if (rank == 0) mean.push_back(at::zeros_like(own[i], at::kDouble));
      mean[i] += own[i].to(at::kDouble) / world_size;
    }
  }
  return mean;
}

// What the engine does: buckets of `per_bucket` gradients each, hooks in order, then all are waited
// for.
Tensors reduce(
    const ProcessGroup& group, const CommHook& hook, const Tensors& gradients,
    size_t per_bucket = 100, const std::function<void()>& before_bucket = [] {}) {
  std::vector<Bucket> buckets;
  for (size_t begin = 0; begin < gradients.size(); begin += per_bucket) {
    const size_t end = std::min(begin + per_bucket, gradients.size());
    Tensors flat;
    for (size_t i = begin; i < end; ++i) flat.push_back(gradients[i].reshape({-1}));
    Bucket bucket{.index = static_cast<int64_t>(buckets.size()),
                  .is_last = end == gradients.size(),
                  .buffer = at::cat(flat)};
    int64_t offset = 0;
    for (size_t i = begin; i < end; ++i) {
      bucket.gradients.push_back(
          bucket.buffer.narrow(0, offset, gradients[i].numel()).view(gradients[i].sizes()));
      offset += gradients[i].numel();
    }
    buckets.push_back(std::move(bucket));
  }
  std::vector<TensorFuture> futures;
  for (const Bucket& bucket : buckets) {
    before_bucket();
    futures.push_back(hook(group, bucket));
  }
  Tensors results;
  for (size_t b = 0; b < buckets.size(); ++b) {
    const at::Tensor flat = wait_tensor(futures[b]);
    EXPECT_EQ(flat.dtype(), buckets[b].buffer.dtype());
    int64_t offset = 0;
    for (const at::Tensor& gradient : buckets[b].gradients) {
      results.push_back(flat.narrow(0, offset, gradient.numel()).view(gradient.sizes()).clone());
      offset += gradient.numel();
    }
  }
  return results;
}

void expect_close(const Tensors& actual, const Tensors& expected, double bound) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i)
    EXPECT_LE(difference(actual[i], expected[i]), bound) << "gradient " << i;
}

const std::vector<std::vector<int64_t>> kShapes{{6, 4}, {5}, {3, 2, 2}, {1, 8}, {7, 5}};

TEST(AllReduceHookTest, ResultIsTheMean) {
  test::ranks(2, [](const ProcessGroup& group) {
    const Tensors result =
        reduce(group, all_reduce_hook(), make_gradients(kShapes, group.rank(), 0), 2);
    const Tensors first = make_gradients(kShapes, 0, 0);
    const Tensors second = make_gradients(kShapes, 1, 0);
    for (size_t i = 0; i < result.size(); ++i)
      EXPECT_TRUE(at::equal(result[i], first[i] * 0.5 + second[i] * 0.5));
  });
}

TEST(NoopHookTest, EveryRankKeepsItsOwn) {
  test::ranks(2, [](const ProcessGroup& group) {
    const Tensors own = make_gradients(kShapes, group.rank(), 0);
    expect_close(reduce(group, noop_hook(), own), own, 0);
  });
}

// The bound of compress.h, u the unit roundoff.
void expect_within_compression(const ProcessGroup& group, const CommHook& hook, double u,
                               double tiny) {
  const int world_size = group.size();
  const Tensors result =
      reduce(group, hook, make_gradients(kShapes, group.rank(), 0, at::kFloat), 2);
  const Tensors mean = mean_gradients(kShapes, world_size, 0, at::kFloat);
  double largest = 0;
  for (size_t i = 0; i < result.size(); ++i) {
    at::Tensor sizes = at::zeros_like(mean[i]);
    for (int rank = 0; rank < world_size; ++rank) {
      sizes += make_gradients(kShapes, rank, 0, at::kFloat)[i].to(at::kDouble).abs() / world_size;
    }
    const at::Tensor error = (result[i].to(at::kDouble) - mean[i]).abs();
    // 1e-7: the multiplication by 1 / W in float32.
    const at::Tensor bound = sizes * (std::pow(1 + u, world_size) - 1 + 1e-7) + world_size * tiny;
    EXPECT_TRUE((error <= bound).all().item<bool>()) << "gradient " << i;
    largest = std::max(largest, error.max().item<double>());
  }
  EXPECT_GT(largest, u / 100) << "something must have been rounded";
}

constexpr double kUnitHalf = 1.0 / 2048;
constexpr double kTinyHalf = 1.0 / (1 << 25);
constexpr double kUnitBFloat = 1.0 / 256;

TEST(CompressHookTest, ErrorsStayWithinTheBoundOfTheType) {
  test::ranks(3, [](const ProcessGroup& group) {
    expect_within_compression(group, fp16_compress_hook(), kUnitHalf, kTinyHalf);
    expect_within_compression(group, bf16_compress_hook(), kUnitBFloat, 0);
    expect_within_compression(group, fp16_compress_wrapper(all_reduce_hook()), kUnitHalf,
                              2 * kTinyHalf);
  });
}

TEST(CompressHookTest, TheWrappedHookSeesLowGradients) {
  test::ranks(2, [](const ProcessGroup& group) {
    int calls = 0;
    const CommHook inner = [&calls](const ProcessGroup& g, Bucket bucket) {
      ++calls;
      EXPECT_EQ(bucket.buffer.scalar_type(), at::kBFloat16);
      EXPECT_EQ(bucket.gradients.size(), kShapes.size());
      int64_t offset = 0;
      for (size_t i = 0; i < bucket.gradients.size(); ++i) {
        const at::Tensor& gradient = bucket.gradients[i];
        EXPECT_EQ(gradient.sizes(), at::IntArrayRef(kShapes[i]));
        EXPECT_TRUE(gradient.is_alias_of(bucket.buffer));
        EXPECT_TRUE(
            at::equal(gradient.reshape({-1}), bucket.buffer.narrow(0, offset, gradient.numel())));
        offset += gradient.numel();
      }
      return all_reduce_hook()(g, bucket);
    };
    reduce(group, bf16_compress_wrapper(inner),
           make_gradients(kShapes, group.rank(), 0, at::kFloat));
    EXPECT_EQ(calls, 1);
  });
}

std::shared_ptr<PowerSgdState> make_state(PowerSgdOptions options) {
  return std::make_shared<PowerSgdState>(options);
}

// Compresses every matrix, whatever it saves.
constexpr double kAnyRate = 1e-6;

TEST(PowerSgdTest, FullRankIsTheMean) {
  test::ranks(2, [](const ProcessGroup& group) {
    const auto state = make_state({.matrix_approximation_rank = 100,
                                   .start_power_sgd_iter = 2,
                                   .min_compression_rate = kAnyRate});
    for (int step = 0; step < 5; ++step) {
      const Tensors result =
          reduce(group, power_sgd_hook(state), make_gradients(kShapes, group.rank(), step), 2);
      expect_close(result, mean_gradients(kShapes, group.size(), step), kBound64);
    }
    EXPECT_EQ(state->iteration(), 5);
    EXPECT_GT(state->num_elements_after(), 0) << "compression must have started";
  });
}

TEST(PowerSgdTest, BucketsMatchBetweenRanksWhateverTheTiming) {
  test::ranks(3, [](const ProcessGroup& group) {
    std::vector<std::vector<int64_t>> shapes;
    for (int64_t i = 0; i < 30; ++i) shapes.push_back({2 + i % 7, 1 + i % 5});
    std::mt19937 random(static_cast<uint32_t>(group.rank()));
    const auto delay = [&] {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    };
    const auto state = make_state({.matrix_approximation_rank = 100,
                                   .start_power_sgd_iter = 2,
                                   .min_compression_rate = kAnyRate});
    for (int step = 0; step < 8; ++step) {
      const Tensors result = reduce(group, power_sgd_hook(state),
                                    make_gradients(shapes, group.rank(), step), 1, delay);
      expect_close(result, mean_gradients(shapes, group.size(), step), kBound64);
    }
  });
}

TEST(PowerSgdTest, ResultHasTheRankAskedForAndIsTheSameEverywhere) {
  test::ranks(3, [](const ProcessGroup& group) {
    const auto state = make_state({.matrix_approximation_rank = 2,
                                   .start_power_sgd_iter = 2,
                                   .min_compression_rate = kAnyRate});
    for (int step = 0; step < 4; ++step) {
      const Tensors result =
          reduce(group, power_sgd_hook(state), make_gradients(kShapes, group.rank(), step));
      for (const at::Tensor& gradient : result) {
        at::Tensor of_rank_0 = gradient.clone();
        group.broadcast(of_rank_0);
        EXPECT_TRUE(at::equal(gradient, of_rank_0));
      }
      const int64_t rank = at::linalg_matrix_rank(result[0]).item<int64_t>();
      EXPECT_EQ(rank, step < 2 ? 4 : 2) << "step " << step;
    }
  });
}

// sum of results + mean error left = sum of means, exactly; so the running mean converges like 1 /
// T.
TEST(PowerSgdTest, ErrorFeedbackLosesNothing) {
  test::ranks(3, [](const ProcessGroup& group) {
    const auto state = make_state({.start_power_sgd_iter = 2, .min_compression_rate = kAnyRate});
    const std::vector<std::vector<int64_t>> shapes{{8, 6}};
    at::Tensor left = at::zeros({8, 6}, at::kDouble);
    const int steps = 60;
    for (int step = 0; step < steps; ++step) {
      const at::Tensor result =
          reduce(group, power_sgd_hook(state), make_gradients(shapes, group.rank(), 1))[0];
      left += mean_gradients(shapes, group.size(), 1)[0] - result;
    }
    at::Tensor error = state->state_dict().at("error.0").clone();
    group.all_reduce(error);
    EXPECT_LE(difference(error.view({8, 6}) / group.size(), left), steps * kBound64);
    // The error stays of the size of a few gradients: so much of the mean of 60 steps is missing.
    const double size = mean_gradients(shapes, group.size(), 1)[0].norm().item<double>();
    EXPECT_LE(left.norm().item<double>() / steps, 0.2 * size);
  });
}

TEST(PowerSgdTest, WithoutErrorFeedbackOrWarmStartItStartsAtOnceAndForgets) {
  test::ranks(2, [](const ProcessGroup& group) {
    const auto state = make_state({.start_power_sgd_iter = 0,
                                   .min_compression_rate = kAnyRate,
                                   .use_error_feedback = false,
                                   .warm_start = false});
    const Tensors first =
        reduce(group, power_sgd_hook(state), make_gradients(kShapes, group.rank(), 0));
    EXPECT_EQ(at::linalg_matrix_rank(first[0]).item<int64_t>(), 1);
    EXPECT_EQ(state->state_dict().count("error.0"), 0U);
  });
}

TEST(PowerSgdTest, SmallGradientsTravelWhole) {
  test::ranks(2, [](const ProcessGroup& group) {
    // (6 + 4) * 1 * 2 < 24, but (7 + 5) * 1 * 3 > 35.
    const auto state = make_state({.start_power_sgd_iter = 2, .min_compression_rate = 2.3});
    const std::vector<std::vector<int64_t>> shapes{{6, 4}, {9}, {3, 3}};
    Tensors result;
    for (int step = 0; step < 3; ++step)
      result = reduce(group, power_sgd_hook(state), make_gradients(shapes, group.rank(), step));
    const Tensors mean = mean_gradients(shapes, group.size(), 2);
    EXPECT_GT(difference(result[0], mean[0]), 1e-3);
    EXPECT_LE(difference(result[1], mean[1]), kBound64);
    EXPECT_LE(difference(result[2], mean[2]), kBound64);
    EXPECT_EQ(state->num_elements_before(), 24 + 9 + 9);
    EXPECT_EQ(state->num_elements_after(), 10 + 9 + 9);
  });
}

TEST(PowerSgdTest, ARestoredRunIsBitEqual) {
  test::ranks(2, [](const ProcessGroup& group) {
    const PowerSgdOptions options{.start_power_sgd_iter = 2, .min_compression_rate = kAnyRate};
    const auto state = make_state(options);
    const auto step = [&](const std::shared_ptr<PowerSgdState>& s, int i) {
      return reduce(group, power_sgd_hook(s), make_gradients(kShapes, group.rank(), i), 2);
    };
    for (int i = 0; i < 5; ++i) step(state, i);
    const auto restored = make_state(options);
    restored->load_state_dict(state->state_dict());
    for (int i = 5; i < 8; ++i) expect_close(step(restored, i), step(state, i), 0);
    auto broken = state->state_dict();
    broken.erase("error.1");
    try {
      restored->load_state_dict(broken);
      ADD_FAILURE() << "expected c10::ValueError";
    } catch (const c10::ValueError& error) {
      EXPECT_NE(std::string(error.what()).find("expected an entry \"error.1\""), std::string::npos)
          << error.what();
    }
  });
}

TEST(PowerSgdTest, AStepThatIsNotFiniteShowsOnAllRanksAndIsForgotten) {
  test::ranks(2, [](const ProcessGroup& group) {
    const auto state = make_state({.start_power_sgd_iter = 2, .min_compression_rate = kAnyRate});
    const auto step = [&](int i, bool infinite) {
      Tensors gradients = make_gradients(kShapes, group.rank(), i);
      if (infinite && group.rank() == 1)
        gradients[0][2][1] = std::numeric_limits<double>::infinity();
      return reduce(group, power_sgd_hook(state), gradients);
    };
    for (int i = 0; i < 4; ++i) step(i, false);
    const auto before = state->state_dict();
    EXPECT_FALSE(step(4, true)[0].isfinite().any().item<bool>());
    const auto after = state->state_dict();
    for (const std::string name : {"error.0", "factor.0"})
      EXPECT_TRUE(at::equal(before.at(name), after.at(name))) << name;
    EXPECT_TRUE(step(5, false)[0].isfinite().all().item<bool>());
  });
}

TEST(PowerSgdTest, AnOverflowOfTheSecondMessageAloneIsForgotten) {
  test::ranks(2, [](const ProcessGroup& group) {
    const auto state = make_state({.start_power_sgd_iter = 2, .min_compression_rate = kAnyRate});
    const CommHook hook = fp16_compress_wrapper(power_sgd_hook(state));
    const auto step = [&](int i, bool large) {
      const at::Tensor gradient = make_gradients({{8, 2}}, group.rank(), i, at::kFloat)[0];
      // Rows of 4e4 x (1, 0.1): the first message is at most 4e4, but the second one is longer by
      // the root of 8 and past float16's 65504 once it is summed.
      const at::Tensor rows = at::tensor({4e4F, 4e3F}).expand({8, 2}).contiguous();
      return reduce(group, hook, {large ? rows : gradient})[0];
    };
    for (int i = 0; i < 4; ++i) step(i, false);
    const auto before = state->state_dict();
    EXPECT_FALSE(step(4, true).isfinite().all().item<bool>());
    const auto after = state->state_dict();
    for (const std::string name : {"error.0", "factor.0"})
      EXPECT_TRUE(at::equal(before.at(name), after.at(name))) << name;
    EXPECT_TRUE(step(5, false).isfinite().all().item<bool>());
  });
}

TEST(PowerSgdTest, AZeroGradientDoesNotStopLaterOnes) {
  test::ranks(2, [](const ProcessGroup& group) {
    const auto state = make_state(
        {.start_power_sgd_iter = 2, .min_compression_rate = kAnyRate, .use_error_feedback = false});
    const std::vector<std::vector<int64_t>> shapes{{6, 4}};
    for (int i = 0; i < 5; ++i) {
      const Tensors gradients = make_gradients(shapes, group.rank(), i);
      const at::Tensor result = reduce(group, power_sgd_hook(state),
                                       {i == 3 ? at::zeros_like(gradients[0]) : gradients[0]})[0];
      EXPECT_EQ(result.norm().item<double>() > 0.1, i != 3) << "step " << i;
    }
  });
}

TEST(PowerSgdTest, SixteenBitGradientsWork) {
  test::ranks(2, [](const ProcessGroup& group) {
    const auto state = make_state({.matrix_approximation_rank = 100,
                                   .start_power_sgd_iter = 2,
                                   .min_compression_rate = kAnyRate});
    const CommHook hook = fp16_compress_wrapper(power_sgd_hook(state));
    for (int step = 0; step < 4; ++step) {
      const Tensors result =
          reduce(group, hook, make_gradients(kShapes, group.rank(), step, at::kFloat));
      // Some ten roundings to float16 of values and factors up to 10.
      expect_close(result, mean_gradients(kShapes, group.size(), step), 10 * 10 * kUnitHalf);
    }
  });
}

// Least squares of y = x W by gradient descent; returns the loss over all ranks' data.
double train(const ProcessGroup& group, const CommHook& hook, int steps) {
  torch::manual_seed(3);
  const at::Tensor truth = at::randn({12, 8}, at::kDouble);
  at::Tensor weight = at::zeros({12, 8}, at::kDouble).requires_grad_();
  const at::Tensor x = at::randn({40 * group.size(), 12}, at::kDouble);
  const at::Tensor y = x.matmul(truth);
  const auto loss = [&](const at::Tensor& part_x, const at::Tensor& part_y) {
    return (part_x.matmul(weight) - part_y).square().sum(1).mean();
  };
  for (int step = 0; step < steps; ++step) {
    weight.mutable_grad() = at::Tensor();
    loss(x.narrow(0, 40 * group.rank(), 40), y.narrow(0, 40 * group.rank(), 40)).backward();
    const at::Tensor gradient = reduce(group, hook, {weight.grad()})[0];
    const torch::NoGradGuard no_grad;
    weight.sub_(gradient, 0.05);
  }
  return loss(x, y).item<double>();
}

// Rank 1 of 8 with error feedback: as small a loss as with whole gradients, of some 90 at the
// start; without feedback the test's steps do not suffice.
TEST(PowerSgdTest, TrainingReachesTheLossOfWholeGradients) {
  test::ranks(2, [](const ProcessGroup& group) {
    const double whole = train(group, all_reduce_hook(), 300);
    const double compressed =
        train(group, power_sgd_hook(make_state({.start_power_sgd_iter = 2})), 300);
    EXPECT_LE(whole, 1e-6);
    EXPECT_LE(compressed, 1e-6);
  });
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(8);
    for (int i = 0; i < 6; ++i) layers->push_back(torch::nn::Linear(24, 24));
    register_module("layers", layers);
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers) x = at::tanh(layer->as<torch::nn::Linear>()->forward(x));
    return x;
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Net);

TEST(PowerSgdTest, RunsUnderDistributedDataParallelWithSeveralBuckets) {
  test::ranks(3, [](const ProcessGroup& group) {
    Net net;
    Net whole;
    DistributedDataParallel<Net> ddp(net, group, {.bucket_cap_mb = 0.01});
    const auto state = make_state({.matrix_approximation_rank = 100,
                                   .start_power_sgd_iter = 2,
                                   .min_compression_rate = kAnyRate});
    ddp.register_comm_hook(power_sgd_hook(state), "power_sgd");
    for (int step = 0; step < 5; ++step) {
      torch::manual_seed(static_cast<uint64_t>(step));
      const at::Tensor x = at::randn({6, 24}, at::kDouble);
      net->zero_grad();
      whole->zero_grad();
      ddp(x.narrow(0, 2 * group.rank(), 2)).square().sum().backward();
      (whole->forward(x).square().sum() / group.size()).backward();
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        EXPECT_LE(difference(net->parameters()[i].grad(), whole->parameters()[i].grad()), kBound64)
            << step;
      }
    }
    EXPECT_GT(ddp.num_buckets(), 1);
    EXPECT_EQ(state->iteration(), 5);
    EXPECT_GT(state->num_elements_after(), 0);
  });
}

TEST(PowerSgdTest, BadInputIsExplained) {
  EXPECT_NE(test::message_of<c10::ValueError>([] {
              PowerSgdState({.start_power_sgd_iter = 1});
            }).find("start_power_sgd_iter: expected 2 or more, got 1"),
            std::string::npos);
  EXPECT_NE(test::message_of<c10::ValueError>([] {
              PowerSgdState({.matrix_approximation_rank = 0});
            }).find("matrix_approximation_rank: expected 1 or more, got 0"),
            std::string::npos);
  ProcessGroup group(comm::RankInfo{});
  const CommHook hook =
      power_sgd_hook(make_state({.start_power_sgd_iter = 2, .min_compression_rate = kAnyRate}));
  for (int step = 0; step < 3; ++step) reduce(group, hook, {at::ones({4, 4})});
  EXPECT_NE(test::message_of<c10::ValueError>([&] {
              reduce(group, hook, {at::ones({4, 5})});
            }).find("expected bucket 0 to keep its 16 elements, got 20"),
            std::string::npos);
}

// Each rank also plays all others on its own, without communication.
TEST(PostLocalSgdTest, EqualsAveragingByHand) {
  test::ranks(3, [](const ProcessGroup& group) {
    constexpr int kWarmup = 2;
    constexpr int kPeriod = 3;
    const std::vector<std::vector<int64_t>> shapes{{3, 2}, {4}};
    const CommHook hook = post_local_sgd_hook(
        std::make_shared<PostLocalSgdState>(PostLocalSgdOptions{.start_local_sgd_iter = kWarmup}));
    PeriodicModelAverager averager(group, {.period = kPeriod, .warmup_steps = kWarmup});
    Tensors parameters{at::zeros({3, 2}, at::kDouble), at::zeros({4}, at::kDouble)};
    std::vector<Tensors> all(3);
    for (Tensors& each : all) each = {parameters[0].clone(), parameters[1].clone()};
    for (int step = 0; step < 10; ++step) {
      const Tensors gradients = reduce(group, hook, make_gradients(shapes, group.rank(), step), 1);
      for (size_t i = 0; i < 2; ++i) parameters[i] -= gradients[i];
      const bool averaged = averager.average_parameters(parameters);
      EXPECT_EQ(averaged, step >= kWarmup && (step - kWarmup) % kPeriod == 0);
      const Tensors mean = mean_gradients(shapes, 3, step);
      for (int rank = 0; rank < 3; ++rank) {
        const Tensors own = make_gradients(shapes, rank, step);
        for (size_t i = 0; i < 2; ++i)
          all[static_cast<size_t>(rank)][i] -= step < kWarmup ? mean[i] : own[i];
      }
      for (size_t i = 0; averaged && i < 2; ++i) {
        const at::Tensor average = (all[0][i] + all[1][i] + all[2][i]) / 3;
        for (Tensors& each : all) each[i] = average.clone();
      }
      expect_close(parameters, all[static_cast<size_t>(group.rank())], kBound64);
    }
    EXPECT_EQ(averager.step(), 10);
  });
}

TEST(PostLocalSgdTest, ASubgroupGoesOnTogether) {
  test::ranks(3, [](const ProcessGroup& group) {
    const auto pair = group.subgroup({0, 1}, "pair");
    const auto state = std::make_shared<PostLocalSgdState>(
        PostLocalSgdOptions{.start_local_sgd_iter = 1, .subgroup = pair});
    const Tensors own = make_gradients(kShapes, group.rank(), 0);
    expect_close(reduce(group, post_local_sgd_hook(state), own, 2), mean_gradients(kShapes, 3, 0),
                 kBound64);
    EXPECT_EQ(state->iteration(), 1) << "counts passes, not buckets";
    const Tensors expected = pair ? mean_gradients(kShapes, 2, 0) : own;
    expect_close(reduce(group, post_local_sgd_hook(state), own, 2), expected, kBound64);
    if (pair) pair.close();
  });
}

TEST(PostLocalSgdTest, BadOptionsAreExplained) {
  ProcessGroup group(comm::RankInfo{});
  EXPECT_NE(test::message_of<c10::ValueError>([&] {
              PeriodicModelAverager(group, {.period = 0});
            }).find("period: expected 1 or more, got 0"),
            std::string::npos);
  EXPECT_NE(test::message_of<c10::ValueError>([&] {
              PeriodicModelAverager(group, {.warmup_steps = -1});
            }).find("warmup_steps: expected 0 or more, got -1"),
            std::string::npos);
  EXPECT_NE(test::message_of<c10::ValueError>([&] {
              PostLocalSgdState({.start_local_sgd_iter = -1});
            }).find("start_local_sgd_iter: expected 0 or more, got -1"),
            std::string::npos);
}

// Two of the three are on one host, where their sum would be infinite.
TEST(AllReduceHookTest, HalfTypesAreDividedBeforeTheirSumLeavesTheRange) {
  test::ranks(3, [](const ProcessGroup& world) {
    test::on_hosts(
        world, {"a", "a", "b"},
        [](const ProcessGroup& group) {
          const at::Tensor gradient = at::full({40}, 40000, at::kHalf);
          const at::Tensor mean = parallel::wait_tensor(
              parallel::all_reduce_hook()(group, {.buffer = gradient, .gradients = {gradient}}));
          // Three roundings of a third, of 2^-11 each.
          EXPECT_LE((mean.to(at::kFloat) - 40000).abs().max().item<float>(), 40000 * 1.5e-3);
        },
        {.backend = "hierarchical"});
  });
}

}  // namespace comm_hooks_test
}  // namespace cohort::parallel
