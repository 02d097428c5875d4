// SPDX-License-Identifier: Apache-2.0
// The kernels for CUDA with their arithmetic on the host, on a device whose memory the host may not
// touch: what they compute beside aten/'s, and what they ask of the device. tests/nmt/fused_test.cpp
// has their bounds.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>
#include <limits>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/nmt/fused.h"
#include "cohort/nmt/transformer.h"

#include "tests/device/second_device.h"
#include "tests/support/host_launches.h"
#include "tests/support/sentences.h"

namespace cohort::nmt {
namespace cuda_kernels_test {

// The launches for the second device.
struct Launches : test::HostLaunches {
  static std::ptrdiff_t offset() {
    const at::Tensor x = at::empty({1}, test::second_device());
    return static_cast<const char*>(test::host_alias(x).const_data_ptr()) -
           static_cast<const char*>(x.const_data_ptr());
  }
  Launches() : HostLaunches(test::second_device().type(), offset()) {}
};

const Dropping kDropping{.rule = {.key = 77, .threshold = 20000, .scale = 1.5F}, .part = {}};
const Dropping kPart{.rule = {.key = 78, .threshold = 30000, .scale = 2},
                     .part = {.size = 6, .whole = 15, .first = 5}};

using Results = std::vector<at::Tensor>;

// Of every operation that drops, in `type`, on the second device; those of softmax come last.
constexpr size_t kElementwise = 10;
Results all_that_drops(at::ScalarType type, const Dropping& dropping) {
  torch::manual_seed(4);
  const at::Tensor x = (3 * at::randn({2, 3, 5, 6})).to(type).to(test::second_device());
  const at::Tensor grad = at::randn({2, 3, 5, 6}).to(type).to(test::second_device());
  const SoftmaxMask mask{.key_lengths_B = at::tensor({6, 3}, at::kLong).to(test::second_device()),
                         .causal = false,
                         .scale = 0.5F};
  const Kernels& kernels = kernels_for(x);
  const auto [probs, dropped] = kernels.softmax(x, mask, dropping);
  const at::Tensor wide = grad.to(type == at::kBFloat16 ? at::kFloat : type);
  at::Tensor sum = kernels.add_dropout(wide, x, dropping);
  EXPECT_EQ(sum.scalar_type(), wide.scalar_type());
  Results results{kernels.dropout(x, dropping),
                  sum.to(type),
                  kernels.add_dropout(grad, x, dropping),
                  kernels.add_dropout_backward(wide, type, dropping),
                  kernels.relu_dropout(x, dropping),
                  kernels.relu_dropout_backward(x, grad, 1.5F),
                  kernels.gelu.forward(x, dropping),
                  kernels.gelu.backward(x, grad, dropping),
                  kernels.swish.forward(x, dropping),
                  kernels.swish.backward(x, grad, dropping),
                  probs,
                  kernels.softmax_backward(probs, grad, mask, dropping)};
  EXPECT_EQ(dropped.defined(), dropping.rule.threshold != 0);
  if (dropped.defined()) results.push_back(dropped);
  for (at::Tensor& result : results) {
    EXPECT_EQ(result.scalar_type(), type);
    EXPECT_EQ(result.device(), test::second_device());
    result = result.cpu();
  }
  return results;
}

TEST(CudaKernelsTest, WhatDropsHasTheBitsOfAtens) {
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (const Dropping& dropping : {Dropping(), kDropping, kPart}) {
      SCOPED_TRACE(std::string(c10::toString(type)) + " key " + std::to_string(dropping.rule.key));
      const Results expected = all_that_drops(type, dropping);
      const Launches launches;
      const Results got = all_that_drops(type, dropping);
      EXPECT_GT(launches.calls(), 5);
      ASSERT_EQ(got.size(), expected.size());
      for (size_t i = 0; i < kElementwise; ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
      // Sums of six probabilities in another order, and exponentials of another library, then the
      // stored type's rounding. A score's gradient, up to 2 * 4, is a difference, and aten/ also
      // rounds what its dropout leaves.
      const double unit = type == at::kBFloat16 ? 0x1p-8 : 0;
      for (size_t i = kElementwise; i < got.size(); ++i) {
        const at::Tensor exact = expected[i].to(at::kDouble);
        const at::Tensor error = (got[i].to(at::kDouble) - exact).abs();
        const at::Tensor bound = i == kElementwise + 1
                                     ? at::full_like(exact, 8 * (20 * 0x1p-24 + 2 * unit))
                                     : (20 * 0x1p-24 + 2 * unit) * exact.abs();
        EXPECT_TRUE((error <= bound).all().item<bool>()) << i << ": " << error.max();
        EXPECT_TRUE(at::equal(got[i] == 0, expected[i] == 0)) << i;
      }
    }
  }
}

// One row more than a block of threads has columns, one less, and a few.
TEST(CudaKernelsTest, CrossEntropyInFloat64IsAtens) {
  const auto losses_of = [](int64_t columns, bool with_gradient) {
    torch::manual_seed(5);
    const at::Tensor logits = (3 * at::randn({7, columns}, at::kDouble)).to(test::second_device());
    const at::Tensor labels = at::randint(columns, {7}, at::kLong).to(test::second_device());
    const at::Tensor sums = at::ones({2}, logits.options());
    kernels_for(logits).cross_entropy(logits, labels, 0.1, with_gradient, sums);
    return Results{sums.cpu(), logits.cpu()};
  };
  for (const int64_t columns : {1, 3, 255, 257, 1000}) {
    for (const bool with_gradient : {true, false}) {
      SCOPED_TRACE(columns);
      const Results expected = losses_of(columns, with_gradient);
      const Launches launches;
      const Results got = losses_of(columns, with_gradient);
      EXPECT_EQ(launches.calls(), 1);
      // Seven losses near 10, of sums of `columns` terms each; slopes are at most 1.
      const double eps = std::numeric_limits<double>::epsilon();
      EXPECT_LE((got[0] - expected[0]).abs().max().item<double>(), 70 * (columns + 10) * eps);
      EXPECT_LE((got[1] - expected[1]).abs().max().item<double>(),
                with_gradient ? (columns + 40) * eps : 0);
    }
  }
}

TEST(CudaKernelsTest, ALabelOutOfRangeMakesTheLossNoNumber) {
  for (const int64_t label : {int64_t{-1}, int64_t{5}, std::numeric_limits<int64_t>::min()}) {
    const at::Tensor logits = at::zeros({2, 5}, test::second_device());
    const at::Tensor labels = at::tensor({int64_t{1}, label}).to(test::second_device());
    const at::Tensor sums = at::zeros({2}, logits.options().dtype(at::kDouble));
    const Launches launches;
    kernels_for(logits).cross_entropy(logits, labels, 0.1, /*with_gradient=*/true, sums);
    EXPECT_TRUE(at::isnan(sums.cpu()).all().item<bool>()) << label;
  }
}

// 0x7fffffff is what a card's arithmetic makes.
TEST(CudaKernelsTest, EveryNaNIsOneInBFloat16) {
  for (const uint32_t bits : {0x7fffffffU, 0xffffffffU, 0x7f800001U, 0xff800001U, 0x7fc00000U}) {
    BFloat16Bits stored{};
    store(__builtin_bit_cast(float, bits), stored);
    EXPECT_GT(stored.bits & 0x7fff, 0x7f80) << std::hex << bits;
  }
}

TEST(CudaKernelsTest, LaunchesGoIntoTheDevicesStream) {
  const Launches launches;
  const at::Tensor x = at::ones({8}, test::second_device());
  kernels_for(x).dropout(x, kDropping);
  const auto* guard = c10::impl::getDeviceGuardImpl(x.device().type());
  EXPECT_EQ(launches.stream(), guard->getStream(x.device()).native_handle());
  EXPECT_NE(launches.stream(), nullptr);
}

TEST(CudaKernelsTest, ForwardAndBackwardNeitherWaitNorCopy) {
  const Launches launches;
  auto options = test::tiny_options();
  options.dropout = 0.2;
  Transformer model(options);
  model->to(test::second_device());
  const Batch batch = test::make_test_batch(test::make_sentences(6, 1)).to(test::second_device());
  std::get<0>(model->forward(batch)).backward();  // Positions move once.
  test::reset_device_counts();
  const int calls = launches.calls();
  std::get<0>(model->forward(batch)).backward();
  const test::DeviceCounts counts = test::device_counts();
  EXPECT_EQ(counts.synchronisations, 0);
  EXPECT_EQ(counts.host_to_device, 0);
  EXPECT_EQ(counts.device_to_host, 0);
  EXPECT_GT(launches.calls(), calls + 10) << "the model is computed by others";
}

TEST(CudaKernelsTest, AnErrorOfALaunchIsThrown) {
  static constexpr CudaLaunches kBad{.drop = [](const DropLaunch&, void*) { return "no room"; },
                                     .cross_entropy = {}};
  use_cuda_launches(&kBad, at::kCPU);
  DropoutStream stream;
  EXPECT_THROW(dropout(at::ones({4}), 0.5, stream), c10::Error);
  use_cuda_launches(nullptr, at::kCPU);
}

}  // namespace cuda_kernels_test
}  // namespace cohort::nmt
