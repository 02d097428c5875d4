// SPDX-License-Identifier: Apache-2.0
#include <torch/optim/sgd.h>

#include "cohort/train/model_checkpoint.h"

#include "tests/parallel/ddp_support.h"
#include "tests/support/ranks.h"

namespace cohort {
namespace ddp_mixed_precision_test {

using comm::ProcessGroup;

// Notes the types that its forward sees.
struct WatchedImpl : torch::nn::Module {
  WatchedImpl() {
    first = register_module("first", torch::nn::Linear(8, 16));
    last = register_module("last", torch::nn::Linear(16, 4));
    scale = register_buffer("scale", at::ones({4}));
    count = register_buffer("count", at::zeros({1}, at::kLong));
    torch::NoGradGuard no_grad;
    double phase = 0;
    for (auto& parameter : parameters()) {
      parameter.copy_(
          at::arange(parameter.numel(), at::kDouble).add(phase += 1).sin().view(parameter.sizes()));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    seen = {x.scalar_type(), first->weight.scalar_type(), scale.scalar_type()};
    hidden = at::tanh(first(x));
    return last(hidden) * scale.to(x.scalar_type());
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  at::Tensor scale, count;
  at::Tensor hidden;  // the last forward's
  std::vector<at::ScalarType> seen;
};
TORCH_MODULE(Watched);
using Ddp = parallel::DistributedDataParallel<Watched>;
constexpr auto kLow = at::kBFloat16;

at::Tensor batch_of(int rank, int step = 0) {
  return at::arange(40).mul(1 + rank + 0.37 * step).cos().view({5, 8});
}

at::Tensor loss_of(const at::Tensor& output) {
  return output.to(at::kFloat).pow(2).sum();
}

// The gradients of a bfloat16 copy of `model`, in float32, not averaged.
std::vector<at::Tensor> low_gradients(const Watched& model, const at::Tensor& batch) {
  Watched copy;
  torch::NoGradGuard no_grad;
  for (size_t i = 0; i < copy->parameters().size(); ++i)
    copy->parameters()[i].copy_(model->parameters()[i]);
  copy->to(kLow);
  const at::AutoGradMode grad(true);
  loss_of(copy->forward(batch.to(kLow))).backward();
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : copy->parameters())
    gradients.push_back(parameter.grad().to(at::kFloat));
  return gradients;
}

void expect_equal(const std::vector<at::Tensor>& parameters,
                  const std::vector<at::Tensor>& gradients) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    ASSERT_TRUE(parameters[i].grad().defined()) << i;
    EXPECT_EQ(parameters[i].grad().scalar_type(), at::kFloat) << i;
    EXPECT_TRUE(parameters[i].grad().equal(gradients[i])) << i;
  }
}

std::vector<at::Tensor> mean(std::vector<at::Tensor> a, const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] = a[i] / 2 + b[i] / 2;
  return a;
}

TEST(DdpMixedPrecisionTest, ComputesInLowPrecisionAndKeepsMasters) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const bool views : {false, true}) {
      Watched model;
      Ddp ddp(model, group,
              {.gradient_as_bucket_view = views, .mixed_precision = {.param_dtype = kLow}});
      for (int step = 0; step < 3; ++step) {
        std::vector<at::Tensor> before;
        for (const auto& parameter : model->parameters())
          before.push_back(parameter.detach().clone());
        const auto expected =
            mean(low_gradients(model, batch_of(0, step)), low_gradients(model, batch_of(1, step)));
        const at::Tensor output = ddp(batch_of(group.rank(), step));
        EXPECT_EQ(output.scalar_type(), kLow);
        EXPECT_EQ(model->seen, (std::vector{kLow, kLow, at::kFloat}));
        loss_of(output).backward();
        for (size_t i = 0; i < before.size(); ++i) {
          EXPECT_TRUE(model->parameters()[i].is_leaf());
          EXPECT_TRUE(model->parameters()[i].equal(before[i]))
              << "the master is back, with every bit";
        }
        expect_equal(model->parameters(), expected);
        test::descend(*model, 1e-6);  // too little to be seen in bfloat16
        EXPECT_FALSE(model->first->weight.equal(before[0]));
      }
    }
  });
}

