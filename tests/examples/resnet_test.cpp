// SPDX-License-Identifier: Apache-2.0
#include "examples/imagenet/resnet.h"

#include <gtest/gtest.h>
#include <set>
#include <torch/types.h>

#include "cohort/base/error.h"

namespace imagenet {
namespace resnet_test {

int64_t num_parameters(const ResNet& model) {
  int64_t count = 0;
  for (const auto& parameter : model->parameters()) count += parameter.numel();
  return count;
}

std::set<std::string> names(const ResNet& model) {
  std::set<std::string> all;
  for (const auto& item : model->named_parameters()) all.insert(item.key());
  for (const auto& item : model->named_buffers()) all.insert(item.key());
  return all;
}

// The numbers that torchvision's documentation gives for its models.
TEST(ResNetTest, HasAsManyParametersAsTorchvisions) {
  EXPECT_EQ(num_parameters(ResNet(ResNetOptions{.arch = "resnet18"})), 11'689'512);
  EXPECT_EQ(num_parameters(ResNet(ResNetOptions{.arch = "resnet34"})), 21'797'672);
  EXPECT_EQ(num_parameters(ResNet(ResNetOptions{.arch = "resnet50"})), 25'557'032);
}

TEST(ResNetTest, NamesAreTorchvisions) {
  const auto small = names(ResNet(ResNetOptions{.arch = "resnet18"}));
  EXPECT_EQ(small.size(), 122U) << "entries of torchvision's resnet18 state dict";
  const auto large = names(ResNet(ResNetOptions{.arch = "resnet50"}));
  EXPECT_EQ(large.size(), 320U) << "entries of torchvision's resnet50 state dict";
  for (const char* name :
       {"conv1.weight", "bn1.weight", "bn1.running_var", "bn1.num_batches_tracked",
        "layer1.0.conv1.weight", "layer2.0.downsample.0.weight", "layer2.0.downsample.1.bias",
        "layer4.1.bn2.running_mean", "fc.weight", "fc.bias"}) {
    EXPECT_TRUE(small.contains(name)) << name;
    EXPECT_TRUE(large.contains(name)) << name;
  }
  EXPECT_FALSE(small.contains("layer1.0.downsample.0.weight"));
  EXPECT_TRUE(large.contains("layer1.0.downsample.0.weight"));
  EXPECT_TRUE(large.contains("layer3.5.conv3.weight"));
}

TEST(ResNetTest, ScoresEachPictureAndEveryParameterLearns) {
  for (const char* arch : {"resnet18", "resnet50"}) {
    ResNet model(ResNetOptions{.arch = arch, .num_classes = 7});
    const at::Tensor scores = model->forward(torch::randn({3, 3, 64, 64}));
    EXPECT_EQ(scores.sizes(), (std::vector<int64_t>{3, 7}));
    scores.square().sum().backward();
    for (const auto& item : model->named_parameters()) {
      EXPECT_GT(item.value().grad().abs().sum().item<double>(), 0) << item.key();
    }
  }
}

TEST(ResNetTest, UnknownArchitectureIsNamed) {
  try {
    ResNet model(ResNetOptions{.arch = "resnet19"});
    FAIL() << "accepted";
  } catch (const cohort::ConfigError& error) {
    EXPECT_EQ(
        cohort::one_line(error),
        "--arch resnet19: expected one of resnet18, resnet34, resnet50, resnet101, resnet152");
  }
}

}  // namespace resnet_test
}  // namespace imagenet
