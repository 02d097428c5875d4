// SPDX-License-Identifier: Apache-2.0
#include "cohort/optim/adam.h"

#include <cmath>
#include <filesystem>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/optim/exponential_average.h"
#include "cohort/optim/mapped_memory.h"
#include "cohort/optim/noam.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/message_of.h"

namespace cohort::optim {
namespace adam_test {

TEST(AdamTest, FollowsLibtorchsAdam) {
  torch::manual_seed(1);
  at::Tensor ours = at::randn({33, 7}, at::kDouble).requires_grad_(true);
  at::Tensor theirs = ours.detach().clone().requires_grad_(true);
  Adam adam({{"w", ours}});
  torch::optim::Adam reference({theirs},
                               torch::optim::AdamOptions(0.01).betas({0.9, 0.98}).eps(1e-9));
  for (int step = 0; step < 20; ++step) {
    const at::Tensor gradient = at::randn({33, 7}, at::kDouble);
    ours.mutable_grad() = gradient.clone();
    theirs.mutable_grad() = gradient * 0.3;  // That is no float32.
    adam.step(0.01, /*gradient_factor=*/0.3);
    EXPECT_TRUE(ours.grad().equal(theirs.grad()));
    reference.step();
  }
  // 20 steps of 1e-2, each with a few eps of relative error.
  EXPECT_LE((ours - theirs).abs().max().item<double>(), 1e-13);
  EXPECT_EQ(adam.num_steps(), 20);
}

TEST(AdamTest, AStepCountsAsAChangeOfTheParameter) {
  at::Tensor w = at::ones({3}).requires_grad_(true);
  Adam adam({{"w", w}});
  w.mutable_grad() = at::ones({3});
  const auto before = w._version();
  adam.step(0.1);
  EXPECT_GT(w._version(), before) << "the fused kernel itself does not count";
}

TEST(AdamTest, MomentsOnDiskChangeNoBit) {
  const TemporaryFolder folder;
  const std::string place = folder.path().string();
  const auto train = [](const AdamOptions& options) {
    torch::manual_seed(4);
    std::vector<std::pair<std::string, at::Tensor>> parameters;
    for (const int64_t size : {33, 1, 0, 1000})
      parameters.emplace_back(std::to_string(size), at::randn({size}).requires_grad_(true));
    Adam adam(parameters, options);
    for (int step = 0; step < 5; ++step) {
      for (const auto& [name, tensor] : parameters)
        tensor.mutable_grad() = at::randn(tensor.sizes());
      adam.step(0.01, 0.5);
    }
    std::vector<at::Tensor> found;
    for (const auto& [name, tensor] : parameters) found.push_back(tensor.detach().clone());
    for (const auto& [name, tensor] : adam.state()) found.push_back(tensor.clone());
    return found;
  };
  const auto expected = train({});
  const auto found = train({.state_folder = place});
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(found[i].equal(expected[i])) << i;
  EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "the file has no name";
}

TEST(AdamTest, AFolderWithoutRoomForTheMomentsIsNamed) {
  const TemporaryFolder folder;
  const std::string place = folder.path().string();
  const auto message = [](const std::string& path, int64_t bytes) {
    return test::message_of<ConfigError>([&] { const MappedMemory memory(path, bytes); });
  };
  const std::string full = message(place, int64_t{1} << 60);
  EXPECT_EQ(full.find(place + ": expected room for 1099511627776 MiB, got "), 0U) << full;
  const std::string missing = message(place + "/missing", 1);
  EXPECT_EQ(missing, place + "/missing: expected a writable folder: No such file or directory");
  EXPECT_EQ(message(place, 4096), "nothing was thrown");
}

TEST(AdamTest, AGradientInAnotherLayoutIsRefused) {
  at::Tensor w = at::randn({4, 5}).requires_grad_(true);
  Adam adam({{"layer.weight", w}});
  w.mutable_grad() = at::randn({5, 4}).t();
  try {
    adam.step(0.1);
    FAIL();
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find("layer.weight"), std::string::npos);
  }
  EXPECT_EQ(adam.num_steps(), 0) << "what was refused is no step";
}

TEST(AdamTest, TheNormCountsEveryGradient) {
  at::Tensor a = at::zeros({2}).requires_grad_(true);
  at::Tensor b = at::zeros({1}).requires_grad_(true);
  const at::Tensor without = at::zeros({3}).requires_grad_(true);
  a.mutable_grad() = at::tensor({3.0F, 0.0F});
  b.mutable_grad() = at::tensor({4.0F});
  EXPECT_DOUBLE_EQ(std::sqrt(gradient_norm_squared({a, b, without})), 5);
}

// A gradient has none itself: the norm was 0.
TEST(AdamTest, TheNormRefusesGradientsInThePlaceOfParameters) {
  at::Tensor a = at::zeros({2}).requires_grad_(true);
  a.mutable_grad() = at::arange(3, 5, at::kFloat);
  EXPECT_THROW(gradient_norm_squared({a.grad()}), c10::ValueError);
  EXPECT_THROW(gradient_norm_squared({a * 2}), c10::ValueError);
  EXPECT_DOUBLE_EQ(gradient_norm_squared({a, at::ones({2})}), 25) << "a frozen parameter counts 0";
}

TEST(ExponentialAverageTest, FollowsItsFormulaAndGivesTheParametersBack) {
  at::Tensor w = at::zeros({2}, at::kDouble).requires_grad_(true);
  ExponentialAverage average({w}, 0.25);
  double expected = 0;
  for (int t = 1; t <= 60; ++t) {
    const at::NoGradGuard no_grad;
    w.fill_(t);
    average.update();
    expected += std::max(0.25, 9.0 / (t + 9)) * (t - expected);
  }
  {
    const auto before = w._version();
    const AveragesInPlace in_place(&average);
    EXPECT_NEAR(w[1].item<double>(), expected, 1e-12);
    EXPECT_GT(w._version(), before);
  }
  EXPECT_EQ(w[1].item<double>(), 60);
}

// As a module's parameters() lists a tensor that is registered twice.
TEST(OptimTest, ATensorThatIsListedTwiceIsRefusedOrCountsOnce) {
  const at::Tensor w = at::ones({3}, at::kDouble).requires_grad_();
  w.mutable_grad() = at::full({3}, 2.0, at::kDouble);
  EXPECT_DOUBLE_EQ(gradient_norm_squared({w, w}), 12);
  EXPECT_THROW(ExponentialAverage({w, w}, 0.5), c10::ValueError);
  try {
    Adam({{"a", w}, {"b", w}}, {});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find("Adam: a and b are one tensor"), std::string::npos);
  }
}

TEST(NoamTest, RisesLinearlyAndFallsWithTheInverseRoot) {
  const NoamSchedule schedule{.factor = 2, .width = 512, .warmup = 4000};
  EXPECT_DOUBLE_EQ(schedule.at(4000), 2 / std::sqrt(512.0) / std::sqrt(4000.0));
  EXPECT_DOUBLE_EQ(schedule.at(2000), schedule.at(4000) / 2);
  EXPECT_DOUBLE_EQ(schedule.at(16000), schedule.at(4000) / 2);
}

}  // namespace adam_test
}  // namespace cohort::optim