TEST(DdpMixedPrecisionTest, OutputsComeInTheirOwnTypeAndInputsAreCastUnlessAskedNotTo) {
  test::ranks(2, [](const ProcessGroup& group) {
    Watched model;
    Ddp ddp(model, group, {.mixed_precision = {.param_dtype = kLow, .output_dtype = at::kDouble}});
    const auto expected =
        mean(low_gradients(model, batch_of(0)), low_gradients(model, batch_of(1)));
    const at::Tensor output = ddp(batch_of(group.rank()));
    EXPECT_EQ(output.scalar_type(), at::kDouble);
    loss_of(output).backward();
    expect_equal(model->parameters(), expected);

    Watched strict;
    Ddp uncast(strict, group,
               {.mixed_precision = {.param_dtype = kLow, .cast_forward_inputs = false}});
    EXPECT_THROW(uncast(batch_of(group.rank())), c10::Error) << "float32 times bfloat16";
    EXPECT_EQ(uncast(batch_of(group.rank()).to(kLow)).scalar_type(), kLow);
  });
}

TEST(DdpMixedPrecisionTest, MastersAreBackAfterAPlainBackward) {
  test::ranks(2, [](const ProcessGroup& group) {
    Watched model;
    model->last->bias.set_requires_grad(false);
    Ddp ddp(model, group, {.mixed_precision = {.param_dtype = kLow}});
    const at::Tensor loss = loss_of(ddp(batch_of(group.rank())));
    EXPECT_EQ(model->last->bias.scalar_type(), kLow) << "frozen parameters compute in it, too";
    loss.backward();
    for (const auto& parameter : model->parameters())
      EXPECT_EQ(parameter.scalar_type(), at::kFloat);
    EXPECT_FALSE(model->last->bias.grad().defined());
  });
}

TEST(DdpMixedPrecisionTest, MastersAreBackAfterAForwardWithoutGradientOrOneThatThrows) {
  test::ranks(1, [](const ProcessGroup& group) {
    Watched model;
    Ddp ddp(model, group, {.mixed_precision = {.param_dtype = kLow}});
    {
      const at::NoGradGuard no_grad;
      EXPECT_EQ(ddp(batch_of(0)).scalar_type(), kLow);
    }
    EXPECT_EQ(model->first->weight.scalar_type(), at::kFloat);
    EXPECT_THROW(ddp(at::ones({3, 3})), c10::Error);
    EXPECT_EQ(model->first->weight.scalar_type(), at::kFloat);
    loss_of(ddp(batch_of(0))).backward();
    expect_equal(model->parameters(), low_gradients(model, batch_of(0)));
  });
}

TEST(DdpMixedPrecisionTest, MastersAreBackAfterABackwardThatThrows) {
  test::ranks(2, [](const ProcessGroup& group) {
    Watched model;
    Ddp ddp(model, group, {.mixed_precision = {.param_dtype = kLow}});
    for (const bool early : {false, true}) {
      model->zero_grad();
      const at::Tensor output = ddp(batch_of(group.rank()));
      // Before any gradient, or when those of the last layer are there.
      const at::Tensor place = early ? output : model->hidden;
      place.register_hook([](const at::Tensor& gradient) {
        TORCH_CHECK_VALUE(false, "the gradient is broken");
        return gradient;
      });
      test::expect_error<c10::ValueError>([&] { loss_of(output).backward(); },
                                          "the gradient is broken");
      for (const auto& parameter : model->parameters())
        EXPECT_EQ(parameter.scalar_type(), at::kFloat);
      model->zero_grad();
      loss_of(ddp(batch_of(group.rank()))).backward();
      expect_equal(model->parameters(),
                   mean(low_gradients(model, batch_of(0)), low_gradients(model, batch_of(1))));
    }
  });
}

TEST(DdpMixedPrecisionTest, AForwardWithoutGradientLeavesThoseOfAnotherLent) {
  test::ranks(1, [](const ProcessGroup& group) {
    Watched model;
    Ddp ddp(model, group, {.mixed_precision = {.param_dtype = kLow}});
    const at::Tensor loss = loss_of(ddp(batch_of(0)));
    {
      const at::NoGradGuard no_grad;
      ddp(batch_of(0, 1));
    }
    EXPECT_THROW(ddp(at::ones({3, 3})), c10::Error);
    EXPECT_EQ(model->first->weight.scalar_type(), kLow) << "its backward is still to come";
    loss.backward();
    EXPECT_EQ(model->first->weight.scalar_type(), at::kFloat);
    expect_equal(model->parameters(), low_gradients(model, batch_of(0)));
  });
}

