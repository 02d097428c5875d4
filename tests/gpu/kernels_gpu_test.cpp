// SPDX-License-Identifier: Apache-2.0
// The kernels for CUDA on a card, beside the CPU's numbers.
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/comm/accelerator.h"
#include "cohort/nmt/kernels/cuda/launches.h"
#include "cohort/nmt/kernels/kernels.h"
#include "cohort/nmt/transformer.h"

#include "tests/support/aten_kernels.h"
#include "tests/support/host_launches.h"
#include "tests/support/sentences.h"

namespace cohort::nmt {
namespace kernels_gpu_test {

class GpuKernelsTest : public testing::Test {
 protected:
  void SetUp() override { comm::init_cuda(); }  // Before the first question to libtorch.
};

TEST_F(GpuKernelsTest, AreThoseOfTheObjectBesideTheProgram) {
  EXPECT_NE(comm::cuda_kernels_file(), "");
  EXPECT_NE(cuda_launches_for(c10::DeviceType::CUDA), nullptr);
}

// Rows of four elements, more, and fewer; at an address of which four can be moved at once, and not.
TEST_F(GpuKernelsTest, WhatDropsHasTheBitsOfTheHost) {
  const Dropping whole{.rule = {.key = 77, .threshold = 20000, .scale = 1.5F}, .part = {}};
  const Dropping part{.rule = {.key = 78, .threshold = 30000, .scale = 2},
                      .part = {.size = 6, .whole = 15, .first = 5}};
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const auto wide = type == at::kBFloat16 ? at::kFloat : type;
    for (const Dropping& dropping : {whole, part}) {
      for (const int64_t count : {100200, 100203}) {
        for (const int64_t first : {0, 1}) {
          torch::manual_seed(4);
          const auto on_card = [&](const at::Tensor& x) {
            return at::cat({x.narrow(0, 0, first), x}).cuda().narrow(0, first, count);
          };
          const at::Tensor x = at::randn({count}).to(type), more = at::randn({count}).to(wide);
          const at::Tensor there_x = on_card(x), there_more = on_card(more);
          const Kernels& there = kernels_for(there_x);
          const test::HostLaunches host;
          const Kernels& here = kernels_for(x);
          const auto same = [](const at::Tensor& got, const at::Tensor& expected) {
            return at::equal(got.cpu(), expected);
          };
          EXPECT_TRUE(same(there.dropout(there_x, dropping), here.dropout(x, dropping)));
          const at::Tensor positive = here.relu_dropout(x, dropping);
          EXPECT_TRUE(same(there.relu_dropout(there_x, dropping), positive));
          EXPECT_TRUE(same(there.relu_dropout_backward(on_card(positive), there_x, 1.5F),
                           here.relu_dropout_backward(positive, x, 1.5F)));
          EXPECT_TRUE(same(there.add_dropout(there_more, there_x, dropping),
                           here.add_dropout(more, x, dropping)));
          EXPECT_TRUE(same(there.add_dropout_backward(there_more, type, dropping),
                           here.add_dropout_backward(more, type, dropping)));
        }
      }
    }
  }
}

TEST_F(GpuKernelsTest, SoftmaxIsTheHostsButForExponentials) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    torch::manual_seed(7);
    const at::Tensor scores = at::randn({3, 2, 37, 70}).to(type),
                     grad = at::randn({3, 2, 37, 70}).to(type);
    const at::Tensor lengths = at::tensor({70, 33, 1}, at::kLong);
    const Dropping dropping{.rule = {.key = 79, .threshold = 20000, .scale = 1.5F}, .part = {}};
    const auto results = [&](at::Device device) {
      const SoftmaxMask mask{.key_lengths_B = lengths.to(device), .causal = true, .scale = 0.5F};
      const at::Tensor x = scores.to(device);
      const Kernels& kernels = kernels_for(x);
      const auto [probs, dropped] = kernels.softmax(x, mask, dropping);
      return std::vector<at::Tensor>{
          probs.cpu(), dropped.cpu(),
          kernels.softmax_backward(probs, grad.to(device), mask, dropping).cpu()};
    };
    const auto got = results(at::kCUDA);
    const test::HostLaunches host;
    const auto expected = results(at::kCPU);
    // Exponentials 2 ulp apart, sums of 70 of them, a rounding of the stored type to the neighbour; a
    // slope is below 1.5 * 4.
    const double bound = (200 * 0x1p-24 + (type == at::kFloat ? 0 : 0x1p-7)) * 6;
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_LE((got[i] - expected[i]).abs().max().item<double>(), bound) << i;
      EXPECT_TRUE(at::equal(got[i] == 0, expected[i] == 0)) << i;
    }
  }
}

