// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "examples/ctr/linear_relu.h"
#include "examples/ctr/model.h"

namespace ctr {
namespace ctr_model_test {

// The definition, over all pairs of slots.
at::Tensor pairs_of(const at::Tensor& rows_BSD) {
  const auto weights_BS = rows_BSD.select(2, 0);
  const auto factors_BSF = rows_BSD.narrow(2, 1, rows_BSD.size(2) - 1);
  at::Tensor value_B = weights_BS.sum(1);
  for (int64_t one = 0; one < rows_BSD.size(1); ++one) {
    for (int64_t two = one + 1; two < rows_BSD.size(1); ++two) {
      value_B = value_B + (factors_BSF.select(1, one) * factors_BSF.select(1, two)).sum(1);
    }
  }
  return value_B;
}

// Values of about 1 summed over 26 * 25 / 2 pairs of 15 factors: 5,000 terms at 6e-8 each.
constexpr double kTolerance = 5000 * 6e-8;

TEST(FactorizeTest, EqualsTheSumOverPairsForwardAndBack) {
  torch::manual_seed(1);
  const at::Tensor numbers = torch::randn({7, kNumbersWidth});
  const at::Tensor rows = torch::randn({7, 26, 16}).requires_grad_();
  const auto [x, pairs] = factorize(numbers, rows);
  EXPECT_TRUE(at::equal(x, at::cat({numbers, rows.flatten(1)}, 1)));
  EXPECT_TRUE(at::allclose(pairs, pairs_of(rows), kTolerance, kTolerance * 26 * 15));
  const at::Tensor x_gradient = torch::randn_like(x);
  const at::Tensor pairs_gradient = torch::randn_like(pairs);
  ((x * x_gradient).sum() + (pairs * pairs_gradient).sum()).backward();
  const at::Tensor gradient = rows.grad().clone();
  rows.mutable_grad().reset();
  ((at::cat({numbers, rows.flatten(1)}, 1) * x_gradient).sum() +
   (pairs_of(rows) * pairs_gradient).sum())
      .backward();
  EXPECT_TRUE(at::allclose(gradient, rows.grad(), kTolerance, kTolerance * 26));
}

TEST(FactorizeTest, RefusesOtherShapesAndTypes) {
  const at::Tensor numbers = at::zeros({2, 16});
  EXPECT_THROW(factorize(numbers, at::zeros({3, 26, 16})), c10::ValueError);
  EXPECT_THROW(factorize(numbers, at::zeros({2, 26 * 16})), c10::ValueError);
  EXPECT_THROW(factorize(numbers, at::zeros({2, 26, 16}, at::kDouble)), c10::ValueError);
}

TEST(DeepFmTest, GivesALogitForEachExampleAndGradientsToAll) {
  torch::manual_seed(1);
  DeepFm model(DeepFmOptions{.slots = 3, .width = 4, .hidden = {8, 5}});
  const at::Tensor rows = torch::randn({6, 3, 4}).requires_grad_();
  const at::Tensor logits = model->forward(torch::randn({6, kNumbersWidth}), rows);
  EXPECT_EQ(logits.sizes(), (std::vector<int64_t>{6}));
  logits.sum().backward();
  for (const auto& parameter : model->named_parameters()) {
    EXPECT_GT(parameter.value().grad().abs().sum().item<double>(), 0) << parameter.key();
  }
  EXPECT_GT(rows.grad().abs().min().item<double>(), 0);
}

TEST(DeepFmTest, BFloat16IsOfTheProductsInTrainingAlone) {
  const auto make = [](at::ScalarType dtype) {
    torch::manual_seed(3);
    return DeepFm(
        DeepFmOptions{.slots = 3, .width = 4, .hidden = {64, 64}, .product_dtype = dtype});
  };
  DeepFm plain = make(at::kFloat), mixed = make(at::kBFloat16);
  torch::manual_seed(4);
  const at::Tensor numbers = torch::randn({50, kNumbersWidth}), rows = torch::randn({50, 3, 4}),
                   of_logits = torch::randn({50});
  const auto gradients = [&](DeepFm& model) {
    const at::Tensor leaf = rows.clone().requires_grad_();
    const at::Tensor logits = model->forward(numbers, leaf);
    logits.backward(of_logits);
    std::vector<at::Tensor> all = {logits.detach(), leaf.grad()};
    for (const at::Tensor& parameter : model->parameters()) all.push_back(parameter.grad());
    return all;
  };
  const auto expected = gradients(plain), found = gradients(mixed);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(found[i].scalar_type(), at::kFloat) << i;
    const double error = (found[i] - expected[i]).norm().item<double>();
    // Each rounding changes a value by at most 2^-9 of it, and the sign of a few near zero.
    EXPECT_LT(error, 0.1 * expected[i].norm().item<double>()) << i;
  }
  EXPECT_FALSE(at::equal(found[0], expected[0])) << "not computed in bfloat16";
  plain->eval();
  mixed->eval();
  EXPECT_TRUE(at::equal(mixed->forward(numbers, rows), plain->forward(numbers, rows)));
}

// Of small whole numbers and halves, whose sums are exact in any order.
TEST(LinearReluTest, EqualsLinearAndReluForwardAndBack) {
  torch::manual_seed(2);
  const auto draw = [](at::IntArrayRef sizes) { return at::randint(-3, 4, sizes, at::kFloat); };
  const at::Tensor x = draw({70, 432}), weight = draw({400, 432}), bias = draw({400}) + 0.5,
                   gradient = draw({70, 400});
  const auto results = [&](const auto& layer) {
    std::vector<at::Tensor> inputs;
    for (const at::Tensor& input : {x, weight, bias})
      inputs.push_back(input.clone().requires_grad_());
    std::vector<at::Tensor> all = {layer(inputs[0], inputs[1], inputs[2])};
    all[0].backward(gradient);
    for (const at::Tensor& input : inputs) all.push_back(input.grad());
    return all;
  };
  const auto found = results(linear_relu);
  const auto expected = results([](const auto& x_BI, const auto& weight_OI, const auto& bias_O) {
    return at::relu(at::linear(x_BI, weight_OI, bias_O));
  });
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
  EXPECT_GT(expected[0].gt(0).sum().item<int64_t>(), 1000) << "relu lets some through";
}

}  // namespace ctr_model_test
}  // namespace ctr