TEST(DdpMixedPrecisionTest, AccumulatesInFloat32) {
  test::ranks(2, [](const ProcessGroup& group) {
    Watched model;
    Ddp ddp(model, group, {.mixed_precision = {.param_dtype = kLow}});
    {
      const auto guard = ddp.no_sync();
      loss_of(ddp(batch_of(group.rank(), 0))).backward();
    }
    loss_of(ddp(batch_of(group.rank(), 1))).backward();
    std::vector<at::Tensor> sums[2];
    for (int rank = 0; rank < 2; ++rank) {
      sums[rank] = low_gradients(model, batch_of(rank, 0));
      const auto more = low_gradients(model, batch_of(rank, 1));
      for (size_t i = 0; i < more.size(); ++i) sums[rank][i] += more[i];
    }
    expect_equal(model->parameters(), mean(sums[0], sums[1]));
  });
}

TEST(DdpMixedPrecisionTest, SeveralForwardsBeforeOneBackward) {
  test::ranks(1, [](const ProcessGroup& group) {
    Watched model;
    Ddp ddp(model, group, {.mixed_precision = {.param_dtype = kLow}});
    const at::Tensor one = ddp(batch_of(0, 0));
    const at::Tensor two = ddp(batch_of(0, 1));
    (loss_of(one) + loss_of(two)).backward();
    const auto a = low_gradients(model, batch_of(0, 0));
    const auto b = low_gradients(model, batch_of(0, 1));
    for (size_t i = 0; i < a.size(); ++i) {
      // The two are added in bfloat16 before the cast: 2^-9 of either and of the sum.
      test::expect_near(model->parameters()[i].grad(), a[i] + b[i], std::to_string(i), 3.0 / 256);
    }
  });
}

TEST(DdpMixedPrecisionTest, GradientsTravelInTheReduceType) {
  test::ranks(2, [](const ProcessGroup& group) {
    Watched model;
    Ddp ddp(model, group, {.mixed_precision = {.reduce_dtype = kLow}});
    loss_of(ddp(batch_of(group.rank()))).backward();
    EXPECT_EQ(model->seen[1], at::kFloat);
    std::vector<at::Tensor> halves[2];
    for (int rank = 0; rank < 2; ++rank) {
      Watched copy;
      loss_of(copy->forward(batch_of(rank))).backward();
      for (const auto& parameter : copy->parameters())
        halves[rank].push_back((parameter.grad() / 2).to(kLow));
    }
    for (size_t i = 0; i < halves[0].size(); ++i)
      halves[0][i] = (halves[0][i] + halves[1][i]).to(at::kFloat);
    expect_equal(model->parameters(), halves[0]);
    test::expect_error<c10::ValueError>([&] { ddp.register_comm_hook({}); }, "reduce_dtype");
  });
}

TEST(DdpMixedPrecisionTest, FloatingBuffersTakeTheirTypeForGood) {
  test::ranks(1, [](const ProcessGroup& group) {
    Watched model;
    const Ddp ddp(model, group, {.mixed_precision = {.buffer_dtype = kLow}});
    EXPECT_EQ(model->scale.scalar_type(), kLow);
    EXPECT_EQ(model->count.scalar_type(), at::kLong);
    EXPECT_EQ(model->first->weight.scalar_type(), at::kFloat);
  });
}

TEST(DdpMixedPrecisionTest, IgnoredParametersKeepTheirType) {
  test::ranks(1, [](const ProcessGroup& group) {
    Watched model;
    Ddp ddp(model, group,
            {.ignored = {"last.weight", "last.bias"}, .mixed_precision = {.param_dtype = kLow}});
    EXPECT_THROW(ddp(batch_of(0)), c10::Error) << "bfloat16 activations meet float32 weights";
  });
}

