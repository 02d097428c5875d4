// SPDX-License-Identifier: Apache-2.0
// Trainers and blocks of parameter servers on a device whose memory the host may not touch: bit by
// bit those of the CPU.
#include <algorithm>
#include <array>
#include <cmath>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include "cohort/ps/module/device_block.h"
#include "cohort/ps/module/session.h"

#include "tests/device/one_server.h"
#include "tests/device/second_device.h"
#include "tests/support/message_of.h"

namespace cohort::ps {
namespace session_device_test {

struct Trained {
  std::vector<at::Tensor> values;  // On the CPU: losses, parameters, rows.
  test::DeviceCounts last_step;
};

// A linear layer on `device` and rows on the host.
Trained train_on(at::Device device, Training training, Pooling pooling) {
  const test::OneServer server;
  SessionOptions options{.training = training,
                         .dense_rule = {.rule = Rule::kAdam, .learning_rate = 0.25f}};
  if (training != Training::kLocal) options.servers = {server.endpoint()};
  Session session(options);
  Embedding rows = session.embedding({.name = "ids",
                                      .width = 4,
                                      .seed = 7,
                                      .rule = {.rule = Rule::kSgd, .learning_rate = 0.5f},
                                      .initializer = {.scale = 0.5f}},
                                     {.pooling = pooling, .device = device});
  torch::manual_seed(3);
  torch::nn::Linear linear(4, 2);
  linear->to(device);
  session.add("linear", *linear);
  session.start();
  Trained trained;
  for (int64_t step = 0; step < 6; ++step) {
    const at::Tensor ids = at::arange(6).mul(3 + step).remainder(11).view({3, 2});
    test::reset_device_counts();
    rows->prefetch(ids);
    session.pull();
    const at::Tensor loss = (linear->forward(rows->forward(ids)) - 1).square().mean();
    EXPECT_EQ(loss.device(), device);
    loss.backward();
    EXPECT_EQ(linear->weight.grad().device(), device);
    session.push();
    if (training == Training::kHalfAsync) session.flush();  // Its thread sends when it likes.
    trained.last_step = test::device_counts();
    trained.values.push_back(loss.detach().cpu());
  }
  session.pull();
  for (const at::Tensor& parameter : linear->parameters()) {
    EXPECT_EQ(parameter.device(), device);
    trained.values.push_back(parameter.detach().cpu());
  }
  rows->eval();
  trained.values.push_back(rows->forward(at::arange(11).view({11, 1})).cpu());
  session.finish();
  return trained;
}

TEST(SessionDeviceTest, TrainsAsOnTheCpu) {
  for (const Training training : {Training::kLocal, Training::kSync, Training::kAsync,
                                  Training::kHalfAsync, Training::kGeo}) {
    for (const Pooling pooling : {Pooling::kNone, Pooling::kMean}) {
      const auto expected = train_on(at::kCPU, training, pooling).values;
      const auto got = train_on(test::second_device(), training, pooling).values;
      ASSERT_EQ(got.size(), expected.size());
      for (size_t i = 0; i < got.size(); ++i)
        EXPECT_TRUE(at::equal(got[i], expected[i]))
            << "training " << static_cast<int>(training) << ", value " << i;
    }
  }
}

TEST(SessionDeviceTest, AStepCopiesWhatTravels) {
  const auto counts = train_on(test::second_device(), Training::kSync, Pooling::kNone).last_step;
  EXPECT_EQ(counts.host_to_device, 2 + 1) << "two parameters, and the rows";
  EXPECT_EQ(counts.device_to_host, 2 + 1) << "their gradients";
  EXPECT_EQ(counts.synchronisations, 1) << "for the gradient of the rows";
}

TEST(SessionDeviceTest, ParametersOfTwoDevicesAreRefused) {
  Session session({.training = Training::kLocal});
  torch::nn::Linear here(2, 2), there(2, 2);
  there->to(test::second_device());
  session.add("here", *here);
  const std::string error =
      test::message_of<c10::ValueError>([&] { session.add("there", *there); });
  EXPECT_NE(error.find("'there.weight' is on mtia:0: expected all on one device"),
            std::string::npos)
      << error;
}

TEST(DeviceBlockOnADeviceTest, UpdatesAsOnTheCpu) {
  constexpr size_t kElements = 37;
  for (const Rule rule :
       {Rule::kAdd, Rule::kSgd, Rule::kMomentum, Rule::kAdagrad, Rule::kAdam, Rule::kFtrl}) {
    const RuleOptions options{.rule = rule,
                              .learning_rate = 0.1f,
                              .initial_accumulator = 0.1f,
                              .l1 = 0.05f,
                              .l2 = 0.01f,
                              .clip_norm = 2};
    const auto host = device_blocks(c10::kCPU)(options, kElements);
    const auto device = device_blocks(test::second_device())(options, kElements);
    std::array<float, kElements> values{};
    for (int step = 0; step < 10; ++step) {
      for (size_t i = 0; i < kElements; ++i)
        values[i] = std::sin(static_cast<float>(i + 1) * static_cast<float>(step + 2));
      for (const auto& block : {host.get(), device.get()}) {
        if (step == 0) {
          block->set_weights(values);
        } else {
          block->update(step, values);
        }
      }
    }
    EXPECT_TRUE(std::ranges::equal(device->weights(), host->weights()));
    EXPECT_TRUE(std::ranges::equal(device->state(), host->state()));
  }
}

}  // namespace session_device_test
}  // namespace cohort::ps
