// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <gtest/gtest.h>
#include <optional>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include "cohort/optim/adam.h"
#include "cohort/parallel/distributed_data_parallel.h"

#include "tests/support/message_of.h"
#include "tests/support/ranks.h"
#include "tests/support/sentences.h"

namespace cohort {
namespace ddp_test {

using comm::ProcessGroup;
using nmt::Transformer;
using optim::named_parameters;
using parallel::DistributedDataParallel;

constexpr int kSteps = 10;
constexpr double kLearningRate = 1e-3;

// float64: a gradient is a sum of some 100 token terms, for each batch that is accumulated, in
// another order: 100 eps = 2.2e-14 of the largest element. Adam divides a gradient by its own size,
// so a parameter moves by the rate times the relative error of single gradient elements, which may
// be 1e-16 / 1e-7 for small ones: 10 steps x 1e-3 x 1e-9 = 1e-11. From the second step on gradients
// are those of parameters that differ by that.
constexpr double kGradientBound64 = 2.2e-14;
constexpr double kParameterBound64 = 1e-11;
// float32: gradients as above, 100 eps = 1.2e-5. Parameters after Adam are compared by their share
// of elements that moved apart: an element whose gradient is only rounding noise may take another
// sign and be moved by the whole rate, but those are few. The others differ by the rate times the
// relative error of their gradient: 10 steps x 1e-3 x 1e-2 for gradients down to 1e-3 of the
// largest.
constexpr double kGradientBound32 = 1.2e-5;
constexpr double kParameterBound32 = 1e-4;
constexpr double kNoisyShare32 = 0.01;

Transformer make_model(at::ScalarType type) {
  Transformer model(test::tiny_options());
  model->initialise(7);
  model->to(type);
  return model;
}

// Sentence i belongs to rank i % 5 % W: uneven numbers, uneven lengths, uneven padding.
std::vector<test::Sentence> share(const std::vector<test::Sentence>& all, int rank,
                                  int world_size) {
  std::vector<test::Sentence> mine;
  for (size_t i = 0; i < all.size(); ++i) {
    if (static_cast<int>(i % 5) % world_size == rank) mine.push_back(all[i]);
  }
  return mine;
}

double relative_difference(const at::Tensor& a, const at::Tensor& b) {
  const double scale = b.abs().max().item<double>();
  return (a - b).abs().max().item<double>() / std::max(scale, 1e-30);
}

// Trains `model` by DDP and, beside it, a copy on the union of the batches; compares after the
// first backward and at the end.
void expect_ranks_equal_one_process(const ProcessGroup& group, at::ScalarType type,
                                    double gradient_bound, double parameter_bound, int accumulation,
                                    bool bucket_views = true) {
  Transformer model = make_model(type);
  Transformer reference = make_model(type);
  if (group.rank() != 0) model->initialise(99);  // the constructor of DDP must repair that
  DistributedDataParallel<Transformer> ddp(
      model, group, {.bucket_cap_mb = 0.01, .gradient_as_bucket_view = bucket_views});
  optim::Adam adam(named_parameters(*model));
  optim::Adam reference_adam(named_parameters(*reference));
  for (int step = 0; step < kSteps; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    const auto all = test::make_sentences(11 * accumulation, static_cast<uint32_t>(step));
    const nmt::Batch whole = test::make_test_batch(all);
    const auto tokens = static_cast<double>(whole.num_target_tokens);
    std::get<0>(reference->forward(whole))
        .backward(at::scalar_tensor(1 / tokens, at::TensorOptions().dtype(type)));
    const at::Tensor weight =
        at::scalar_tensor(group.size() / tokens, at::TensorOptions().dtype(type));
    for (int part = 0; part < accumulation; ++part) {
      const std::vector<test::Sentence> some(all.begin() + 11 * part,
                                             all.begin() + 11 * (part + 1));
      const nmt::Batch batch = test::make_test_batch(share(some, group.rank(), group.size()));
      const auto run = [&] { std::get<0>(ddp(batch)).backward(weight); };
      if (part + 1 < accumulation) {
        const auto guard = ddp.no_sync();
        run();
      } else {
        run();
      }
    }
    const auto parameters = named_parameters(*model);
    const auto expected = named_parameters(*reference);
    for (size_t i = 0; (step == 0 || type == at::kDouble) && i < parameters.size(); ++i) {
      EXPECT_LE(relative_difference(parameters[i].second.grad(), expected[i].second.grad()),
                step == 0 ? gradient_bound * accumulation : parameter_bound)
          << parameters[i].first;
    }
    adam.step(kLearningRate);
    adam.zero_grad();
    reference_adam.step(kLearningRate);
    reference_adam.zero_grad();
  }
  const auto parameters = named_parameters(*model);
  const auto expected = named_parameters(*reference);
  for (size_t i = 0; i < parameters.size(); ++i) {
    // NaN is apart from everything.
    const at::Tensor apart =
        ((parameters[i].second - expected[i].second).abs() <= parameter_bound).logical_not();
    EXPECT_LE(apart.to(at::kDouble).mean().item<double>(), type == at::kFloat ? kNoisyShare32 : 0)
        << parameters[i].first;
  }
  EXPECT_GT(ddp.num_buckets(), 1) << "the bound of 0.01 MiB should cut several buckets";
}

TEST(DdpTest, TwoRanksEqualOneProcessInFloat64) {
  test::ranks(2, [](const ProcessGroup& group) {
    expect_ranks_equal_one_process(group, at::kDouble, kGradientBound64, kParameterBound64, 1);
  });
}

TEST(DdpTest, ThreeRanksEqualOneProcessInFloat64) {
  test::ranks(3, [](const ProcessGroup& group) {
    expect_ranks_equal_one_process(group, at::kDouble, kGradientBound64, kParameterBound64, 1);
  });
}

TEST(DdpTest, GradientsOutsideBucketsEqualOneProcessToo) {
  test::ranks(2, [](const ProcessGroup& group) {
    expect_ranks_equal_one_process(group, at::kDouble, kGradientBound64, kParameterBound64, 2,
                                   /*bucket_views=*/false);
  });
}

TEST(DdpTest, AccumulationEqualsOneProcessInFloat64) {
  test::ranks(2, [](const ProcessGroup& group) {
    expect_ranks_equal_one_process(group, at::kDouble, kGradientBound64, kParameterBound64, 3);
  });
}

TEST(DdpTest, TwoRanksFollowOneProcessInFloat32) {
  test::ranks(2, [](const ProcessGroup& group) {
    expect_ranks_equal_one_process(group, at::kFloat, kGradientBound32, kParameterBound32, 1);
  });
}

TEST(DdpTest, ThreeRanksFollowOneProcessInFloat32) {
  test::ranks(3, [](const ProcessGroup& group) {
    expect_ranks_equal_one_process(group, at::kFloat, kGradientBound32, kParameterBound32, 1);
  });
}

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t width) {
    first = register_module("first", torch::nn::Linear(4, width));
    second = register_module("second", torch::nn::Linear(width, 1));
    calls = register_buffer("calls", at::zeros({1}));
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::relu(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
  at::Tensor calls;
};
TORCH_MODULE(Net);

TEST(DdpTest, BuffersFollowRankZeroAtEachForward) {
  test::ranks(2, [](const ProcessGroup& group) {
    Net net(8);
    DistributedDataParallel<Net> ddp(net, group);
    net->calls.fill_(group.rank() + 5);
    ddp(at::ones({2, 4})).sum().backward();
    EXPECT_EQ(net->calls.item<float>(), 5);
  });
}

// Each rank's batches leave other statistics behind.
TEST(DdpTest, ValidationComputesWithRankZerosStatistics) {
  for (const int world_size : {2, 3}) {
    test::ranks(world_size, [](const ProcessGroup& group) {
      torch::nn::BatchNorm1d net(torch::nn::BatchNorm1dOptions(4));
      DistributedDataParallel<torch::nn::BatchNorm1d> ddp(net, group);
      const at::Tensor x = at::arange(24, at::kFloat).view({6, 4});
      for (int step = 0; step < 2; ++step) ddp(x * (1 + group.rank())).sum().backward();
      net->eval();
      const at::NoGradGuard no_grad;
      const at::Tensor scores = ddp(x);
      torch::nn::BatchNorm1d of_rank_0(torch::nn::BatchNorm1dOptions(4));
      for (int step = 0; step < 2; ++step) of_rank_0(x);
      of_rank_0->eval();
      EXPECT_TRUE(scores.equal(of_rank_0(x)));
      const auto buffers = net->buffers(), expected = of_rank_0->buffers();
      ASSERT_EQ(buffers.size(), 3U);
      for (size_t i = 0; i < buffers.size(); ++i) EXPECT_TRUE(buffers[i].equal(expected[i])) << i;
    });
  }
}

// As in PyTorch: in the forward that follows a synchronized step, whatever kind of forward it is.
TEST(DdpTest, BuffersAreSentInTheForwardAfterASynchronizedOne) {
  test::ranks(3, [](const ProcessGroup& group) {
    Net net(8);
    DistributedDataParallel<Net> ddp(net, group);
    enum Kind { kStep, kNoSync, kValidation };
    const std::vector<std::pair<Kind, bool>> plan{
        {kStep, true},   {kStep, true},        {kValidation, true}, {kValidation, false},
        {kStep, false},  {kNoSync, true},      {kNoSync, false},    {kStep, false},
        {kNoSync, true}, {kValidation, false}, {kStep, false},      {kStep, true}};
    for (size_t i = 0; i < plan.size(); ++i) {
      const auto [kind, sent] = plan[i];
      net->calls.fill_(static_cast<double>(10 * i) + group.rank());
      if (kind == kValidation) {
        const at::NoGradGuard no_grad;
        ddp(at::ones({2, 4}));
      } else {
        std::optional<parallel::NoSync> guard;
        if (kind == kNoSync) guard.emplace(ddp);
        ddp(at::ones({2, 4})).sum().backward();
      }
      EXPECT_EQ(net->calls.item<double>(), static_cast<double>(10 * i) + (sent ? 0 : group.rank()))
          << "forward " << i;
    }
  });
}

TEST(DdpTest, BuffersFollowRankZeroWhenTheirStorageIsReplaced) {
  test::ranks(2, [](const ProcessGroup& group) {
    Net net(8);
    DistributedDataParallel<Net> ddp(net, group);
    net->calls.set_(at::full({1}, group.rank() + 5.0F));
    ddp(at::ones({2, 4})).sum().backward();
    EXPECT_EQ(net->calls.item<float>(), 5);
    net->calls.set_data(at::full({1}, group.rank() + 7.0F));
    ddp(at::ones({2, 4})).sum().backward();
    EXPECT_EQ(net->calls.item<float>(), 7);
  });
}

TEST(DdpTest, NoSyncSendsNothing) {
  test::ranks(2, [](const ProcessGroup& group) {
    Net net(8);
    DistributedDataParallel<Net> ddp(net, group);
    {
      const auto guard = ddp.no_sync();
      (ddp(at::ones({2, 4})) * (group.rank() + 1)).sum().backward();
    }
    // Two rows, weighted by rank + 1; the mean over ranks would be 3 on both.
    EXPECT_EQ(net->second->bias.grad().item<float>(), 2 * (group.rank() + 1));
    (ddp(at::ones({2, 4})) * 0).sum().backward();
    EXPECT_EQ(net->second->bias.grad().item<float>(), 3) << "the next backward sends the sum";
  });
}

// Such a gradient would stay each rank's own.
TEST(DdpTest, ABackwardThatNoForwardOfTheWrapperAnnouncedIsRefusedByName) {
  test::ranks(2, [](const ProcessGroup& group) {
    Net net(8);
    DistributedDataParallel<Net> ddp(net, group);
    const auto input = at::ones({2, 4});
    const auto refused = [&](const std::function<void()>& backward) {
      const std::string text = test::message_of<c10::ValueError>(backward);
      EXPECT_NE(text.find("got a gradient that is not averaged"), std::string::npos) << text;
      net->zero_grad();
    };
    refused([&] { net->forward(input).sum().backward(); });
    const at::Tensor loss = (ddp(input) * (group.rank() + 1)).sum();
    loss.backward({}, /*retain_graph=*/true);
    EXPECT_EQ(net->second->bias.grad().item<float>(), 3);
    refused([&] { loss.backward(); });
    refused([&] { net->forward(input).sum().backward(); });
    {
      const auto accumulates = ddp.no_sync();
      ddp(input).sum().backward();
      net->forward(input).sum().backward();
    }
    refused([&] { net->forward(input).sum().backward(); });
    (ddp(input) * (group.rank() + 1)).sum().backward();
    EXPECT_EQ(net->second->bias.grad().item<float>(), 3) << "the next step is right";
  });
}

TEST(DdpTest, DifferentModelsAreNamedOnEveryRank) {
  const auto ends = test::run_ranks(3, [](const ProcessGroup& group) {
    Net net(group.rank() == 1 ? 9 : 8);
    const DistributedDataParallel<Net> ddp(net, group);
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.exit_code, 1);
    EXPECT_NE(end.output.find(
                  "the models differ between ranks: rank 1 has parameter first.weight [9, 4]"),
              std::string::npos)
        << end.output;
  }
}

}  // namespace ddp_test
}  // namespace cohort