// One tensor under two names.
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    first = register_module("first", torch::nn::Linear(8, 8));
    tied = register_parameter("tied", first->weight);
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(first(x), tied); }
  torch::nn::Linear first{nullptr};
  at::Tensor tied;
};
TORCH_MODULE(Tied);

TEST(DdpMixedPrecisionTest, TiedParametersAreLentOnce) {
  test::ranks(2, [](const ProcessGroup& group) {
    Tied model;
    parallel::DistributedDataParallel<Tied> ddp(model, group,
                                                {.mixed_precision = {.param_dtype = kLow}});
    const at::Tensor before = model->tied.detach().clone();
    loss_of(ddp(batch_of(group.rank()))).backward();
    EXPECT_TRUE(model->tied.equal(before)) << "with every bit";
    EXPECT_EQ(model->tied.grad().scalar_type(), at::kFloat);
  });
}

// The backward after it would put back what was there before the step.
TEST(DdpMixedPrecisionTest, AStepBetweenForwardAndBackwardIsRefused) {
  test::ranks(1, [](const ProcessGroup& group) {
    Tied model;
    parallel::DistributedDataParallel<Tied> ddp(model, group,
                                                {.mixed_precision = {.param_dtype = kLow}});
    torch::optim::SGD sgd(model->parameters(), 0.1);
    loss_of(ddp(batch_of(0))).backward();
    const at::Tensor left = loss_of(ddp(batch_of(0, 1)));
    const at::Tensor right = loss_of(ddp(batch_of(0, 2)));  // two forwards alone are none
    sgd.step();
    test::expect_error<c10::ValueError>([&] { ddp(batch_of(0)); },
                                        " was changed while in BFloat16, after a forward without");
  });
}

TEST(DdpMixedPrecisionTest, WhatIsIgnoredIsSoUnderEveryName) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const char* name : {"tied", "first.weight"}) {
      Tied model;
      if (group.rank() == 1) {
        const at::NoGradGuard no_grad;
        model->tied.add_(1);
      }
      const at::Tensor before = model->tied.detach().clone();
      parallel::DistributedDataParallel<Tied> ddp(model, group, {.ignored = {name}});
      EXPECT_TRUE(model->tied.equal(before)) << name;
      EXPECT_EQ(ddp.num_buckets(), 1) << "the bias";
      loss_of(ddp(batch_of(group.rank()))).backward();
      Tied alone;
      {
        const at::NoGradGuard no_grad;
        alone->tied.copy_(before);
        alone->first->bias.copy_(model->first->bias);
      }
      loss_of(alone->forward(batch_of(group.rank()))).backward();
      EXPECT_TRUE(at::allclose(model->tied.grad(), alone->tied.grad())) << name;
    }
  });
}

TEST(DdpMixedPrecisionTest, ParametersAreNotTakenBetweenForwardAndBackward) {
  test::ranks(2, [](const ProcessGroup& group) {
    Tied model;
    parallel::DistributedDataParallel<Tied> ddp(model, group,
                                                {.mixed_precision = {.param_dtype = kLow}});
    const at::Tensor loss = loss_of(ddp(batch_of(group.rank())));
    test::expect_error<c10::ValueError>([&] { auto whole = ddp.unsharded(); },
                                        "until the backward of the last forward");
    test::expect_error<c10::ValueError>([&] { checkpoint::state_of(ddp); },
                                        "until the backward of the last forward");
    loss.backward();
    const auto whole = ddp.unsharded();
    EXPECT_EQ(checkpoint::state_of(ddp).to_save.front().tensor.scalar_type(), at::kFloat);
  });
}

TEST(DdpMixedPrecisionTest, UnusedParametersGetTheirMasterBack) {
  test::ranks(2, [](const ProcessGroup& group) {
    test::Branches model;
    test::Ddp ddp(model, group,
                  {.find_unused_parameters = true, .mixed_precision = {.param_dtype = at::kFloat}});
    test::loss_of(ddp(test::batch_of(group.rank()), false)).backward();
    EXPECT_EQ(model->extra->weight.scalar_type(), at::kDouble);
    EXPECT_FALSE(model->extra->weight.grad().defined());
    EXPECT_EQ(model->first->weight.grad().scalar_type(), at::kDouble);
  });
}

}  // namespace ddp_mixed_precision_test
}  // namespace cohort