TEST_F(GpuKernelsTest, CrossEntropyIsTheHostsButForExponentials) {
  constexpr double kU = 0x1p-24;
  constexpr int64_t kRows = 64;
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    for (const int64_t columns : {1, 257, 1000, 32000}) {
      SCOPED_TRACE(columns);
      torch::manual_seed(5);
      const at::Tensor logits = (3 * at::randn({kRows, columns})).to(type);
      const at::Tensor labels = at::randint(columns, {kRows}, at::kLong);
      const auto results = [&](const at::Tensor& of) {
        const at::Tensor slopes = of.clone(),
                         sums = at::zeros({2}, of.options().dtype(at::kDouble));
        kernels_for(of).cross_entropy(slopes, labels.to(of.device()), 0.1, true, sums);
        return std::pair{sums.cpu(), slopes.cpu().to(at::kDouble)};
      };
      const auto [sums, slopes] = results(logits.to(at::kCUDA));
      const test::HostLaunches host;
      const auto [host_sums, host_slopes] = results(logits);
      // An exponential is off by 2 ulp on a card and 1 on the host, its sum by a rounding for each
      // of a thread's terms and each level of the tree; the slope has three operations more, which
      // a card may round once, and its storing.
      const double sum_error = 2 * (6 + static_cast<double>(columns) / kLanes + 9) * kU;
      EXPECT_LE((sums - host_sums).abs().max().item<double>(), kRows * sum_error);
      const double unit = type == at::kFloat ? kU : 0x1p-8;
      const at::Tensor bound = (sum_error + 20 * kU) + 2 * unit * host_slopes.abs();
      EXPECT_TRUE(((slopes - host_slopes).abs() <= bound).all().item<bool>());
    }
  }
}

// Output and gradients of an attention over three tiles of 32 rows, of sentences of 70, 33 and 1.
std::vector<at::Tensor> attention_of(const at::Tensor& packed, const at::Tensor& kv, bool causal) {
  std::vector<at::Tensor> leaves{packed.detach().requires_grad_(true)};
  if (kv.defined()) leaves.push_back(kv.detach().requires_grad_(true));
  DropoutStream stream{.seed = 5};
  const at::Tensor lengths = at::tensor({70, 33, 1}, at::kLong).to(packed.device());
  const AttentionOptions options{.heads = 3, .causal = causal, .dropout = 0.2, .part = {}};
  const at::Tensor out = kv.defined() ? attention(leaves[0], leaves[1], lengths, options, stream)
                                      : self_attention(leaves[0], lengths, options, stream);
  out.backward(at::cos(out.detach().to(at::kFloat)).to(out.scalar_type()));
  std::vector<at::Tensor> results{out.detach()};
  for (const at::Tensor& each : leaves) results.push_back(each.grad());
  for (at::Tensor& result : results) result = result.cpu().to(at::kDouble);
  return results;
}

TEST_F(GpuKernelsTest, AttentionIsTheHosts) {
  for (const bool self : {true, false}) {
    torch::manual_seed(6);
    const at::Tensor packed =
        at::randn({3, self ? 70 : 40, (self ? 3 : 1) * 192}).to(at::kBFloat16);
    const at::Tensor kv = self ? at::Tensor() : at::randn({3, 70, 2 * 192}).to(at::kBFloat16);
    ASSERT_TRUE(cuda_launches_for(c10::DeviceType::CUDA)->has_attention())
        << "a card of compute capability below 8.0: others compute this there";
    const auto got = attention_of(packed.cuda(), self ? kv : kv.cuda(), self);
    const test::HostLaunches host;
    const auto expected = attention_of(packed, kv, self);
    ASSERT_EQ(got.size(), expected.size());
    // A card sums a product's terms in another order and has other exponentials, so that some
    // numbers are rounded to the neighbour: half of them would be this far off.
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_LE((got[i] - expected[i]).norm().item<double>(),
                0x1p-9 * expected[i].norm().item<double>())
          << i;
    }
  }
}

// Loss and gradients of one step, on the CPU.
std::vector<at::Tensor> step_on(at::Device device) {
  auto options = test::tiny_options();
  options.dropout = 0.2;
  Transformer model(options);
  model->initialise(3);
  model->to(device);
  model->set_dropout_stream({.seed = 3});
  const auto [loss, nll] =
      model->forward(test::make_test_batch(test::make_sentences(6, 1)).to(device));
  loss.backward();
  std::vector<at::Tensor> results{loss.detach().cpu(), nll.cpu()};
  for (const at::Tensor& parameter : model->parameters()) results.push_back(parameter.grad().cpu());
  return results;
}

TEST_F(GpuKernelsTest, AStepOfTheTranslatorIsTheCpus) {
  const auto got = step_on(at::kCUDA);
  const test::AtenKernels guard;
  const auto expected = step_on(at::kCPU);
  ASSERT_EQ(got.size(), expected.size());
  // float32's epsilon times a thousand terms: more than stand in a chain of sums from the loss to
  // the first layer of this model.
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_LE((got[i] - expected[i]).norm().item<double>(),
              1.2e-4 * expected[i].norm().item<double>() + 1e-7)
        << i;
  }
}

}  // namespace kernels_gpu_test
}  // namespace cohort::nmt
