// SPDX-License-Identifier: Apache-2.0
// The Transformer on a device whose memory the host may not touch: bit by bit what the CPU computes
// with the same operations, and nothing of a step waits for the device.
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>

#include "cohort/nmt/transformer.h"

#include "tests/device/second_device.h"
#include "tests/support/aten_kernels.h"
#include "tests/support/sentences.h"

namespace cohort::nmt {
namespace transformer_device_test {

struct Case {
  Norm norm = Norm::kPre;
  Activation activation = Activation::kRelu;
  Precision precision = Precision::kFloat32;
};

Transformer model_of(const Case& c, at::Device device) {
  auto options = test::tiny_options();
  options.norm = c.norm;
  options.ffn_activation = c.activation;
  options.tied_embeddings = c.activation == Activation::kGelu;
  options.dropout = 0.2;
  Transformer model(options, c.precision);
  model->to(device);
  model->set_dropout_stream({.seed = 3});
  return model;
}

// Losses of three steps, then all parameters, on the CPU.
std::vector<at::Tensor> train_on(at::Device device, const Case& c) {
  Transformer model = model_of(c, device);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<at::Tensor> results;
  for (uint32_t step = 0; step < 3; ++step) {
    const Batch batch = test::make_test_batch(test::make_sentences(6, step)).to(device);
    const auto [loss, nll] = model->forward(batch);
    EXPECT_EQ(loss.device(), device);
    optimizer.zero_grad();
    loss.backward();
    for (const at::Tensor& parameter : model->parameters())
      EXPECT_EQ(parameter.grad().device(), device);
    optimizer.step();
    results.insert(results.end(), {loss.detach().cpu(), nll.cpu()});
  }
  for (const at::Tensor& parameter : model->parameters())
    results.push_back(parameter.detach().cpu());
  return results;
}

TEST(TransformerDeviceTest, TrainingHasTheBitsOfTheCpuWithTheSameOperations) {
  for (const Norm norm : {Norm::kPre, Norm::kPost}) {
    for (const auto activation : {Activation::kRelu, Activation::kGelu, Activation::kSwish}) {
      for (const auto precision : {Precision::kFloat32, Precision::kBFloat16}) {
        SCOPED_TRACE(to_string(norm) + " " + to_string(activation));
        const Case c{norm, activation, precision};
        const auto expected = [&] {
          const test::AtenKernels guard;
          return train_on(at::kCPU, c);
        }();
        const auto got = train_on(test::second_device(), c);
        ASSERT_EQ(got.size(), expected.size());
        for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
        EXPECT_LT(expected[4].item<double>(), 1e4) << "a loss that is no number";
      }
    }
  }
}

TEST(TransformerDeviceTest, ForwardAndBackwardNeitherWaitNorCopy) {
  Transformer model = model_of({}, test::second_device());
  const Batch on_host = test::make_test_batch(test::make_sentences(6, 1));
  std::get<0>(model->forward(on_host.to(test::second_device())))
      .backward();  // Positions move once.
  test::reset_device_counts();
  const Batch batch = on_host.to(test::second_device());
  EXPECT_EQ(test::device_counts().host_to_device, 6);
  test::reset_device_counts();
  std::get<0>(model->forward(batch)).backward();
  const test::DeviceCounts counts = test::device_counts();
  EXPECT_EQ(counts.synchronisations, 0);
  EXPECT_EQ(counts.host_to_device, 0);
  EXPECT_EQ(counts.device_to_host, 0);
}

TEST(TransformerDeviceTest, EvaluationHasTheBitsOfTheCpuWithTheSameOperations) {
  const at::NoGradGuard no_grad;
  const Batch batch = test::make_test_batch(test::make_sentences(6, 1));
  const auto evaluate = [&](at::Device device) {
    Transformer model = model_of({}, device);
    model->eval();
    return model->log_probabilities(batch.to(device)).cpu();
  };
  const at::Tensor expected = [&] {
    const test::AtenKernels guard;
    return evaluate(at::kCPU);
  }();
  EXPECT_TRUE(at::equal(evaluate(test::second_device()), expected));
}

TEST(TransformerDeviceTest, ParametersAreDrawnAsOnTheCpu) {
  Transformer here = model_of({}, at::kCPU), there = model_of({}, test::second_device());
  here->initialise(5);
  there->initialise(5);
  for (const auto& item : here->named_parameters()) {
    EXPECT_TRUE(at::equal(there->named_parameters()[item.key()].cpu(), item.value())) << item.key();
  }
}

}  // namespace transformer_device_test
}  // namespace cohort::nmt
