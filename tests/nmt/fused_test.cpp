// The fused operations against their plain forms in ATen, in float64, with gradients.
#include "cohort/nmt/fused.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "cohort/nmt/kernels/kernels.h"

namespace cohort::nmt {
namespace {

at::Tensor leaf(at::IntArrayRef shape, at::ScalarType type = at::kDouble) {
  return at::randn(shape, at::TensorOptions().dtype(type)).requires_grad_(true);
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

TEST(FusedTest, MaskedSoftmaxAndItsGradientEqualTheMaskedSum) {
  torch::manual_seed(1);
  const at::Tensor lengths = at::tensor({5, 2, 7}, at::kLong);
  for (const bool causal : {false, true}) {
    const at::Tensor scores = leaf({3, 2, 7, 7});
    const at::Tensor plain = scores.detach().clone().requires_grad_(true);
    DropoutStream stream;
    const at::Tensor probs = masked_softmax(scores, lengths, causal, 0.5, 0, stream);
    at::Tensor hidden = at::arange(7).view({1, 1, 1, 7}) >= lengths.view({3, 1, 1, 1});
    if (causal) hidden = hidden | at::ones({7, 7}, at::kBool).triu(1);
    const at::Tensor expected = at::softmax((plain * 0.5).masked_fill(hidden, -INFINITY), -1);
    EXPECT_LE(difference(probs, expected), 1e-15);
    const at::Tensor weight = at::randn_like(probs);
    (probs * weight).sum().backward();
    (expected * weight).sum().backward();
    EXPECT_LE(difference(scores.grad(), plain.grad()), 1e-14);
  }
}

TEST(FusedTest, SmoothedCrossEntropyEqualsAtens) {
  torch::manual_seed(2);
  const int64_t vocabulary = 101;
  // 1,500 rows are two chunks, so that summing over chunks is covered.
  const at::Tensor hidden = leaf({1500, 12});
  const at::Tensor weight = leaf({vocabulary, 12});
  const at::Tensor labels = at::randint(vocabulary, {1500}, at::kLong);
  const LossSums sums = smoothed_cross_entropy(hidden, weight, labels, 0.1);
  (sums.loss * 0.25).backward();
  const at::Tensor plain_hidden = hidden.detach().clone().requires_grad_(true);
  const at::Tensor plain_weight = weight.detach().clone().requires_grad_(true);
  const at::Tensor logits = at::mm(plain_hidden, plain_weight.t());
  namespace F = torch::nn::functional;
  const auto options = F::CrossEntropyFuncOptions().reduction(torch::kSum);
  const at::Tensor expected =
      F::cross_entropy(logits, labels, F::CrossEntropyFuncOptions(options).label_smoothing(0.1));
  (expected * 0.25).backward();
  // Sums of 1,500 losses near 5: 1500 terms x eps x 5.
  EXPECT_LE(difference(sums.loss, expected), 2e-12 * 1500 * 5);
  EXPECT_LE(difference(sums.nll, F::cross_entropy(logits, labels, options)), 2e-12 * 1500 * 5);
  EXPECT_LE(difference(hidden.grad(), plain_hidden.grad()), 1e-13);
  EXPECT_LE(difference(weight.grad(), plain_weight.grad()), 1e-12);
}

TEST(FusedTest, SmoothedCrossEntropyInBfloat16StaysWithinItsRounding) {
  torch::manual_seed(3);
  const at::Tensor hidden = at::randn({64, 32});
  const at::Tensor weight = at::randn({500, 32}) * 0.2;
  const at::Tensor labels = at::randint(500, {64}, at::kLong);
  const double exact = smoothed_cross_entropy(hidden, weight, labels, 0.1).loss.item<double>();
  const double rounded =
      smoothed_cross_entropy(hidden.to(at::kBFloat16), weight, labels, 0.1).loss.item<double>();
  // Logits near 3 carry 8 bits: an error of 2^-8 x 3 each, of either sign, over 64 rows.
  EXPECT_NEAR(rounded, exact, 64 * 3.0 / 256);
}

TEST(FusedTest, DropoutKeepsItsShareAndItsScaleAndRepeats) {
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const at::Tensor x = at::ones({1000, 1000}, type);
    DropoutStream stream{.seed = 5, .call = 9};
    const at::Tensor once = dropout(x, 0.1, stream);
    const double kept = at::count_nonzero(once).item<double>() / 1e6;
    // Binomial with a million draws: five standard deviations are 5 x 0.0003.
    EXPECT_NEAR(kept, 0.9, 0.0015);
    EXPECT_NEAR(once.max().item<double>(), 1 / 0.9, 0.005);
    DropoutStream again{.seed = 5, .call = 9};
    EXPECT_TRUE(at::equal(dropout(x, 0.1, again), once));
    EXPECT_FALSE(at::equal(dropout(x, 0.1, again), once)) << "the next call draws anew";
    DropoutStream other{.seed = 6, .call = 9};
    EXPECT_FALSE(at::equal(dropout(x, 0.1, other), once));
  }
}

TEST(FusedTest, DropoutsGradientFallsWhereTheValueFell) {
  const at::Tensor x = leaf({50, 30});
  DropoutStream stream;
  const at::Tensor y = dropout(x, 0.3, stream);
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad() != 0, y != 0));
  const at::Tensor z = leaf({50, 30});
  const at::Tensor relu = relu_dropout(z, 0.3, stream);
  relu.sum().backward();
  EXPECT_TRUE(at::equal(z.grad() != 0, relu != 0));
  EXPECT_TRUE(at::equal((relu != 0) & (z <= 0), at::zeros_like(z).to(at::kBool)));
}

TEST(FusedTest, SoftmaxWithDropoutPassesGradientsThroughTheSameMask) {
  torch::manual_seed(4);
  const at::Tensor lengths = at::tensor({6, 4}, at::kLong);
  const at::Tensor scores = leaf({2, 1, 6, 6});
  DropoutStream stream{.seed = 3};
  const at::Tensor dropped = masked_softmax(scores, lengths, false, 1, 0.4, stream);
  DropoutStream none;
  const at::Tensor plain = scores.detach().clone().requires_grad_(true);
  const at::Tensor probs = masked_softmax(plain, lengths, false, 1, 0, none);
  const at::Tensor mask =
      at::where(dropped != 0, dropped.detach() / probs.detach(), at::zeros_like(probs));
  const at::Tensor weight = at::randn_like(dropped);
  (dropped * weight).sum().backward();
  (probs * mask * weight).sum().backward();
  EXPECT_LE(difference(scores.grad(), plain.grad()), 1e-7);  // the scale is a float
}

}  // namespace
}  // namespace cohort::nmt
