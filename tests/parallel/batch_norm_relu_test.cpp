// SPDX-License-Identifier: Apache-2.0
// Beside separate operations in float64, whatever computes it.
#include "cohort/parallel/batch_norm_relu.h"

#include <ATen/Parallel.h>
#include <array>
#include <gtest/gtest.h>
#include <limits>
#include <string>
#include <torch/autograd.h>
#include <torch/types.h>
#include <vector>

#include "cohort/parallel/batch_norm_loops.h"
#include "cohort/parallel/sync_batch_norm.h"

#include "tests/support/ranks.h"

namespace cohort::parallel {
namespace batch_norm_relu_test {

using comm::ProcessGroup;
using torch::nn::BatchNorm2d;
using torch::nn::BatchNormOptions;

constexpr double kEps32 = 0x1p-24, kEps16 = 0x1p-8;  // Of one rounding.

struct Case {
  std::vector<int64_t> shape;
  at::ScalarType type = at::kFloat;
  bool adds = false;
};

struct Batch {
  at::Tensor x, residual, grad;  // In the case's type and channels last.
};

Batch make_batch(const Case& c) {
  const auto draw = [&c](double mean, double deviation) {
    return at::randn(c.shape, at::kDouble)
        .mul_(deviation)
        .add_(mean)
        .to(c.type)
        .contiguous(at::MemoryFormat::ChannelsLast);
  };
  torch::manual_seed(7);
  return {draw(3, 2), c.adds ? draw(0.5, 1) : at::Tensor(), draw(0.1, 1)};
}

BatchNorm2d make_norm(int64_t channels, at::ScalarType type = at::kFloat) {
  BatchNorm2d norm{BatchNormOptions(channels)};
  norm->to(type);
  const at::NoGradGuard no_grad;
  norm->weight.copy_(at::arange(channels, at::kDouble).sin().add_(1.5));
  norm->bias.copy_(at::arange(channels, at::kDouble).cos());
  return norm;
}

at::Tensor wide(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.detach().to(at::kDouble).contiguous() : tensor;
}

struct Result {
  at::Tensor out, grad_x, grad_residual;
};

Result run(BatchNorm2d& norm, const Batch& batch) {
  const at::Tensor x = batch.x.detach().requires_grad_();
  const at::Tensor residual =
      batch.residual.defined() ? batch.residual.detach().requires_grad_() : at::Tensor();
  const at::Tensor out = batch_norm_relu(norm, x, residual);
  out.backward(batch.grad);
  return {out.detach(), x.grad(), residual.defined() ? residual.grad() : at::Tensor()};
}

// |value - expected| <= bound, which is of expected's shape.
void expect_within(const at::Tensor& value, const at::Tensor& expected, const at::Tensor& bound) {
  ASSERT_EQ(value.sizes(), expected.sizes());
  EXPECT_TRUE(((wide(value) - expected).abs() <= bound).all().item<bool>())
      << (wide(value) - expected).abs().div(bound).max().item<double>() << " times the bound";
}

// `all`: what float64 takes, of which the result's rows begin at `first`.
void expect_equals(const Result& result, BatchNorm2d& norm, BatchNorm2d& reference,
                   const Batch& all, int64_t first = 0) {
  const auto mine = [&](const at::Tensor& tensor) {
    return tensor.narrow(0, first, result.out.size(0));
  };
  const double rounding = result.out.scalar_type() == at::kBFloat16 ? kEps16 : kEps32;
  const at::Tensor x = wide(all.x).requires_grad_();
  const at::Tensor normed = reference->forward(x);
  const at::Tensor sum = all.residual.defined() ? normed + wide(all.residual) : normed;
  // Each of some five operations rounds terms that are not above this.
  const at::Tensor terms = normed.detach().abs() + 10;
  const at::Tensor out = sum.detach().clamp_min(0);
  expect_within(result.out, mine(out), mine(out * rounding + terms * (5 * kEps32)));
  // What is that near 0 is compared with the result's own side of it.
  const at::Tensor masked = wide(all.grad) * (sum > 0);
  mine(masked).copy_(wide(mine(all.grad)) * wide(result.out).gt(0));
  normed.backward(masked);
  const at::Tensor bound = x.grad().abs() * rounding + masked.abs().max() * (30 * kEps32);
  expect_within(result.grad_x, mine(x.grad()), mine(bound));
  if (all.residual.defined()) {
    EXPECT_TRUE(wide(result.grad_residual).equal(mine(masked))) << "not rounded";
  }
  EXPECT_TRUE(wide(norm->running_mean).allclose(reference->running_mean, 1e-6, 1e-6));
  EXPECT_TRUE(wide(norm->running_var).allclose(reference->running_var, 1e-5, 1e-6));
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(),
            reference->num_batches_tracked.item<int64_t>());
}

// 64 terms are summed in float32.
void expect_parameter_gradients(const at::Tensor& weight, const at::Tensor& bias,
                                BatchNorm2d& reference, const Batch& all) {
  const double terms = wide(all.grad).abs().sum({0, 2, 3}).max().item<double>();
  const at::Tensor bound = at::full_like(reference->bias.grad(), 64 * kEps32 * terms * 4);
  expect_within(bias, reference->bias.grad(), bound);
  expect_within(weight, reference->weight.grad(), bound);
}

// All that this processor supports, one after the other.
class EachLoops {
 public:
  template <class Body>
  explicit EachLoops(const Body& body) {
    for (const BatchNormLoops* const* each = supported_batch_norm_loops(); *each; ++each) {
      use_batch_norm_loops(**each);
      body();
    }
  }
  ~EachLoops() { use_batch_norm_loops(**supported_batch_norm_loops()); }
  EachLoops(const EachLoops&) = delete;
  EachLoops& operator=(const EachLoops&) = delete;
};

class BatchNormReluTest : public testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(
    , BatchNormReluTest,
    testing::Values(Case{{4, 64, 7, 9}}, Case{{4, 64, 7, 9}, at::kFloat, true},
                    Case{{4, 64, 7, 9}, at::kBFloat16}, Case{{4, 64, 7, 9}, at::kBFloat16, true},
                    Case{{2, 3, 5, 5}, at::kBFloat16, true}, Case{{1, 2, 1, 2}},
                    Case{{3, 515, 1, 2}, at::kBFloat16, true}, Case{{2, 1030, 12, 11}},
                    Case{{64, 5, 16, 17}, at::kBFloat16, true}),
    [](const auto& each) {
      std::string name = each.param.type == at::kFloat ? "Float32" : "BFloat16";
      for (const int64_t size : each.param.shape) name += "x" + std::to_string(size);
      return name + (each.param.adds ? "Adds" : "");
    });

TEST_P(BatchNormReluTest, IsThatOfFloat64WithEachInstructionSet) {
  const Case& c = GetParam();
  const Batch batch = make_batch(c);
  const EachLoops each([&] {
    BatchNorm2d norm = make_norm(c.shape[1]), reference = make_norm(c.shape[1], at::kDouble);
    for (int step = 0; step < 2; ++step) {
      norm->zero_grad();
      reference->zero_grad();
      const Result result = run(norm, batch);
      EXPECT_TRUE(result.out.is_contiguous(at::MemoryFormat::ChannelsLast));
      expect_equals(result, norm, reference, batch);
      expect_parameter_gradients(norm->weight.grad(), norm->bias.grad(), reference, batch);
    }
  });
}

TEST_P(BatchNormReluTest, IsTheSameOnAnyNumberOfThreads) {
  const Case& c = GetParam();
  const Batch batch = make_batch(c);
  const int threads = at::get_num_threads();
  std::vector<Result> results;
  std::vector<at::Tensor> weights;
  for (const int count : {1, 3}) {
    at::set_num_threads(count);
    BatchNorm2d norm = make_norm(c.shape[1]);
    results.push_back(run(norm, batch));
    weights.push_back(norm->weight.grad());
  }
  at::set_num_threads(threads);
  EXPECT_TRUE(results[0].out.equal(results[1].out));
  EXPECT_TRUE(results[0].grad_x.equal(results[1].grad_x));
  EXPECT_TRUE(weights[0].equal(weights[1]));
}

// Squares of what lies far from 0 would cancel.
TEST(BatchNormReluStatisticsTest, AMeanFarFromZeroKeepsTheVariance) {
  torch::manual_seed(3);
  for (const bool has_edge : {false, true}) {
    at::Tensor x = at::randn({4, 6, 24, 24}).add_(1000);
    if (has_edge) x.narrow(0, 0, 1).narrow(2, 0, 3).zero_();
    x = x.contiguous(at::MemoryFormat::ChannelsLast);
    const EachLoops each([&] {
      BatchNorm2d norm{BatchNormOptions(6).momentum(1)};
      batch_norm_relu(norm, x);
      EXPECT_TRUE(wide(norm->running_var).allclose(wide(x).var({0, 2, 3}), 1e-5, 0));
      EXPECT_TRUE(wide(norm->running_mean).allclose(wide(x).mean({0, 2, 3}), 1e-6, 0));
    });
  }
}

struct RanksCase {
  std::array<int64_t, 3> rows;
  at::ScalarType type = at::kFloat;
  bool adds = false;
  bool all_fuse = true;  // Or rank 1's batch is not channels last.
};

// A rank with an empty batch never fuses.
TEST(SyncBatchNormReluTest, SpansRanksWhetherTheyFuseOrNot) {
  test::ranks(3, [](const ProcessGroup& group) {
    const auto rank = static_cast<size_t>(group.rank());
    for (const RanksCase& c :
         {RanksCase{{1, 2, 3}}, RanksCase{{1, 2, 3}, at::kFloat, true},
          RanksCase{{1, 2, 3}, at::kFloat, false, false},
          RanksCase{{1, 2, 3}, at::kFloat, true, false}, RanksCase{{0, 2, 4}, at::kFloat, true},
          RanksCase{{2, 2, 2}, at::kBFloat16, true}}) {
      const Batch all = make_batch({{6, 8, 3, 5}, c.type, c.adds});
      int64_t first = 0;
      for (size_t before = 0; before < rank; ++before) first += c.rows[before];
      const auto mine = [&](const at::Tensor& tensor) {
        return tensor.defined()
                   ? tensor.narrow(0, first, c.rows[rank])
                         .contiguous(c.all_fuse || rank != 1 ? at::MemoryFormat::ChannelsLast
                                                             : at::MemoryFormat::Contiguous)
                   : tensor;
      };
      BatchNorm2d norm = make_norm(8), reference = make_norm(8, at::kDouble);
      convert_sync_batchnorm(*norm, group);
      const Result result = run(norm, {mine(all.x), mine(all.residual), mine(all.grad)});
      expect_equals(result, norm, reference, all, first);
      at::Tensor weight = norm->weight.grad(), bias = norm->bias.grad();
      group.all_reduce(weight);
      group.all_reduce(bias);
      expect_parameter_gradients(weight, bias, reference, all);
    }
  });
}

TEST(BatchNormReluElsewhereTest, IsThatOfSeparateOperations) {
  const Batch batch = make_batch({{4, 6, 5, 5}, at::kFloat, true});
  const auto expect_same = [&](const BatchNormOptions& options, const at::Tensor& x,
                               const at::Tensor& residual, bool trains = true) {
    std::vector<at::Tensor> results, gradients;
    for (const bool is_separate : {false, true}) {
      BatchNorm2d norm{options};
      norm->to(x.scalar_type());
      norm->train(trains);
      const at::Tensor leaf = x.detach().requires_grad_();
      const at::Tensor out = is_separate ? (norm->forward(leaf) + residual).relu()
                                         : batch_norm_relu(norm, leaf, residual);
      out.backward(batch.grad.to(x.scalar_type()));
      results.push_back(out.detach());
      gradients.push_back(leaf.grad());
    }
    EXPECT_TRUE(results[0].equal(results[1]));
    EXPECT_TRUE(gradients[0].equal(gradients[1]));
  };
  const BatchNormOptions options(6);
  expect_same(options, batch.x, batch.residual, /*trains=*/false);
  expect_same(options, batch.x.contiguous(), batch.residual);
  expect_same(options, batch.x, batch.residual.contiguous());
  expect_same(options, batch.x, at::ones({1, 6, 1, 1}));
  expect_same(options, batch.x.to(at::kDouble), batch.residual.to(at::kDouble));
  expect_same(BatchNormOptions(6).momentum(std::nullopt), batch.x, batch.residual);
  expect_same(BatchNormOptions(6).affine(false), batch.x, batch.residual);
  expect_same(BatchNormOptions(6).track_running_stats(false), batch.x, batch.residual);
}

TEST(BatchNormReluElsewhereTest, RefusesWhatTheNormRefuses) {
  BatchNorm2d norm = make_norm(6);
  const auto rows = [](std::vector<int64_t> shape) {
    return at::ones(shape).contiguous(at::MemoryFormat::ChannelsLast);
  };
  EXPECT_THROW(batch_norm_relu(norm, rows({2, 5, 3, 3})), c10::Error) << "channels";
  EXPECT_THROW(batch_norm_relu(norm, rows({1, 6, 1, 1})), c10::Error) << "one value";
  EXPECT_THROW(batch_norm_relu(norm, at::ones({2, 6})), c10::Error) << "dimensions";
  norm->bias = at::zeros({1});
  EXPECT_THROW(batch_norm_relu(norm, rows({2, 6, 3, 3})), c10::Error) << "a bias of 1";
}

TEST(BatchNormReluGradientTest, HasNoSecondDerivative) {
  BatchNorm2d norm = make_norm(6);
  const Batch batch = make_batch({{4, 6, 5, 5}});
  const at::Tensor x = batch.x.requires_grad_();
  EXPECT_THROW(torch::autograd::grad({batch_norm_relu(norm, x).sum()}, {x}, {},
                                     /*retain_graph=*/true, /*create_graph=*/true),
               c10::ValueError);
}

TEST(BatchNormReluGradientTest, GoesToWhatWantsOneOnly) {
  const Batch batch = make_batch({{4, 6, 5, 5}, at::kFloat, true});
  BatchNorm2d norm = make_norm(6);
  norm->bias.set_requires_grad(false);
  const Result both = run(norm, batch);
  EXPECT_TRUE(norm->weight.grad().defined());
  EXPECT_FALSE(norm->bias.grad().defined());
  const auto gradient = [&](bool of_x) {
    const at::Tensor x = batch.x.detach().requires_grad_(of_x);
    const at::Tensor residual = batch.residual.detach().requires_grad_(!of_x);
    batch_norm_relu(norm, x, residual).backward(batch.grad);
    return of_x ? x.grad() : residual.grad();
  };
  EXPECT_TRUE(gradient(true).allclose(both.grad_x, 1e-5, 1e-6));
  EXPECT_TRUE(gradient(false).equal(both.grad_residual));
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(batch_norm_relu(norm, batch.x).requires_grad());
}

TEST(BatchNormReluGradientTest, OfATensorAddedToItsOwnNormIsTheSum) {
  BatchNorm2d norm = make_norm(6);
  Batch batch = make_batch({{4, 6, 5, 5}});
  const at::Tensor x = batch.x.detach().requires_grad_();
  batch_norm_relu(norm, x, x).backward(batch.grad);
  batch.residual = batch.x;
  const Result apart = run(norm, batch);
  EXPECT_TRUE(x.grad().allclose(apart.grad_x + apart.grad_residual, 1e-5, 1e-6));
}

// What forward has saved is what backward reads.
TEST(BatchNormReluGradientTest, RefusesAResultThatWasWrittenTo) {
  BatchNorm2d norm = make_norm(6);
  const at::Tensor out = batch_norm_relu(norm, make_batch({{4, 6, 5, 5}}).x);
  out.mul_(2);
  EXPECT_THROW(out.sum().backward(), c10::Error);
}

TEST(BatchNormReluGradientTest, KeepsANaN) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    BatchNorm2d norm = make_norm(6);
    Batch batch = make_batch({{4, 6, 5, 5}, type});
    batch.x[3][2][4][4] = std::numeric_limits<double>::quiet_NaN();
    const Result result = run(norm, batch);
    EXPECT_TRUE(result.out.select(1, 2).isnan().all().item<bool>());
    EXPECT_TRUE(result.grad_x.select(1, 2).isnan().all().item<bool>());
    EXPECT_TRUE(result.out.select(1, 1).isfinite().all().item<bool>());
  }
}

}  // namespace batch_norm_relu_test
}  // namespace cohort::parallel
