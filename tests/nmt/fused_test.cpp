// SPDX-License-Identifier: Apache-2.0
// The fused operations and their gradients against plain forms in ATen. In float64 they agree to
// its rounding; in float32 and bfloat16 they stay within what rounding allows, in every instruction
// set.
#include "cohort/nmt/fused.h"

#include <ATen/Parallel.h>
#include <cmath>
#include <gtest/gtest.h>
#include <optional>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/loss.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <vector>

#include "cohort/nmt/kernels/kernels.h"
#include "cohort/optim/gradient_memory.h"

#include "tests/support/aten_kernels.h"
#include "tests/support/host_launches.h"
#include "tests/support/message_of.h"

namespace cohort::nmt {
namespace fused_test {

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

// The operations again, in every table that this machine has and in the types that training
// computes in. Expected values are ATen's in float64, from the same rounded inputs. Bounds are of
// first order in u (half the distance of 1 to its neighbour): a value stored in type T is off by
// u_T of itself, each operation of the loops in float32 by kU, exponential() by 4 kU (its 1e-7 and
// some). Sums of n terms are off by n kU of the sum of magnitudes, in whatever order.
constexpr double kU = 0x1p-24;

double unit_of(at::ScalarType type) {
  return type == at::kDouble ? 0x1p-53 : type == at::kFloat ? kU : 0x1p-8;
}

template <class Body>
void in_both_types(const std::string& table, const Body& body) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    SCOPED_TRACE(table + " " + c10::toString(type));
    torch::manual_seed(6);
    body(type);
  }
}

template <class Body>
void in_all_loops(const Body& body) {
  for (const Loops* const* table = supported_loops(); *table != nullptr; ++table) {
    use_loops(**table);
    in_both_types((*table)->name, body);
  }
  use_loops(*supported_loops()[0]);
}
// The loops of every instruction set, then the operations of ATen that other devices run, then the
// kernels for CUDA with their arithmetic on the host.
template <class Body>
void in_every_table(const Body& body) {
  in_all_loops(body);
  {
    const test::AtenKernels aten;
    in_both_types("aten", body);
  }
  const test::HostLaunches cuda;
  in_both_types("cuda", body);
  EXPECT_GT(cuda.calls(), 0);
}

// `bound` has an element per element; higher orders take the last percent. A NaN is out of bounds.
void expect_within(const at::Tensor& values, const at::Tensor& expected, const at::Tensor& bound) {
  const at::Tensor error = (values.to(at::kDouble) - expected).abs();
  const at::Tensor within = error <= 1.01 * bound.detach();
  EXPECT_TRUE(within.all().item<bool>())
      << (~within).sum().item<int64_t>() << " of " << within.numel() << " elements, by "
      << error.max().item<double>();
}

at::Tensor exact_leaf(const at::Tensor& x) {
  return x.detach().to(at::kDouble).clone().requires_grad_(true);
}

// What the next call on `stream` multiplies elements by.
at::Tensor mask_of(at::IntArrayRef shape, double p, DropoutStream stream) {
  return dropout(at::ones(shape, at::kFloat), p, stream).to(at::kDouble);
}

void check_dropouts(int64_t size, at::ScalarType type) {
  SCOPED_TRACE(size);
  for (const bool relu : {false, true}) {
    const at::Tensor x = leaf({size}, type);
    const at::Tensor plain = exact_leaf(x);
    DropoutStream stream{.seed = 11, .call = 3};
    const at::Tensor mask = mask_of({size}, 0.3, stream);
    const at::Tensor expected = (relu ? at::relu(plain) : plain) * mask;
    const at::Tensor y = relu ? relu_dropout(x, 0.3, stream) : dropout(x, 0.3, stream);
    const double unit = unit_of(type) + kU;  // the product, then what is stored
    expect_within(y, expected, unit * expected.abs());
    const at::Tensor grad = at::randn({size}).to(type);
    y.backward(grad);
    expected.backward(grad.to(at::kDouble));
    expect_within(x.grad(), plain.grad(), unit * plain.grad().abs());
  }
}

double distance(const at::Tensor& values, const at::Tensor& expected) {
  return ((values.to(at::kDouble) - expected).norm() / expected.norm()).item<double>();
}

struct CudaAttentionCase {
  int64_t queries, keys;
  bool cross, causal;
  double p;
  std::vector<int64_t> lengths;
};

// Beside the same of matrices in float64.
void check_cuda_attention(const CudaAttentionCase& c, at::ScalarType type, int64_t heads,
                          int64_t width) {
  SCOPED_TRACE(c.queries);
  SCOPED_TRACE(c.keys);
  const auto batch = static_cast<int64_t>(c.lengths.size());
  const at::Tensor lengths = at::tensor(c.lengths, at::kLong);
  const at::Tensor packed = leaf({batch, c.queries, (c.cross ? 1 : 3) * heads * width}, type);
  const at::Tensor kv = c.cross ? leaf({batch, c.keys, 2 * heads * width}, type) : at::Tensor();
  DropoutStream stream{.seed = 7, .call = 2};
  const at::Tensor mask = mask_of({batch, heads, c.queries, c.keys}, c.p, stream);
  const AttentionOptions options{.heads = heads, .causal = c.causal, .dropout = c.p, .part = {}};
  const test::HostLaunches cuda;
  const at::Tensor out = c.cross ? attention(packed, kv, lengths, options, stream)
                                 : self_attention(packed, lengths, options, stream);
  EXPECT_EQ(cuda.calls(), 1) << "computed by others";
  const at::Tensor plain = exact_leaf(packed), plain_kv = c.cross ? exact_leaf(kv) : at::Tensor();
  const auto rows_of = [&](const at::Tensor& x, int64_t parts) {
    return x.view({batch, x.size(1), parts, heads, width}).permute({2, 0, 3, 1, 4}).unbind(0);
  };
  std::vector<at::Tensor> rows = rows_of(plain, c.cross ? 1 : 3);
  if (c.cross) {
    for (const at::Tensor& part : rows_of(plain_kv, 2)) rows.push_back(part);
  }
  const at::Tensor key = at::arange(c.keys);
  at::Tensor hidden = key >= lengths.view({-1, 1, 1, 1});
  if (c.causal) hidden = hidden.logical_or(key > at::arange(c.queries).view({-1, 1}));
  const at::Tensor scores =
      (at::matmul(rows[0], rows[1].transpose(2, 3)) / std::sqrt(static_cast<double>(width)))
          .masked_fill(hidden, -INFINITY);
  const at::Tensor expected =
      at::matmul(at::softmax(scores, -1) * mask, rows[2]).transpose(1, 2).flatten(2);
  // Weights, their slopes and `out` are rounded to bfloat16 before they are multiplied and summed, as
  // the result is; each is the same share of errors of independent signs. Sums are in float32.
  const double bound = 3 * unit_of(type);
  EXPECT_EQ(out.scalar_type(), type);
  EXPECT_LE(distance(out, expected), bound);
  const at::Tensor grad = at::randn(out.sizes()).to(type);
  out.backward(grad);
  expected.backward(grad.to(at::kDouble));
  EXPECT_LE(distance(packed.grad(), plain.grad()), bound);
  if (c.cross) {
    EXPECT_LE(distance(kv.grad(), plain_kv.grad()), bound);
  }
}

// Output and gradients of the attention on CUDA that `x` is queries, keys and values of.
std::vector<at::Tensor> cuda_attention_of(const at::Tensor& x, const at::Tensor& lengths,
                                          const at::Tensor& grad, const AttentionOptions& options) {
  const at::Tensor leaf = x.detach().requires_grad_(true);
  DropoutStream stream{.seed = 7};
  const test::HostLaunches cuda;
  const at::Tensor out = self_attention(leaf, lengths, options, stream);
  out.backward(grad);
  return {out.detach(), leaf.grad()};
}

// Wherever the operands lie, and whatever stands in rows that no query sees.
TEST(FusedTest, AttentionOfCudaIsThatOfItsOperandsAlone) {
  torch::manual_seed(9);
  const at::Tensor x = at::randn({2, 9, 3 * 128}).to(at::kBFloat16);
  const at::Tensor lengths = at::tensor({9, 4}, at::kLong);
  const at::Tensor grad = at::randn({2, 9, 128}).to(at::kBFloat16);
  const AttentionOptions options{.heads = 2, .causal = false, .dropout = 0.2, .part = {}};
  const auto expected = cuda_attention_of(x, lengths, grad, options);

  // At an odd address the products answer, within the rounding of what they store.
  const at::Tensor odd = at::empty({x.numel() + 1}, at::kBFloat16).narrow(0, 1, x.numel());
  odd.copy_(x.flatten());
  const auto unaligned = cuda_attention_of(odd.view(x.sizes()), lengths, grad, options);
  EXPECT_LE(distance(unaligned[0], expected[0].to(at::kDouble)), 4 * unit_of(at::kBFloat16));
  const at::Tensor odd_grad =
      at::empty({grad.numel() + 1}, at::kBFloat16).narrow(0, 1, grad.numel());
  odd_grad.copy_(grad.flatten());
  EXPECT_TRUE(at::equal(cuda_attention_of(x, lengths, odd_grad.view(grad.sizes()), options)[1],
                        expected[1]));

  // One sentence, and one row, whose strides say nothing.
  const at::Tensor one = x.narrow(0, 0, 1), of_one = lengths.narrow(0, 0, 1);
  const auto expected_one = cuda_attention_of(one, of_one, grad.narrow(0, 0, 1), options);
  const at::Tensor turned = one.transpose(0, 1).contiguous().transpose(0, 1);
  EXPECT_TRUE(at::equal(cuda_attention_of(turned, of_one, grad.narrow(0, 0, 1), options)[1],
                        expected_one[1]));

  at::Tensor poisoned = x.clone();
  poisoned.select(0, 1).narrow(0, 4, 5).narrow(1, 128, 256).fill_(std::nanf(""));
  const auto kept = cuda_attention_of(poisoned, lengths, grad, options);
  EXPECT_TRUE(at::equal(kept[0], expected[0]));
  EXPECT_TRUE(at::equal(kept[1], expected[1]));

  // What a gradient of one sentence brings reaches no other one.
  at::Tensor bad_grad = grad.clone();
  bad_grad.select(0, 0).select(0, 0).fill_(std::numeric_limits<float>::infinity());
  const auto apart = cuda_attention_of(x, lengths, bad_grad, options);
  EXPECT_TRUE(at::equal(apart[1][1], expected[1][1]));
}

TEST(FusedTest, AttentionOfCudaDropsThePartOfAShard) {
  torch::manual_seed(10);
  const at::Tensor x = at::randn({2, 5, 3 * 64}).to(at::kBFloat16);
  const at::Tensor lengths = at::tensor({5, 3}, at::kLong),
                   grad = at::ones({2, 5, 64}, at::kBFloat16);
  // The second of two heads, each with 25 weights of a sentence.
  const AttentionOptions options{
      .heads = 1, .causal = true, .dropout = 0.4, .part = {.size = 25, .whole = 50, .first = 25}};
  const auto got = cuda_attention_of(x, lengths, grad, options);
  DropoutStream stream{.seed = 7};
  const at::Tensor plain = x.detach().requires_grad_(true);
  const at::Tensor out = self_attention(plain, lengths, options, stream);
  out.backward(grad);
  EXPECT_LE(distance(got[0], out.detach().to(at::kDouble)), 4 * unit_of(at::kBFloat16));
  EXPECT_LE(distance(got[1], plain.grad().to(at::kDouble)), 4 * unit_of(at::kBFloat16));
}

TEST(FusedTest, AttentionOfCudaIsThatOfMatrices) {
  torch::manual_seed(8);
  for (const double p : {0.0, 0.3}) {
    for (const int64_t length : {1, 7, 16, 31, 32, 33, 70}) {
      check_cuda_attention({length, length, false, true, p, {length, (length + 1) / 2, 1}},
                           at::kBFloat16, 2, 64);
    }
    check_cuda_attention({32, 32, false, false, p, {32}}, at::kBFloat16, 2, 64);
    check_cuda_attention({1, 1, false, true, p, {1}}, at::kBFloat16, 1, 64);
    check_cuda_attention({40, 40, false, false, p, {40, 33}}, at::kBFloat16, 3, 64);
    check_cuda_attention({5, 67, true, false, p, {67, 1, 32}}, at::kBFloat16, 2, 64);
    check_cuda_attention({67, 5, true, false, p, {5, 2}}, at::kBFloat16, 1, 64);
  }
}

TEST(FusedTest, DropoutsInEveryTableEqualAtensWithTheSameMask) {
  in_every_table([](at::ScalarType type) {
    for (const int64_t size : {1, 7, 31, 511, 513, 1100}) check_dropouts(size, type);
  });
}

at::Tensor normal_share(const at::Tensor& x) {
  return 0.5 * at::erfc(-x / std::sqrt(2.0));
}
at::Tensor normal_density(const at::Tensor& x) {
  return at::exp(-0.5 * x * x) / std::sqrt(2 * M_PI);
}

void check_activations(int64_t size, at::ScalarType type) {
  SCOPED_TRACE(size);
  for (const bool gelu : {true, false}) {
    SCOPED_TRACE(gelu ? "gelu" : "swish");
    const at::Tensor x = (4 * at::randn({size})).to(type).requires_grad_(true);
    const at::Tensor plain = exact_leaf(x);
    DropoutStream stream{.seed = 11, .call = 3};
    const at::Tensor mask = mask_of({size}, 0.3, stream);
    const at::Tensor expected = (gelu ? at::gelu(plain) : at::silu(plain)) * mask;
    const at::Tensor y = gelu ? gelu_dropout(x, 0.3, stream) : swish_dropout(x, 0.3, stream);
    // Of the share of x that comes through: gelu's formula is off by 1e-7, its sums and products,
    // and the exponential of -x^2 / 2 (half an ulp of its argument) by some kU. The slope has x
    // times the density as well, and the products with mask and gradient.
    const at::Tensor bell = (2 + 0.5 * plain * plain) * normal_density(plain);
    const at::Tensor share = gelu ? (2 + 8 * normal_share(plain) + bell) * kU
                                  : (10 + plain.abs()) * kU * at::sigmoid(plain);
    const double unit = unit_of(type);
    expect_within(y, expected, mask * plain.abs() * share + (unit + kU) * expected.detach().abs());
    const at::Tensor grad = at::randn({size}).to(type);
    y.backward(grad);
    expected.backward(grad.to(at::kDouble));
    const at::Tensor slope_error =
        gelu ? share + plain.abs() * (8 + plain * plain) * kU * normal_density(plain)
             : share * (2 + 2 * plain.abs());
    expect_within(
        x.grad(), plain.grad(),
        mask * grad.to(at::kDouble).abs() * slope_error + (unit + 2 * kU) * plain.grad().abs());
  }
}

TEST(FusedTest, ActivationsInEveryTableEqualAtensWithTheSameMask) {
  in_every_table([](at::ScalarType type) {
    for (const int64_t size : {1, 7, 31, 511, 513, 1100}) check_activations(size, type);
  });
}

TEST(FusedTest, ActivationsInFloat64EqualAtens) {
  torch::manual_seed(7);
  DropoutStream stream;
  for (const bool gelu : {true, false}) {
    const at::Tensor x = leaf({1100}), plain = exact_leaf(x);
    const at::Tensor y = gelu ? gelu_dropout(x, 0, stream) : swish_dropout(x, 0, stream);
    const at::Tensor expected = gelu ? at::gelu(plain) : at::silu(plain);
    EXPECT_LE(difference(y, expected), 1e-15);
    y.sum().backward();
    expected.sum().backward();
    EXPECT_LE(difference(x.grad(), plain.grad()), 1e-15);
  }
}

TEST(FusedTest, ActivationsOfExtremesAreAtens) {
  in_every_table([](at::ScalarType type) {
    const at::Tensor x = at::tensor({-3e4, -90.0, -20.0, 0.0, 20.0, 90.0, 3e4, NAN}).to(type);
    DropoutStream stream;
    for (const auto& [ours, atens] : {std::pair{gelu_dropout(x, 0, stream), at::gelu(x)},
                                      {swish_dropout(x, 0, stream), at::silu(x)},
                                      {relu_dropout(x, 0, stream), at::relu(x)}}) {
      EXPECT_TRUE(at::allclose(ours, atens, 1e-6, 1e-7, /*equal_nan=*/true)) << ours << atens;
    }
  });
}

TEST(FusedTest, TheSameElementsFallInEveryTableAndType) {
  const at::Tensor mask = mask_of({1100}, 0.3, {.seed = 11});
  in_every_table([&](at::ScalarType type) {
    EXPECT_TRUE(at::equal(mask_of({1100}, 0.3, {.seed = 11}), mask));
    DropoutStream stream{.seed = 11};
    EXPECT_TRUE(at::equal(dropout(at::ones({1100}, type), 0.3, stream) != 0, mask != 0));
  });
}

struct SoftmaxCase {
  std::vector<int64_t> lengths;
  int64_t queries, keys;
  bool causal;
  double p;
};

void check_softmax(const SoftmaxCase& c, at::ScalarType type) {
  SCOPED_TRACE("keys " + std::to_string(c.keys) + " causal " + std::to_string(c.causal) +
               " first length " + std::to_string(c.lengths[0]) + " p " + std::to_string(c.p));
  const double scale = 0.3;
  const double unit = unit_of(type);
  const auto batch = static_cast<int64_t>(c.lengths.size());
  const at::Tensor lengths = at::tensor(c.lengths, at::kLong);
  at::Tensor hidden = at::arange(c.keys).view({1, 1, 1, -1}) >= lengths.view({-1, 1, 1, 1});
  if (c.causal) hidden = hidden | at::ones({c.queries, c.keys}, at::kBool).triu(1);
  hidden = hidden.expand({batch, 2, c.queries, c.keys});
  // What no query may see is no number: it must not be touched.
  const at::Tensor scores = (4 * at::randn(hidden.sizes())).to(type).masked_fill(hidden, NAN);
  scores.requires_grad_(true);
  const at::Tensor plain = exact_leaf(scores);
  DropoutStream stream{.seed = 5};
  const at::Tensor mask = mask_of(hidden.sizes(), c.p, stream);
  const at::Tensor scaled = (plain * scale).masked_fill(hidden, -INFINITY);
  const at::Tensor probs = at::softmax(scaled, -1);
  const at::Tensor expected = probs * mask;
  const at::Tensor y = masked_softmax(scores, lengths, c.causal, scale, c.p, stream);

  // exp(-a) is off by 3 kU a from its argument (a difference, a product, the factor itself) and by
  // its own error, the sum by its worst term's and K; then a reciprocal and a product.
  const auto keys = static_cast<double>(c.keys);
  const at::Tensor a = (scaled.amax(-1, true) - scaled).masked_fill(hidden, 0);
  const at::Tensor prob_error = (3 * a + 3 * a.amax(-1, true) + 8 + keys + 2) * kU + unit;
  const double drop_error = c.p > 0 ? kU + unit : 0;
  expect_within(y, expected, expected * (prob_error + drop_error));

  const at::Tensor grad = at::randn(hidden.sizes()).to(type);
  y.backward(grad);
  expected.backward(grad.to(at::kDouble));
  // p (g - sum p g) scale, with p as stored, g dropped and stored again, K + 1 roundings in the sum
  // and four in the rest.
  const at::Tensor g = (grad.to(at::kDouble) * mask).abs();
  const at::Tensor dot = (probs * g).sum(-1, true);
  const at::Tensor error =
      prob_error + prob_error.amax(-1, true) + drop_error + (keys + 5) * kU + unit;
  expect_within(scores.grad(), plain.grad(), scale * probs * (g + dot) * error);
}

TEST(FusedTest, MaskedSoftmaxInEveryTableEqualsAtens) {
  in_every_table([](at::ScalarType type) {
    for (const int64_t keys : {1, 3, 15, 16, 17, 33, 67}) {
      for (const auto& lengths : {std::vector<int64_t>{keys, keys, keys},
                                  std::vector<int64_t>{1, keys, (keys + 1) / 2}}) {
        for (const double p : {0.0, 0.3}) {
          check_softmax({lengths, keys, keys, /*causal=*/true, p}, type);
          check_softmax({lengths, 5, keys, /*causal=*/false, p}, type);
        }
      }
    }
  });
}

// Attention by heads, and its operands as projections leave them.
struct AttentionCase {
  std::vector<int64_t> lengths;
  int64_t queries, keys;
  bool causal;  // and the queries, keys and values of the same rows
  double p;
  int64_t heads = 2, width = 64;

  int64_t batch() const { return static_cast<int64_t>(lengths.size()); }
  at::Tensor lengths_B() const { return at::tensor(lengths, at::kLong); }
  at::Tensor hidden() const {  // [B, 1, Q, K]
    const at::Tensor behind =
        at::arange(keys).view({1, 1, 1, -1}) >= lengths_B().view({-1, 1, 1, 1});
    return (causal ? behind | at::ones({queries, keys}, at::kBool).triu(1) : behind)
        .expand({batch(), 1, queries, keys});
  }
  std::vector<at::Tensor> operands(at::ScalarType type) const {
    const auto rows = [&](int64_t count, int64_t parts) {
      return (0.5 * at::randn({batch(), count, parts * heads * width})).to(type);
    };
    if (causal) return {rows(queries, 3)};
    return {rows(queries, 1), rows(keys, 2)};
  }
  at::Tensor operator()(const std::vector<at::Tensor>& x, DropoutStream& stream) const {
    const int64_t size = heads * queries * keys;
    const AttentionOptions options{
        .heads = heads, .causal = causal, .dropout = p, .part = {.size = size, .whole = size}};
    return causal ? self_attention(x[0], lengths_B(), options, stream)
                  : attention(x[0], x[1], lengths_B(), options, stream);
  }
  // [B, T, n D] -> n of [B, H, T, D / H].
  std::vector<at::Tensor> split(const std::vector<at::Tensor>& x) const {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& rows : x) {
      for (const at::Tensor& part :
           rows.unflatten(2, {-1, heads, width}).permute({2, 0, 3, 1, 4}).unbind(0))
        parts.push_back(part);
    }
    return parts;
  }
};

std::vector<at::Tensor> leaves(std::vector<at::Tensor> x) {
  for (at::Tensor& operand : x) operand.requires_grad_(true);
  return x;
}

void check_attention(const AttentionCase& c, at::ScalarType type) {
  SCOPED_TRACE(c10::str(c10::toString(type), " queries ", c.queries, " keys ", c.keys, " causal ",
                        c.causal, " first length ", c.lengths[0], " p ", c.p, " width ", c.width));
  const std::vector<at::Tensor> x = leaves(c.operands(type));
  std::vector<at::Tensor> plain;
  for (const at::Tensor& operand : x) plain.push_back(exact_leaf(operand));
  DropoutStream stream{.seed = 5};
  const at::Tensor mask = mask_of({c.batch(), c.heads, c.queries, c.keys}, c.p, stream);
  const at::Tensor y = c(x, stream);
  EXPECT_EQ(stream.call, c.p > 0 ? 1U : 0U);
  const at::Tensor grad = at::randn(y.sizes()).to(type);
  y.backward(grad);

  const auto parts = c.split(plain);
  const at::Tensor &q = parts[0], &k = parts[1], &v = parts[2];
  const double scale = 1 / std::sqrt(static_cast<double>(c.width));
  const at::Tensor hidden = c.hidden();
  const at::Tensor scores =
      (at::matmul(q, k.transpose(2, 3)) * scale).masked_fill(hidden, -INFINITY);
  const at::Tensor probs = at::softmax(scores, -1);
  const auto joined = [&](const at::Tensor& heads) {
    return heads.transpose(1, 2).reshape({c.batch(), -1, c.heads * c.width});
  };
  const at::Tensor expected = joined(at::matmul(probs * mask, v));
  expected.backward(grad.to(at::kDouble));

  // u: of sums. unit: of what a product takes or an operation stores, which all but the loops do with scores, too. The scale is a float.
  const at::NoGradGuard no_grad;
  const double unit = unit_of(type), u = type == at::kDouble ? unit : kU;
  const auto keys = static_cast<double>(c.keys), queries = static_cast<double>(c.queries);
  const auto width = static_cast<double>(c.width);
  const at::Tensor score_error =
      (scale * ((width + 2) * u + unit + kU) * at::matmul(q.abs(), k.abs().transpose(2, 3)))
          .masked_fill(hidden, 0);
  const at::Tensor a = (scores.amax(-1, true) - scores).masked_fill(hidden, 0);
  // As of masked_softmax, and the errors of its own score and of the sum's; stored, dropped and stored.
  const at::Tensor of_weight = score_error + score_error.amax(-1, true) +
                               (3 * a + 3 * a.amax(-1, true) + 12 + keys) * u + 2 * unit;
  const at::Tensor weights = probs * mask;
  expect_within(
      y, expected,
      joined(at::matmul(weights * (of_weight + keys * u), v.abs())) + unit * expected.abs());

  const at::Tensor g = grad.to(at::kDouble).unflatten(2, {c.heads, c.width}).transpose(1, 2);
  // Gradients of the weights, at most; with their mean they are those of the scores, with what that loses.
  const at::Tensor of_weights = mask * at::matmul(g.abs(), v.abs().transpose(2, 3));
  const at::Tensor slopes = scale * probs * (of_weights + (probs * of_weights).sum(-1, true));
  const at::Tensor of_slope =
      of_weight + of_weight.amax(-1, true) + (width + keys + 12) * u + 3 * unit;
  const at::Tensor bounds[] = {
      at::matmul(slopes * (of_slope + keys * u), k.abs()),
      at::matmul((slopes * (of_slope + queries * u)).transpose(2, 3), q.abs()),
      at::matmul((weights * (of_weight + (queries + 1) * u)).transpose(2, 3), g.abs())};
  std::vector<at::Tensor> found, wanted;
  for (const at::Tensor& operand : x) found.push_back(operand.grad());
  for (const at::Tensor& operand : plain) wanted.push_back(operand.grad());
  found = c.split(found);
  wanted = c.split(wanted);
  for (size_t i = 0; i < 3; ++i) {
    SCOPED_TRACE(c10::str("gradient of ", i == 0 ? "queries" : i == 1 ? "keys" : "values"));
    expect_within(found[i], wanted[i], bounds[i] + unit * wanted[i].abs());
  }
}

// More keys and queries than a block and a chunk of the loops; widths that fill no register and no pair of bfloat16.
TEST(FusedTest, AttentionInEveryTableEqualsProductsAndSoftmax) {
  in_every_table([](at::ScalarType type) {
    const auto check = [&](const AttentionCase& c) {
      check_attention(c, type);
      if (type == at::kFloat) check_attention(c, at::kDouble);
    };
    for (const int64_t keys : {1, 2, 7, 16, 26, 33, 130}) {
      for (const double p : {0.0, 0.3}) {
        const std::vector<int64_t> lengths{keys, 1, (keys + 1) / 2};
        check({lengths, keys, keys, /*causal=*/true, p});
        check({lengths, 13, keys, /*causal=*/false, p});
      }
    }
    for (const int64_t width : {1, 5, 12, 20}) {
      check({{9, 4}, 9, 9, /*causal=*/true, 0.3, 3, width});
      check({{3, 9}, 1, 9, /*causal=*/false, 0.3, 3, width});
    }
    check({{40, 17}, 227, 40, /*causal=*/false, 0.3, 1, 8});
    check({{227}, 227, 227, /*causal=*/true, 0.3, 1, 8});
  });
}

TEST(FusedTest, AttentionTouchesNoRowBehindALength) {
  for (const Loops* const* table = supported_loops(); *table != nullptr; ++table) {
    use_loops(**table);
    for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
      const AttentionCase c{{3, 9, 8}, 7, 9, /*causal=*/false, 0.3};
      const at::Tensor behind = c.hidden().select(1, 0).select(1, 0).unsqueeze(2);  // [B, K, 1]
      const std::vector<at::Tensor> operands = c.operands(type);
      const auto run = [&](double value) {
        const auto x = leaves({operands[0].clone(), operands[1].masked_fill(behind, value)});
        DropoutStream stream;
        const at::Tensor y = c(x, stream);
        y.backward(at::ones_like(y));
        return std::tuple{y.detach(), x[0].grad(), x[1].grad()};
      };
      const auto [y, of_queries, of_keys] = run(NAN);
      const auto [zero_y, zero_of_queries, zero_of_keys] = run(0);
      EXPECT_TRUE(at::equal(y, zero_y));
      EXPECT_TRUE(at::equal(of_queries, zero_of_queries));
      EXPECT_TRUE(at::equal(of_keys, zero_of_keys));
      EXPECT_TRUE((of_keys == 0).logical_or(behind.logical_not()).all().item<bool>());
    }
  }
  use_loops(*supported_loops()[0]);
}

// A second backward computes the same again, and so do several threads.
TEST(FusedTest, AttentionsGradientsAreTheSameBitsAgain) {
  torch::manual_seed(7);
  const int threads = at::get_num_threads();
  const AttentionCase c{std::vector<int64_t>(40, 40), 40, 40, /*causal=*/true, 0.3};
  const std::vector<at::Tensor> x = leaves(c.operands(at::kBFloat16));
  DropoutStream stream;
  const at::Tensor y = c(x, stream);
  const at::Tensor grad = at::randn_like(y);
  y.backward(grad, /*retain_graph=*/true);
  const at::Tensor once = x[0].grad().clone();
  x[0].mutable_grad() = at::Tensor();
  at::set_num_threads(3);
  y.backward(grad);
  EXPECT_TRUE(at::equal(x[0].grad(), once));
  DropoutStream again;
  EXPECT_TRUE(at::equal(c(x, again), y));
  at::set_num_threads(threads);
}

TEST(FusedTest, AttentionOfNoSentencesAndOfNoQueriesIsEmpty) {
  const AttentionCase none{{}, 3, 4, /*causal=*/false, 0};
  const AttentionCase no_queries{{4, 2}, 0, 4, /*causal=*/false, 0.3};
  for (const AttentionCase& c : {none, no_queries}) {
    const std::vector<at::Tensor> x = leaves(c.operands(at::kFloat));
    DropoutStream stream;
    const at::Tensor y = c(x, stream);
    EXPECT_EQ(y.sizes(), x[0].sizes());
    y.sum().backward();
    EXPECT_EQ(x[0].grad().sizes(), x[0].sizes());
    EXPECT_TRUE(at::equal(x[1].grad(), at::zeros_like(x[1])));
  }
}

// A dimension of one element may have any stride.
TEST(FusedTest, AttentionTakesSentencesOfOneTokenWhereverTheyLie) {
  in_all_loops([](at::ScalarType type) {
    const at::Tensor lengths = at::ones({5}, at::kLong);
    const at::Tensor x = at::randn({5, 1, 3 * 32}).to(type), grad = at::randn({5, 1, 32}).to(type);
    const auto run = [&](const at::Tensor& rows) {
      const at::Tensor leaf = rows.detach().requires_grad_(true);
      DropoutStream stream;
      const at::Tensor y = self_attention(leaf, lengths, {.heads = 2, .dropout = 0.3}, stream);
      y.backward(grad);
      return std::pair{y.detach(), leaf.grad()};
    };
    const at::Tensor strided = x.as_strided(x.sizes(), {3 * 32, 7, 1});
    ASSERT_TRUE(strided.is_contiguous());
    const auto expected = run(x), got = run(strided);
    EXPECT_TRUE(at::equal(got.first, expected.first));
    EXPECT_TRUE(at::equal(got.second, expected.second));
  });
}

SentenceRows packed_sentences(const std::vector<int64_t>& lengths) {
  SentenceRows rows{.lengths_B = at::tensor(lengths, at::kLong), .longest = 1};
  for (const int64_t length : lengths) rows.longest = std::max(rows.longest, length);
  std::vector<int64_t> elements;
  for (size_t b = 0; b < lengths.size(); ++b)
    for (int64_t t = 0; t < lengths[b]; ++t)
      elements.push_back(static_cast<int64_t>(b) * rows.longest + t);
  rows.elements_N = at::tensor(elements, at::kLong);
  return rows;
}

// Rows [B, T, E] without their padding.
at::Tensor packed_rows(const at::Tensor& padded, const SentenceRows& rows) {
  return padded.flatten(0, 1).index_select(0, rows.elements_N);
}

// Attention of targets to sources, or, without these, to themselves.
struct PackedCase {
  std::vector<int64_t> targets, sources;
  bool causal;
  double p;
  int64_t heads = 2, width = 64;
};

// A packed row has the bits of the same padded one, whatever stood in the padding.
void check_packed_attention(const PackedCase& c, at::ScalarType type) {
  SCOPED_TRACE(c10::str(c10::toString(type), " first target ", c.targets[0], " to itself ",
                        c.sources.empty(), " causal ", c.causal, " p ", c.p, " width ", c.width));
  const bool self = c.sources.empty();
  const SentenceRows targets = packed_sentences(c.targets), sources = packed_sentences(c.sources);
  const auto batch = static_cast<int64_t>(c.targets.size());
  const int64_t width = c.heads * c.width;
  const at::Tensor x = at::randn({batch, targets.longest, (self ? 3 : 1) * width}).to(type);
  const at::Tensor kv = at::randn({batch, sources.longest, 2 * width}).to(type);
  // Padding gets no gradient.
  at::Tensor grad = at::zeros({batch * targets.longest, width}).to(type);
  grad.index_copy_(0, targets.elements_N, at::randn({targets.elements_N.size(0), width}).to(type));
  grad = grad.view({batch, targets.longest, width});
  const auto run = [&](bool packed) {
    const auto operand = [&](const at::Tensor& padded, const SentenceRows& rows) {
      return (packed ? packed_rows(padded, rows) : padded.clone()).requires_grad_(true);
    };
    const auto as_given = [&](SentenceRows rows) {
      if (!packed) rows.elements_N = at::Tensor();
      return rows;
    };
    const AttentionOptions options{
        .heads = c.heads, .causal = c.causal, .dropout = c.p, .part = {}};
    DropoutStream stream{.seed = 5};
    const at::Tensor of_x = operand(x, targets);
    const at::Tensor of_kv = self ? at::Tensor() : operand(kv, sources);
    const at::Tensor y =
        self ? self_attention(of_x, as_given(targets), options, stream)
             : attention(of_x, as_given(targets), of_kv, as_given(sources), options, stream);
    y.backward(packed ? packed_rows(grad, targets) : grad);
    return std::vector{y.detach(), of_x.grad(), self ? at::Tensor() : of_kv.grad()};
  };
  const auto padded = run(false), packed = run(true);
  for (size_t i = 0; i < (self ? 2 : 3); ++i) {
    SCOPED_TRACE(i);
    EXPECT_TRUE(at::equal(packed[i], packed_rows(padded[i], i < 2 ? targets : sources)));
  }
}

// With lengths beyond a block and a chunk of the loops.
TEST(FusedTest, AttentionOfPackedRowsIsThatOfPaddedOnes) {
  in_all_loops([](at::ScalarType type) {
    const auto check = [&](const PackedCase& c) {
      check_packed_attention(c, type);
      if (type == at::kFloat) check_packed_attention(c, at::kDouble);
    };
    for (const double p : {0.0, 0.3}) {
      for (const auto& lengths :
           std::vector<std::vector<int64_t>>{{7, 1, 16}, {4, 4, 4}, {1, 1}, {13}, {3, 130}}) {
        check({lengths, {}, /*causal=*/true, p});
        check({lengths, {}, /*causal=*/false, p});
      }
      check({{7, 1, 16}, {2, 40, 9}, /*causal=*/false, p});
      check({{1, 3}, {1, 1}, /*causal=*/false, p, 3, 5});
      check({{2, 3}, {3, 1}, /*causal=*/false, p, 3, 1});
    }
  });
}

// The first row of a sentence, and the last, are nobody else's.
TEST(FusedTest, PackedSentencesReachNoOther) {
  in_all_loops([](at::ScalarType type) {
    const SentenceRows rows = packed_sentences({3, 20, 5});
    const at::Tensor x = at::randn({28, 3 * 128}).to(type), grad = at::randn({28, 128}).to(type);
    const auto run = [&](double value) {
      const auto of_second = [&](const at::Tensor& given) {
        at::Tensor changed = given.clone();
        changed.narrow(0, 3, 20).fill_(value);
        return changed;
      };
      const at::Tensor leaf = of_second(x).requires_grad_(true);
      DropoutStream stream;
      const at::Tensor y = self_attention(leaf, rows, {.heads = 2, .dropout = 0.3}, stream);
      y.backward(of_second(grad));
      return std::vector{y.detach(), leaf.grad()};
    };
    const auto poisoned = run(NAN), clean = run(1);
    for (size_t i = 0; i < clean.size(); ++i) {
      EXPECT_TRUE(at::equal(poisoned[i].narrow(0, 0, 3), clean[i].narrow(0, 0, 3)));
      EXPECT_TRUE(at::equal(poisoned[i].narrow(0, 23, 5), clean[i].narrow(0, 23, 5)));
      EXPECT_TRUE(at::isnan(poisoned[i].narrow(0, 3, 20)).any(1).all().item<bool>());
    }
  });
}

struct DropCase {
  at::ScalarType type;
  at::Tensor x, wide, grad;
  DropoutPart part{};
};

constexpr int64_t kDropWidth = 515;

// What each operation with dropout makes of a case, and the gradients of x.
std::vector<at::Tensor> dropped_in_every_way(const DropCase& c) {
  const auto& [type, given, wide, grad, part] = c;
  const NormParameters norm{.weight_D = at::linspace(-1, 2, kDropWidth),
                            .bias_D = at::linspace(2, 1, kDropWidth),
                            .type = type};
  const at::Tensor unit = at::eye(kDropWidth).to(type), none = at::zeros({kDropWidth});
  std::vector<at::Tensor> results;
  for (int operation = 0; operation < 7; ++operation) {
    const at::Tensor x = given.clone().requires_grad_(true);
    DropoutStream stream{.seed = 7};
    const at::Tensor y = [&] {
      switch (operation) {
        case 0:
          return dropout(x, 0.3, stream, part);
        case 1:
          return add_dropout(wide, x, 0.3, stream, part);
        case 2:
          return add_dropout_norm(wide, x, norm, 0.3, stream, part).normed;
        case 3:
          return relu_dropout(x, 0.3, stream, part);
        case 4:
          return gelu_dropout(x, 0.3, stream, part);
        case 5:
          return swish_dropout(x, 0.3, stream, part);
        default:
          return linear_relu_dropout(x, unit, none, {.type = type, .dropout = 0.3, .part = part},
                                     stream);
      }
    }();
    y.backward(grad.to(y.scalar_type()));
    results.insert(results.end(), {y.detach(), x.grad()});
  }
  return results;
}

TEST(FusedTest, SomeRowsDropWhatTheyDropAmongAll) {
  const auto check = [](at::ScalarType type) {
    const at::Tensor rows = at::tensor({5, 0, 3}, at::kLong);
    const DropCase all{type, at::randn({6, kDropWidth}).to(type), at::randn({6, kDropWidth}),
                       at::randn({6, kDropWidth})};
    const auto some = [&](const at::Tensor& x) { return x.index_select(0, rows); };
    const auto of_all = dropped_in_every_way(all);
    const auto of_some = dropped_in_every_way(
        {type, some(all.x), some(all.wide), some(all.grad),
         DropoutPart{.size = kDropWidth, .whole = kDropWidth, .rows_N = rows}});
    for (size_t i = 0; i < of_all.size(); ++i)
      EXPECT_TRUE(at::equal(of_some[i], some(of_all[i]))) << c10::toString(type) << " result " << i;
  };
  in_all_loops(check);
  const test::AtenKernels aten;
  check(at::kFloat);
}

TEST(FusedTest, RowsOfAPartAreChecked) {
  const at::Tensor x = at::ones({2, 3});
  DropoutStream stream;
  const auto message = [&](const at::Tensor& rows) {
    return test::message_of<c10::ValueError>(
        [&] { dropout(x, 0.5, stream, {.size = 3, .whole = 3, .rows_N = rows}); });
  };
  EXPECT_EQ(message(at::zeros({3}, at::kLong)),
            "dropout: expected 2 int64 rows, got CPULongType [3]");
  EXPECT_EQ(message(at::zeros({2})), "dropout: expected 2 int64 rows, got CPUFloatType [2]");
}

TEST(FusedTest, PackedRowsAreRefusedWhereAttentionTakesNone) {
  EXPECT_TRUE(takes_packed_rows(at::empty({0})));
  const test::AtenKernels aten;
  EXPECT_FALSE(takes_packed_rows(at::empty({0})));
  DropoutStream stream;
  EXPECT_EQ(test::message_of<c10::NotImplementedError>([&] {
              self_attention(at::ones({3, 12}), packed_sentences({1, 2}), {.heads = 2}, stream);
            }),
            "attention: expected padded rows on cpu, got packed ones");
}

TEST(FusedTest, PackedRowsOfNoSentencesAreNone) {
  const at::Tensor x = at::empty({0, 12}).requires_grad_(true);
  DropoutStream stream;
  const at::Tensor y =
      self_attention(x, packed_sentences({}), {.heads = 2, .dropout = 0.5}, stream);
  EXPECT_EQ(y.sizes(), at::IntArrayRef({0, 4}));
  y.sum().backward();
  EXPECT_EQ(x.grad().sizes(), x.sizes());
}

TEST(FusedTest, AttentionsPackedRowsAreChecked) {
  const at::Tensor q = at::ones({5, 8}), kv = at::ones({7, 16}), qkv = at::ones({5, 24});
  const SentenceRows targets = packed_sentences({4, 1}), sources = packed_sentences({2, 5});
  DropoutStream stream;
  const auto message = [&](const SentenceRows& queries, const SentenceRows& keys) {
    return test::message_of<c10::ValueError>(
        [&] { attention(q, queries, kv, keys, {.heads = 2}, stream); });
  };
  const auto with = [](SentenceRows rows, const at::Tensor& elements) {
    rows.elements_N = elements;
    return rows;
  };
  EXPECT_EQ(message(targets, with(sources, {})),
            "attention: expected queries [N, D] with a multiple of 2 columns, and keys with values "
            "[M, 2 D] of the same type, got CPUFloatType [5, 8] and CPUFloatType [7, 16]");
  EXPECT_EQ(message(packed_sentences({4, 2}), sources),
            "attention: expected 5 int64 elements, got CPULongType [6]");
  EXPECT_EQ(message(targets, with(packed_sentences({2, 4}), at::arange(7))),
            "attention: expected 7 rows of sentences, got lengths of 6");
  EXPECT_EQ(message(targets, packed_sentences({2, 4, 1})),
            "attention: expected int64 lengths of 2 sentences, got CPULongType [3]");
  EXPECT_EQ(message(targets, with(sources, at::arange(7).to(at::kMeta))),
            "attention: elements: expected a tensor on cpu, got one on meta");
  EXPECT_EQ(test::message_of<c10::ValueError>(
                [&] { self_attention(qkv, with(targets, {}), {.heads = 2}, stream); }),
            "self_attention: expected queries, keys and values [B, T, 3 D] with D a multiple of 2, "
            "got [5, 24]");
}

TEST(FusedTest, AttentionsOperandsAreChecked) {
  const at::Tensor q = at::ones({2, 3, 8}), kv = at::ones({2, 4, 16});
  const at::Tensor lengths = at::tensor({4, 1}, at::kLong);
  DropoutStream stream;
  const auto message = [&](const at::Tensor& queries, const at::Tensor& keys,
                           const at::Tensor& seen, int64_t heads) {
    return test::message_of<c10::ValueError>(
        [&] { attention(queries, keys, seen, {.heads = heads}, stream); });
  };
  EXPECT_EQ(
      message(q, kv, lengths, 3),
      "attention: expected queries [B, Q, D] with a multiple of 3 columns, and keys with values "
      "[B, K, 2 D] of the same type, got CPUFloatType [2, 3, 8] and CPUFloatType [2, 4, 16]");
  EXPECT_EQ(message(q, kv, lengths.to(at::kInt), 2),
            "attention: expected int64 lengths of 2 sentences, got CPUIntType [2]");
  EXPECT_EQ(message(q, kv, at::tensor({5, 1}, at::kLong), 2),
            "attention: lengths: expected 1 to 4, got 5");
  EXPECT_EQ(message(q, kv, lengths.to(at::kMeta), 2),
            "attention: lengths: expected a tensor on cpu, got one on meta");
  EXPECT_EQ(message(q, kv.to(at::kMeta), lengths, 2),
            "attention: keys: expected a tensor on cpu, got one on meta");
  EXPECT_EQ(message(q.to(at::kHalf), kv.to(at::kHalf), lengths, 2),
            c10::str("attention: expected float32, float64 or bfloat16, got ",
                     at::ones({}, at::kHalf).dtype()));
  EXPECT_EQ(
      test::message_of<c10::ValueError>([&] { self_attention(q, lengths, {.heads = 2}, stream); }),
      "self_attention: expected queries, keys and values [B, T, 3 D] with D a multiple of 2, got "
      "[2, 3, 8]");
}

void check_cross_entropy(int64_t vocabulary, at::ScalarType type) {
  SCOPED_TRACE(vocabulary);
  constexpr int64_t kRows = 1030;  // two chunks
  constexpr int64_t kWidth = 12;
  const double unit = unit_of(type);
  // Around 0.5, so that scores have a mean that the smoothed loss depends on.
  const at::Tensor hidden = (at::randn({kRows, kWidth}) + 0.5).to(type).requires_grad_(true);
  // In float32 as parameters are.
  const at::Tensor weight = (at::randn({vocabulary, kWidth}) + 0.5).requires_grad_(true);
  const at::Tensor labels = at::randint(vocabulary, {kRows}, at::kLong);
  const LossSums sums = smoothed_cross_entropy(hidden, weight, labels, 0.1);
  (sums.loss * 0.25).backward();  // A power of two adds no rounding.

  const at::Tensor h = exact_leaf(hidden);
  const at::Tensor w = exact_leaf(weight.to(type));
  const at::Tensor x = at::mm(h, w.t());
  namespace F = torch::nn::functional;
  const auto options = F::CrossEntropyFuncOptions().reduction(torch::kSum);
  const at::Tensor loss =
      F::cross_entropy(x, labels, F::CrossEntropyFuncOptions(options).label_smoothing(0.1));
  (loss * 0.25).backward();

  const at::NoGradGuard no_grad;
  const auto columns = static_cast<double>(vocabulary);
  // Scores: summed in float32, then stored.
  const at::Tensor score_error = unit * x.abs() + kWidth * kU * at::mm(h.abs(), w.abs().t());
  const at::Tensor row_error = score_error.amax(1, true);
  const at::Tensor range = x.amax(1, true) - x.amin(1, true);
  // A loss has derivatives in the scores whose magnitudes add up to 2 at most. Then exponentials
  // and their sum, and the sum of scores with its share of 0.1.
  const at::Tensor loss_error =
      2 * row_error + (range + 4 + columns) * kU + 0.1 * kU * x.abs().sum(1, true);
  expect_within(sums.loss, loss, loss_error.sum() + kU * loss.abs());
  expect_within(sums.nll, F::cross_entropy(x, labels, options), loss_error.sum());

  // p - q: p by the scores and as in softmax, then differences with q, then stored.
  const at::Tensor p = at::softmax(x, 1);
  const at::Tensor q = 0.9 * at::one_hot(labels, vocabulary).to(at::kDouble) + 0.1 / columns;
  const at::Tensor slope = (p - q).abs();
  const at::Tensor slope_error =
      p * (2 * row_error + (2 * range + 10 + columns) * kU) + 4 * kU * (p + q) + unit * slope;
  const at::Tensor hidden_bound = at::mm(slope_error, w.abs()) +
                                  columns * kU * at::mm(slope, w.abs()) +
                                  unit * at::mm(slope, w.abs());
  expect_within(hidden.grad(), h.grad(), 0.25 * hidden_bound);
  const at::Tensor weight_bound =
      at::mm(slope_error.t(), h.abs()) + (kRows * kU + unit) * at::mm(slope.t(), h.abs());
  expect_within(weight.grad(), w.grad(), 0.25 * weight_bound);
}

TEST(FusedTest, SmoothedCrossEntropyInEveryTableEqualsAtens) {
  in_every_table([](at::ScalarType type) {
    for (const int64_t vocabulary : {1, 7, 16, 33, 101}) check_cross_entropy(vocabulary, type);
  });
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
    EXPECT_FALSE(at::equal(dropout(x, 0.1, again), once)) << "the next call draws other numbers";
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

// Of NaNs in float32, of which some would be rounded up to another exponent or sign.
void check_wide_nans() {
  const at::Tensor wide = at::tensor({0x7fffffff, 0x7fff8000, 0x7f800001, -1, -0x7fffff}, at::kInt)
                              .view(at::kFloat)
                              .view({5, 1})
                              .repeat({1, 37});
  const at::Tensor zeros = at::zeros(wide.sizes(), at::kBFloat16), ones = at::ones(wide.sizes());
  const NormParameters norm{
      .weight_D = at::ones({37}), .bias_D = at::ones({37}), .type = at::kBFloat16};
  DropoutStream stream;
  EXPECT_TRUE(at::isnan(nmt::layer_norm(wide, norm).normed).all().item<bool>());
  for (const double p : {0.0, 0.3}) {
    const at::Tensor normed = add_dropout_norm(wide, zeros, norm, p, stream).normed;
    EXPECT_TRUE(at::isnan(normed).all().item<bool>()) << normed;
    const auto expect_in_gradient = [&](const char* of, const auto& backward) {
      const at::Tensor y = zeros.clone().requires_grad_(true);
      const at::Tensor mask = mask_of(wide.sizes(), p, stream);
      backward(y);
      EXPECT_TRUE(at::equal(at::isnan(y.grad()), mask != 0)) << of << y.grad();
      EXPECT_TRUE((at::isnan(y.grad()) | (y.grad() == 0)).all().item<bool>()) << of << y.grad();
    };
    expect_in_gradient("add_dropout", [&](const at::Tensor& y) {
      add_dropout(ones, y, p, stream).backward(wide);
    });
    expect_in_gradient("a sum alone", [&](const at::Tensor& y) {
      add_dropout_norm(ones, y, norm, p, stream).sum.backward(wide);
    });
    expect_in_gradient("a sum and its norm", [&](const at::Tensor& y) {
      const auto both = add_dropout_norm(ones, y, norm, p, stream);
      torch::autograd::backward({both.sum, both.normed}, {wide, zeros});
    });
  }
}

// In every table: a NaN of any payload and sign comes out as one.
TEST(FusedTest, EveryBFloat16NaNStaysOne) {
  in_every_table([](at::ScalarType type) {
    if (type != at::kBFloat16) return;
    std::vector<int16_t> bits;
    for (int payload = 1; payload < 128; ++payload) {
      bits.push_back(static_cast<int16_t>(0x7f80 + payload));
      bits.push_back(static_cast<int16_t>(0xff80 + payload));
    }
    const at::Tensor nans = at::tensor(bits, at::kShort).view(at::kBFloat16);
    DropoutStream stream;
    const at::Tensor kept = dropout(nans, 0.3, stream), gelu = gelu_dropout(nans, 0, stream);
    EXPECT_TRUE((at::isnan(kept) | (kept == 0)).all().item<bool>()) << kept;
    EXPECT_GT(at::isnan(kept).sum().item<int64_t>(), nans.numel() / 2);
    EXPECT_TRUE(at::isnan(gelu).all().item<bool>()) << gelu;
    check_wide_nans();
  });
}

TEST(FusedTest, TensorsOfTwoDevicesAreRefused) {
  const at::Tensor here = at::ones({2, 3}), there = at::ones({2, 3}, at::kMeta);
  const at::Tensor labels = at::zeros({2}, at::kLong), lengths = at::ones({1}, at::kLong);
  DropoutStream stream;
  const auto expect_refused = [](const std::string& expected, const auto& call) {
    EXPECT_EQ(test::message_of<c10::ValueError>(call), expected);
  };
  expect_refused("masked_softmax: lengths: expected a tensor on meta, got one on cpu", [&] {
    masked_softmax(there.view({1, 1, 2, 3}), lengths, false, 1, 0, stream);
  });
  expect_refused("masked_softmax: lengths: expected a tensor on cpu, got one on meta", [&] {
    masked_softmax(here.view({1, 1, 2, 3}), lengths.to(at::kMeta), false, 1, 0, stream);
  });
  expect_refused("smoothed_cross_entropy: weight: expected a tensor on meta, got one on cpu",
                 [&] { smoothed_cross_entropy(there, here, labels, 0.1); });
  expect_refused("smoothed_cross_entropy: labels: expected a tensor on cpu, got one on meta",
                 [&] { smoothed_cross_entropy(here, here, labels.to(at::kMeta), 0.1); });
  const at::Tensor row = at::ones({3}), row_there = row.to(at::kMeta);
  const auto expect_first_on_the_cpu = [&](const std::string& operand, const auto& call) {
    expect_refused(operand + ": expected a tensor on cpu, got one on meta", call);
  };
  expect_first_on_the_cpu("add_dropout: y", [&] { add_dropout(here, there, 0.5, stream); });
  expect_first_on_the_cpu("add_dropout_norm: y", [&] {
    add_dropout_norm(here, there, {.weight_D = row, .bias_D = row}, 0.5, stream);
  });
  expect_first_on_the_cpu("add_dropout_norm: weight", [&] {
    add_dropout_norm(here, here, {.weight_D = row_there, .bias_D = row}, 0.5, stream);
  });
  expect_first_on_the_cpu("add_dropout_norm: bias", [&] {
    add_dropout_norm(here, here, {.weight_D = row, .bias_D = row_there}, 0.5, stream);
  });
  expect_first_on_the_cpu("layer_norm: weight",
                          [&] { nmt::layer_norm(here, {.weight_D = row_there, .bias_D = row}); });
  expect_first_on_the_cpu("layer_norm: bias",
                          [&] { nmt::layer_norm(here, {.weight_D = row, .bias_D = row_there}); });
  const LinearReluDropoutOptions options{.dropout = 0.5, .part = {}};
  expect_first_on_the_cpu(
      "linear: weight", [&] { linear_relu_dropout(here, there, at::ones({2}), options, stream); });
  expect_first_on_the_cpu("linear: bias", [&] {
    linear_relu_dropout(here, here, at::ones({2}, at::kMeta), options, stream);
  });
}

TEST(FusedTest, InferenceElsewhereThanOnTheCpuIsRefused) {
  const at::Tensor there = at::ones({2, 3}, at::kMeta);
  EXPECT_EQ(test::message_of<c10::ValueError>([&] {
              attend(there, {.rows = {nullptr}, .of_query = {{0, 1}, {0, 1}}}, 1);
            }),
            "attend: expected a tensor on the CPU, got one on meta");
}

TEST(FusedTest, OtherTypesAreRefusedByTheOperationsName) {
  const at::Tensor half = at::ones({2, 3}, at::kHalf);
  DropoutStream stream;
  const auto message = [](const auto& call) { return test::message_of<c10::ValueError>(call); };
  const std::string expected = ": expected float32, float64 or bfloat16, got ";
  const std::string type = c10::str(half.dtype());
  EXPECT_EQ(message([&] { dropout(half, 0.5, stream); }), "dropout" + expected + type);
  EXPECT_EQ(message([&] { relu_dropout(half, 0, stream); }), "relu_dropout" + expected + type);
  EXPECT_EQ(message([&] { gelu_dropout(half, 0, stream); }), "gelu_dropout" + expected + type);
  EXPECT_EQ(message([&] { swish_dropout(half, 0, stream); }), "swish_dropout" + expected + type);
  EXPECT_EQ(
      message([&] {
        masked_softmax(half.view({1, 1, 2, 3}), at::ones({1}, at::kLong), false, 1, 0, stream);
      }),
      "masked_softmax" + expected + type);
  EXPECT_EQ(message([&] { const LogProbs scores(half); }), "LogProbs" + expected + type);
}

TEST(FusedTest, LabelsAndLengthsOutOfRangeAreRefused) {
  const at::Tensor hidden = leaf({2, 3}), weight = leaf({5, 3});
  for (const int64_t label : {-1, 5}) {
    EXPECT_EQ(test::message_of<c10::ValueError>([&] {
                smoothed_cross_entropy(hidden, weight, at::tensor({int64_t{0}, label}), 0.1);
              }),
              "smoothed_cross_entropy: labels: expected 0 to 4, got " + std::to_string(label));
  }
  DropoutStream stream;
  for (const int64_t length : {0, 4}) {
    EXPECT_EQ(
        test::message_of<c10::ValueError>([&] {
          masked_softmax(leaf({2, 1, 1, 3}), at::tensor({int64_t{3}, length}), false, 1, 0, stream);
        }),
        "masked_softmax: lengths: expected 1 to 3, got " + std::to_string(length));
  }
}

TEST(FusedTest, ASecondBackwardOfTheLossSaysThatItIsOne) {
  const LossSums sums =
      smoothed_cross_entropy(leaf({2, 3}), leaf({5, 3}), at::zeros({2}, at::kLong), 0.1);
  sums.loss.backward({}, /*retain_graph=*/true);
  const std::string message = test::message_of<c10::Error>([&] { sums.loss.backward(); });
  EXPECT_NE(message.find("smoothed_cross_entropy: expected one backward"), std::string::npos)
      << message;
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

template <class Call>
void expect_value_error(const std::string& beginning, const Call& call) {
  EXPECT_EQ(test::message_of<c10::ValueError>(call).substr(0, beginning.size()), beginning);
}

void check_linear(at::ScalarType of_x, at::ScalarType type, bool bias) {
  const at::Tensor x = leaf({2, 3, 5}, of_x), weight = leaf({4, 5}, at::kFloat);
  const at::Tensor b = bias ? leaf({4}, at::kFloat) : at::Tensor();
  const auto gradients = [&](const at::Tensor& y) {
    y.backward(at::arange(24).view({2, 3, 4}).to(y.scalar_type()) / 7);
    std::vector<at::Tensor> found{y.detach()};
    for (const at::Tensor& each : {x, weight, b}) {
      if (!each.defined()) continue;
      found.push_back(each.grad());
      each.mutable_grad().reset();
    }
    return found;
  };
  const auto got = gradients(linear(x, weight, bias ? std::optional(b) : std::nullopt, type));
  const auto expected = gradients(
      at::linear(x.to(type), weight.to(type), bias ? std::optional(b.to(type)) : std::nullopt));
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].scalar_type(), expected[i].scalar_type()) << i;
    if (i < 2) {
      EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
    } else if (i == 2) {  // Libtorch rounds a weight's gradient to `type`; here it need not be.
      EXPECT_TRUE(at::equal(got[i].to(type), expected[i].to(type)));
    } else {  // A bias's gradient is a sum of six float32 numbers, libtorch's rounded to `type`.
      expect_within(got[i], expected[i].to(at::kDouble),
                    (unit_of(type) + 8 * kU) * expected[i].abs().to(at::kDouble));
    }
  }
}

TEST(FusedTest, LinearIsLibtorchs) {
  for (const bool bias : {false, true}) {
    check_linear(at::kFloat, at::kFloat, bias);
    check_linear(at::kFloat, at::kBFloat16, bias);
    check_linear(at::kBFloat16, at::kBFloat16, bias);
  }
  // Operands of a wider type than the weight's, on CUDA, too.
  const test::HostLaunches cuda;
  check_linear(at::kFloat, at::kDouble, true);
  const at::Tensor twice = leaf({3, 5}, at::kFloat), square = leaf({4, 5}, at::kFloat);
  EXPECT_THROW(torch::autograd::grad({linear(twice, square, std::nullopt, at::kFloat).sum()},
                                     {twice}, {}, std::nullopt, /*create_graph=*/true),
               c10::NotImplementedError);
  // Without gradients, and of some operands alone.
  const at::Tensor x = leaf({3, 5}, at::kFloat), weight = at::ones({4, 5});
  linear(x, weight, std::nullopt, at::kFloat).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({3, 5}, 4.0F)));
  EXPECT_FALSE(linear(x.detach(), weight, at::ones({4}), at::kFloat).requires_grad());
  expect_value_error("linear: expected x [..., K] and weight [M, K], got [3, 5] and [4, 6]", [&] {
    linear(x, at::ones({4, 6}), std::nullopt, at::kFloat);
  });
  expect_value_error("linear: bias: expected a tensor on cpu, got one on meta",
                     [&] { linear(x, weight, at::ones({4}, at::kMeta), at::kFloat); });
  expect_value_error("linear: expected bias [4], got [3]",
                     [&] { linear(x, weight, at::ones({3}), at::kFloat); });
}

TEST(FusedTest, AddDropoutIsASumWithADropout) {
  in_every_table([](at::ScalarType type) {
    const auto wide = type == at::kBFloat16 ? at::kFloat : type;
    const at::Tensor x = leaf({7, 9}, wide), y = leaf({7, 9}, type);
    DropoutStream stream{.seed = 3, .call = 8};
    const at::Tensor mask = mask_of({7, 9}, 0.4, stream);
    const at::Tensor sum = add_dropout(x, y, 0.4, stream);
    EXPECT_EQ(sum.scalar_type(), wide);
    const at::Tensor dropped = y.detach().to(at::kDouble) * mask;
    expect_within(sum, x.detach().to(at::kDouble) + dropped,
                  (unit_of(type) + kU) * dropped.abs() + unit_of(wide) * sum.detach().abs());
    const at::Tensor grad = at::randn({7, 9}).to(wide);
    sum.backward(grad);
    EXPECT_TRUE(at::equal(x.grad(), grad));
    EXPECT_EQ(y.grad().scalar_type(), type);
    const at::Tensor slope = grad.to(at::kDouble) * mask;
    expect_within(y.grad(), slope, (2 * unit_of(type) + kU) * slope.abs());
  });
  DropoutStream stream;
  EXPECT_TRUE(at::equal(add_dropout(at::ones({2}), at::ones({2}), 0, stream), at::full({2}, 2.0F)));
  expect_value_error("add_dropout: expected two tensors of a shape",
                     [&] { add_dropout(at::ones({2}), at::ones({3}), 0.5, stream); });
  // Types for which CUDA has no kernel.
  const test::HostLaunches cuda;
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor x = leaf({5}, at::kDouble), y = leaf({5}, type);
    DropoutStream once{.seed = 3}, again{.seed = 3};
    const at::Tensor sum = add_dropout(x, y, 0.4, once), mask = mask_of({5}, 0.4, again);
    EXPECT_EQ(sum.scalar_type(), at::kDouble);
    const at::Tensor dropped = y.detach().to(at::kDouble) * mask;
    expect_within(sum, x.detach() + dropped, (unit_of(type) + kU) * dropped.abs());
    sum.backward(at::ones({5}, at::kDouble));
    expect_within(y.grad(), mask, (unit_of(type) + kU) * mask);
  }
  expect_value_error("add_dropout: expected two tensors of a shape", [&] {
    add_dropout(at::ones({2}, at::kBFloat16), at::ones({2}), 0.5, stream);
  });
}

struct NormCase {
  int64_t rows, width;
  at::ScalarType of_y;
  bool wide = false;  // the norm is in x's type
  double p = 0;
  double offset = 0;  // of the last row
};

// Rows, of which the first is all zeros.
at::Tensor rows_with_a_zero(const NormCase& c, at::ScalarType type) {
  const at::Tensor x = at::randn({1, c.rows, c.width}, at::kDouble).to(type);
  if (c.rows > 1) x.select(1, 0).zero_();
  if (c.offset != 0) x.select(1, c.rows - 1).add_(c.offset);
  return x.requires_grad_(true);
}

at::ScalarType sum_type_of(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

// Of a norm and what passes by it, from the sum as it was computed.
void check_norm(const NormCase& c, bool adds) {
  SCOPED_TRACE(c10::str(c10::toString(c.of_y), " ", c.rows, " x ", c.width, " p ", c.p,
                        c.wide ? " wide" : "", adds ? "" : " of x alone"));
  const auto wide = sum_type_of(c.of_y);
  const NormParameters norm{.weight_D = leaf({c.width}, wide),
                            .bias_D = leaf({c.width}, wide),
                            .type = c.wide ? wide : c.of_y};
  const at::Tensor x = rows_with_a_zero(c, wide), y = rows_with_a_zero(c, c.of_y);
  DropoutStream stream{.seed = 3, .call = 8}, again = stream;
  const at::Tensor mask = adds ? mask_of(x.sizes(), c.p, stream) : at::zeros_like(x);
  const auto [sum, normed] =
      adds ? add_dropout_norm(x, y, norm, c.p, stream) : nmt::layer_norm(x, norm);
  EXPECT_EQ(sum.scalar_type(), wide);
  EXPECT_EQ(normed.scalar_type(), norm.type);
  EXPECT_TRUE(at::equal(sum, adds ? add_dropout(x, y, c.p, again) : x));
  EXPECT_EQ(stream.call, again.call);

  const at::Tensor s = exact_leaf(sum), w = exact_leaf(norm.weight_D), b = exact_leaf(norm.bias_D);
  const at::Tensor expected = at::layer_norm(s, {c.width}, w, b);
  const at::Tensor grad_sum = at::randn(x.sizes()).to(wide);
  const at::Tensor grad = at::randn(x.sizes()).to(norm.type);
  torch::autograd::backward({sum, normed}, {grad_sum, grad});
  expected.backward(grad.to(at::kDouble));

  // Sums of D terms, each off by D u of its magnitudes. The mean's error does not change the
  // variance in first order; the root halves what that is off by.
  const at::NoGradGuard no_grad;
  const double u = wide == at::kDouble ? 0x1p-53 : kU;
  const auto n = static_cast<double>(c.width), rows = static_cast<double>(c.rows);
  const auto mean = [](const at::Tensor& values) { return values.mean({-1}, /*keepdim=*/true); };
  const at::Tensor deviation = s - mean(s);
  const at::Tensor inverse = 1 / at::sqrt(mean(deviation * deviation) + 1e-5);
  const at::Tensor z = deviation * inverse;
  const at::Tensor z_error = inverse * (n + 1) * u * mean(s.abs()) + (n / 2 + 8) * u * z.abs();
  expect_within(
      normed, expected,
      w.abs() * z_error + 3 * u * ((w * z).abs() + b.abs()) + unit_of(norm.type) * expected.abs());
  const at::Tensor g = grad.to(at::kDouble).abs(), slope = g * w.abs();
  const at::Tensor dot = mean(slope * z.abs());
  const at::Tensor terms = slope + mean(slope) + z.abs() * dot;
  const at::Tensor of_sum = grad_sum.to(at::kDouble) + s.grad();
  const at::Tensor error =
      inverse * ((1.5 * n + 16) * u * terms + z_error * dot + z.abs() * mean(slope * z_error)) +
      2 * u * (grad_sum.abs() + of_sum.abs());
  expect_within(x.grad(), of_sum, error);
  if (adds) {
    EXPECT_EQ(y.grad().scalar_type(), c.of_y);
    const at::Tensor of_y = of_sum * mask;
    expect_within(y.grad(), of_y, error * mask + (unit_of(c.of_y) + kU) * of_y.abs());
    EXPECT_TRUE(((y.grad() != 0) <= (mask != 0)).all().item<bool>());
  }
  const at::Tensor over_rows = (g * (z_error + (rows + 4) * u * z.abs())).flatten(0, 1).sum(0);
  expect_within(norm.weight_D.grad(), w.grad(), over_rows);
  expect_within(norm.bias_D.grad(), b.grad(), (rows + 2) * u * g.flatten(0, 1).sum(0));
}

void check_norms(const NormCase& c) {
  check_norm(c, /*adds=*/false);
  for (const double p : {0.0, 0.3}) {
    check_norm({c.rows, c.width, c.of_y, c.wide, p, c.offset}, /*adds=*/true);
  }
}

// Widths that fill no registers and more than a block of random numbers; more rows than are summed
// at a time.
TEST(FusedTest, NormsOfSumsInEveryTableAreAtens) {
  const auto check = [](at::ScalarType type, int64_t rows, int64_t width) {
    check_norms({rows, width, type});
    if (type == at::kBFloat16) check_norms({rows, width, type, /*wide=*/true});
    if (type == at::kFloat) check_norms({rows, width, at::kDouble});
  };
  in_every_table([&](at::ScalarType type) {
    for (const int64_t width : {7, 16, 33, 515}) check(type, 5, width);
    check(type, 1, 64);
    check(type, 150, 96);
    // A mean that a variance by the mean of squares would not survive.
    for (const int64_t width : {16, 96})
      check_norms({.rows = 3, .width = width, .of_y = type, .offset = 1000});
  });
  // ATen's gradient is a difference of large numbers where the variance is small.
  in_all_loops([&](at::ScalarType type) {
    for (const int64_t width : {1, 2, 3}) check(type, 67, width);
  });
}

std::vector<at::Tensor> norm_and_gradients(const at::Tensor& x, const at::Tensor& y, double p) {
  const at::Tensor weight = at::linspace(-1, 2, x.size(-1)).requires_grad_(true),
                   bias = at::linspace(0, 1, x.size(-1)).requires_grad_(true);
  const at::Tensor a = x.detach().requires_grad_(true), b = y.detach().requires_grad_(true);
  DropoutStream stream{.seed = 4};
  const auto [sum, normed] = add_dropout_norm(
      a, b, {.weight_D = weight, .bias_D = bias, .type = y.scalar_type()}, p, stream);
  torch::autograd::backward({sum, normed}, {at::cos(a.detach()), at::sin(y)});
  return {sum.detach(), normed.detach(), a.grad(), b.grad(), weight.grad(), bias.grad()};
}

TEST(FusedTest, NormsAreTheSameBitsAgainOnAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  in_all_loops([](at::ScalarType type) {
    const at::Tensor x = at::randn({1501, 100}), y = at::randn({1501, 100}).to(type);
    at::set_num_threads(1);
    const auto expected = norm_and_gradients(x, y, 0.3);
    for (const int used : {1, 2, 3}) {
      at::set_num_threads(used);
      const auto found = norm_and_gradients(x, y, 0.3);
      for (size_t i = 0; i < found.size(); ++i)
        EXPECT_TRUE(at::equal(found[i], expected[i])) << used << " threads, " << i;
    }
    // Nor does a row depend on the others, wherever it lies.
    const auto whole = norm_and_gradients(x, y, 0);
    for (const int64_t rows : {1, 2, 7, 65, 1500}) {
      const auto part =
          norm_and_gradients(x.narrow(0, 1501 - rows, rows), y.narrow(0, 1501 - rows, rows), 0);
      for (size_t i = 0; i < 4; ++i)
        EXPECT_TRUE(at::equal(part[i], whole[i].narrow(0, 1501 - rows, rows))) << rows << ", " << i;
    }
  });
  at::set_num_threads(threads);
}

TEST(FusedTest, OfANormAndItsSumEitherMayBeUsedAlone) {
  const NormParameters norm{
      .weight_D = leaf({9}, at::kFloat), .bias_D = leaf({9}, at::kFloat), .type = at::kFloat};
  const at::Tensor x = leaf({4, 9}, at::kFloat), y = leaf({4, 9}, at::kFloat);
  const auto gradients = [&](const at::Tensor& of) {
    of.backward(at::linspace(1, 2, of.numel()).view_as(of));
    std::vector<at::Tensor> found;
    for (const at::Tensor& each : {x, y, norm.weight_D, norm.bias_D}) {
      found.push_back(each.grad().defined() ? each.grad() : at::zeros_like(each));
      each.mutable_grad().reset();
    }
    return found;
  };
  for (const double p : {0.0, 0.4}) {
    DropoutStream stream, again;
    const auto of_sum = gradients(add_dropout_norm(x, y, norm, p, stream).sum);
    const auto expected = gradients(add_dropout(x, y, p, again));
    for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(at::equal(of_sum[i], expected[i])) << i;
    const auto of_normed = gradients(add_dropout_norm(x, y, norm, p, stream).normed);
    EXPECT_LE(of_normed[0].sum(1).abs().max().item<double>(), 1e-4) << "a norm takes no constant";
    EXPECT_GT(of_normed[2].abs().min().item<double>(), 0);
  }
  EXPECT_THROW(torch::autograd::grad({nmt::layer_norm(x, norm).normed.sum()}, {x}, {}, std::nullopt,
                                     /*create_graph=*/true),
               c10::NotImplementedError);
  DropoutStream stream;
  const auto none = norm_and_gradients(at::ones({0, 9}), at::ones({0, 9}), 0.3);
  EXPECT_EQ(none[1].sizes(), at::IntArrayRef({0, 9}));
  EXPECT_TRUE(at::equal(none[4], at::zeros({9})));
  expect_value_error("add_dropout_norm: expected two tensors of a shape", [&] {
    add_dropout_norm(x, at::ones({4, 8}), norm, 0.5, stream);
  });
  expect_value_error(
      "layer_norm: expected [..., D] and a norm's weight and bias [D], got [4, 8], [9]", [&] {
        nmt::layer_norm(at::ones({4, 8}), norm);
      });
}

// From the rounded operands; of the result it takes what came through.
void check_linear_relu_dropout(int64_t rows, int64_t width, double p, at::ScalarType type) {
  SCOPED_TRACE(c10::str(c10::toString(type), " ", rows, " x ", width, " p ", p));
  const auto wide = sum_type_of(type);
  const auto operand = [&](at::IntArrayRef shape, at::ScalarType stored) {
    return at::randn(shape, at::kDouble).to(type).to(stored).requires_grad_(true);
  };
  constexpr int64_t kDepth = 20;
  const at::Tensor x = operand({rows, 1, kDepth}, type), weight = operand({width, kDepth}, wide),
                   bias = operand({width}, wide);
  DropoutStream stream{.seed = 3, .call = 8};
  const at::Tensor mask = mask_of({rows, width}, p, stream);
  const at::Tensor y =
      linear_relu_dropout(x, weight, bias, {.type = type, .dropout = p, .part = {}}, stream);
  EXPECT_EQ(stream.call, p > 0 ? 9U : 8U);
  EXPECT_EQ(y.sizes(), at::IntArrayRef({rows, 1, width}));
  const at::Tensor grad = at::randn(y.sizes(), at::kDouble).to(type);
  y.backward(grad);

  const at::NoGradGuard no_grad;
  const double unit = unit_of(type), u = type == at::kDouble ? unit : kU;
  const at::Tensor x_NK = x.view({rows, kDepth}).to(at::kDouble), w = weight.to(at::kDouble),
                   b = bias.to(at::kDouble);
  const at::Tensor product = at::mm(x_NK, w.t()), sum = product + b;
  const at::Tensor error = (kDepth + 2) * u * at::mm(x_NK.abs(), w.abs().t()) +
                           unit * product.abs() + (unit + u) * sum.abs();
  const at::Tensor out = y.view({rows, width}), expected = at::relu(sum) * mask;
  expect_within(out, expected, mask * error + (unit + kU) * expected);
  EXPECT_TRUE(((out != 0) <= (mask != 0)).all().item<bool>());
  const at::Tensor g = grad.view({rows, width}).to(at::kDouble) * mask * (out != 0);
  const auto terms = [&](int64_t count) {
    return (static_cast<double>(count) + 4) * u + 2 * unit + kU;
  };
  const at::Tensor of_x = at::mm(g, w), of_w = at::mm(g.t(), x_NK), of_b = g.sum(0);
  expect_within(x.grad().view({rows, kDepth}), of_x,
                terms(width) * at::mm(g.abs(), w.abs()) + unit * of_x.abs());
  expect_within(weight.grad(), of_w,
                terms(rows) * at::mm(g.abs().t(), x_NK.abs()) + unit * of_w.abs());
  expect_within(bias.grad(), of_b, terms(rows) * g.abs().sum(0) + unit * of_b.abs());
}

TEST(FusedTest, LinearReluDropoutInEveryTableIsReluOfLinear) {
  in_every_table([](at::ScalarType type) {
    for (const double p : {0.0, 0.3}) {
      for (const int64_t width : {1, 7, 32, 515}) {
        check_linear_relu_dropout(5, width, p, type);
        if (type == at::kFloat) check_linear_relu_dropout(5, width, p, at::kDouble);
      }
      check_linear_relu_dropout(1, 33, p, type);
      check_linear_relu_dropout(150, 33, p, type);
    }
  });
}

TEST(FusedTest, LinearReluDropoutIsTheSameBitsAgainOnAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  in_all_loops([](at::ScalarType type) {
    // Products of 16 and 0: exact, so that theirs is no order of summation.
    const at::Tensor x = (at::randn({1501, 100}) * 16).round() / 16, weight = at::eye(100),
                     bias = at::randn({100});
    const auto run = [&] {
      const at::Tensor b = bias.clone().requires_grad_(true),
                       a = x.to(type, /*non_blocking=*/false, /*copy=*/true).requires_grad_(true);
      DropoutStream stream{.seed = 4};
      const at::Tensor y =
          linear_relu_dropout(a, weight, b, {.type = type, .dropout = 0.3, .part = {}}, stream);
      y.backward(at::cos(x).to(type));
      return std::vector{y.detach(), a.grad(), b.grad()};
    };
    at::set_num_threads(1);
    const auto expected = run();
    for (const int used : {1, 2, 3}) {
      at::set_num_threads(used);
      const auto found = run();
      for (size_t i = 0; i < found.size(); ++i)
        EXPECT_TRUE(at::equal(found[i], expected[i])) << used << " threads, " << i;
    }
    // The plain path's mask, and nothing else of it: float32's bias is added to the same product.
    DropoutStream stream{.seed = 4}, plain{.seed = 4};
    const at::Tensor all = at::full({100}, 1e4F);
    const LinearReluDropoutOptions options{.type = type, .dropout = 0.3, .part = {}};
    EXPECT_TRUE(at::equal(linear_relu_dropout(x.to(type), weight, all, options, stream) != 0,
                          relu_dropout(linear(x.to(type), weight, all, type), 0.3, plain) != 0));
  });
  at::set_num_threads(threads);
  DropoutStream stream;
  const at::Tensor x = leaf({0, 5}, at::kFloat), bias = leaf({4}, at::kFloat);
  linear_relu_dropout(x, at::ones({4, 5}), bias, {.dropout = 0.5, .part = {}}, stream)
      .sum()
      .backward();
  EXPECT_TRUE(at::equal(bias.grad(), at::zeros({4})));
  expect_value_error(
      "linear_relu_dropout: expected a part of whole rows of 4 elements, got 2", [&] {
        linear_relu_dropout(at::ones({3, 5}), at::ones({4, 5}), bias,
                            {.dropout = 0.5, .part = {.size = 2, .whole = 4}}, stream);
      });
  expect_value_error("linear: expected bias [4], got [3]", [&] {
    linear_relu_dropout(at::ones({3, 5}), at::ones({4, 5}), at::ones({3}),
                        {.dropout = 0.5, .part = {}}, stream);
  });
  EXPECT_THROW(
      torch::autograd::grad({linear_relu_dropout(leaf({3, 5}, at::kFloat), at::ones({4, 5}), bias,
                                                 {.dropout = 0.5, .part = {}}, stream)
                                 .sum()},
                            {bias}, {}, std::nullopt, /*create_graph=*/true),
      c10::NotImplementedError);
}

// bfloat16's neighbours of this bias are 1 and 1.0078125.
TEST(FusedTest, LinearReluDropoutAddsTheBiasAsItIs) {
  in_all_loops([](at::ScalarType type) {
    const at::Tensor x = at::full({2, 1}, -1.0F).to(type), weight = at::ones({37, 1});
    const at::Tensor bias = at::full({37}, 1.003F);
    DropoutStream stream;
    const at::Tensor y = linear_relu_dropout(x, weight, bias, {.type = type, .part = {}}, stream);
    const at::Tensor exact = (bias.to(at::kDouble) - 1).expand({2, 37});
    expect_within(y, exact, unit_of(type) * exact);
    if (type == at::kBFloat16) {
      EXPECT_TRUE(at::equal(linear(x, weight, bias, type), at::zeros({2, 37}, type)));
    }
  });
}

// Quarters: their products and sums are exact, in whatever order.
at::Tensor quarters(const at::Tensor& x) {
  return (x * 4).round() / 4;
}

using Tensors = std::vector<at::Tensor>;

// An operation's results, then its operands' gradients: slope_of(a result) is the gradient of that. A second backward must give
// the same bits. The operand of number `frozen` takes no gradient.
template <class Operation, class Slope>
Tensors with_gradients(const Tensors& operands, const Operation& operation, const Slope& slope_of,
                       std::optional<size_t> frozen = std::nullopt) {
  Tensors given;
  for (const at::Tensor& operand : operands)
    given.push_back(operand.detach().requires_grad_(given.size() != frozen));
  Tensors found = operation(given);
  const Tensors results = found;
  Tensors slopes;
  for (const at::Tensor& result : results) slopes.push_back(slope_of(result.detach()));
  torch::autograd::backward(results, slopes, /*retain_graph=*/true);
  for (const at::Tensor& operand : given) {
    found.push_back(operand.grad());
    operand.mutable_grad() = at::Tensor();
  }
  torch::autograd::backward(results, slopes);
  for (size_t i = 0; i < given.size(); ++i) {
    const at::Tensor &once = found[results.size() + i], &again = given[i].grad();
    EXPECT_EQ(once.defined(), i != frozen) << i;
    EXPECT_TRUE(once.defined() ? at::equal(once, again) : !again.defined()) << i;
  }
  return found;
}
at::Tensor slope_of_waves(const at::Tensor& result) {
  return quarters(at::cos(result));
}

void expect_equal(const Tensors& found, const Tensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    if (!found[i].defined()) continue;  // frozen
    EXPECT_EQ(found[i].scalar_type(), expected[i].scalar_type()) << i;
    EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
  }
}

// In memory that is not contiguous.
at::Tensor apart(const at::Tensor& x) {
  return x.dim() == 2 ? x.t().contiguous().t() : at::stack({x, x}, 1).select(1, 0);
}

template <class Operation>
void check_operands(const char* what, const Tensors& operands, const Operation& operation) {
  SCOPED_TRACE(what);
  const Tensors expected = with_gradients(operands, operation, slope_of_waves);
  for (size_t frozen = 0; frozen < operands.size(); ++frozen) {
    SCOPED_TRACE(c10::str("operand ", frozen, " takes no gradient"));
    expect_equal(with_gradients(operands, operation, slope_of_waves, frozen), expected);
  }
  {
    SCOPED_TRACE("operands that are not contiguous");
    Tensors others;
    for (const at::Tensor& operand : operands) others.push_back(apart(operand));
    expect_equal(with_gradients(others, operation, slope_of_waves), expected);
  }
  SCOPED_TRACE("expanded gradients");
  const auto expanded = [](const at::Tensor& result) {
    return at::full({}, 0.75, result.options()).expand_as(result);
  };
  expect_equal(
      with_gradients(operands, operation, expanded),
      with_gradients(operands, operation, [&](const auto& x) { return expanded(x).contiguous(); }));
}

// Half of the elements are dropped: the scale is 2, which leaves all exact.
auto norm_of_sum(at::ScalarType type) {
  return [type](const Tensors& of) {
    DropoutStream stream{.seed = 4};
    const auto [sum, normed] = add_dropout_norm(
        of[0], of[1], {.weight_D = of[2], .bias_D = of[3], .type = type}, 0.5, stream);
    return Tensors{sum, normed};
  };
}
auto relu_of_linear(at::ScalarType type) {
  return [type](const Tensors& of) {
    DropoutStream stream{.seed = 4};
    return Tensors{linear_relu_dropout(of[0], of[1], of[2],
                                       {.type = type, .dropout = 0.5, .part = {}}, stream)};
  };
}

TEST(FusedTest, NormsAndReluOfLinearTakeEveryKindOfOperand) {
  in_all_loops([](at::ScalarType type) {
    const auto norm_of_x = [&](const Tensors& of) {
      const auto [sum, normed] =
          nmt::layer_norm(of[0], {.weight_D = of[1], .bias_D = of[2], .type = type});
      return Tensors{sum, normed};
    };
    for (const int64_t width : {0, 37}) {
      const auto rows = [&] { return quarters(at::randn({6, width})); };
      const auto row = [&] { return quarters(at::randn({width})); };
      check_operands("a sum's norm", {rows(), rows().to(type), row(), row()}, norm_of_sum(type));
      check_operands("in float32", {rows(), rows().to(type), row(), row()},
                     norm_of_sum(at::kFloat));
      check_operands("a norm", {rows(), row(), row()}, norm_of_x);
      check_operands(
          "relu of linear",
          {quarters(at::randn({6, 20})).to(type), quarters(at::randn({width, 20})), row()},
          relu_of_linear(type));
    }
    const at::Tensor x = leaf({4, 9}, at::kFloat), grad = at::randn({4, 9});
    const NormParameters norm{
        .weight_D = leaf({9}, at::kFloat), .bias_D = at::ones({9}), .type = type};
    const at::Tensor sum = nmt::layer_norm(x, norm).sum;
    EXPECT_TRUE(at::equal(sum, x));
    sum.backward(grad);
    EXPECT_TRUE(at::equal(x.grad(), grad)) << "of a sum alone";
    EXPECT_FALSE(norm.weight_D.grad().defined());
  });
}

// Types that the loops have no norm for, or no bias.
TEST(FusedTest, NormsAndReluOfLinearInOtherTypesAreThoseOfTheirParts) {
  struct Types {
    at::ScalarType x, y, parameters, result;
  };
  for (const Types& types : {Types{at::kDouble, at::kFloat, at::kDouble, at::kDouble},
                             Types{at::kDouble, at::kFloat, at::kDouble, at::kFloat},
                             Types{at::kDouble, at::kBFloat16, at::kDouble, at::kBFloat16},
                             Types{at::kBFloat16, at::kBFloat16, at::kBFloat16, at::kBFloat16},
                             Types{at::kBFloat16, at::kBFloat16, at::kFloat, at::kFloat}}) {
    SCOPED_TRACE(c10::str(c10::toString(types.x), " and ", c10::toString(types.y)));
    torch::manual_seed(7);
    const Tensors operands{at::randn({6, 37}).to(types.x), at::randn({6, 37}).to(types.y),
                           at::randn({37}).to(types.parameters),
                           at::randn({37}).to(types.parameters)};
    const auto parts = [&](const Tensors& of) {
      DropoutStream stream{.seed = 4};
      const at::Tensor sum = add_dropout(of[0], of[1], 0.5, stream);
      return Tensors{sum, at::layer_norm(sum, {37}, of[2], of[3]).to(types.result)};
    };
    const Tensors found = with_gradients(operands, norm_of_sum(types.result), slope_of_waves);
    EXPECT_EQ(found[0].scalar_type(), types.x);
    EXPECT_EQ(found[1].scalar_type(), types.result);
    expect_equal(found, with_gradients(operands, parts, slope_of_waves));
  }
  for (const auto& [type, of_bias] :
       {std::pair{at::kBFloat16, at::kBFloat16}, std::pair{at::kFloat, at::kDouble}}) {
    const Tensors operands{at::randn({6, 37}).to(type), at::randn({20, 37}),
                           at::randn({20}).to(of_bias)};
    const auto parts = [type = type](const Tensors& of) {
      DropoutStream stream{.seed = 4};
      return Tensors{relu_dropout(linear(of[0], of[1], of[2], type), 0.5, stream)};
    };
    expect_equal(with_gradients(operands, relu_of_linear(type), slope_of_waves),
                 with_gradients(operands, parts, slope_of_waves));
  }
}

// By weight, the gradients of an embedding, a linear layer, one with ReLU, and the loss of `rows`.
std::vector<at::Tensor> gradients_of_weights(at::ScalarType type, int64_t rows, bool offered) {
  torch::manual_seed(5);
  const std::vector<at::Tensor> weights{leaf({9, 16}, at::kFloat), leaf({16, 16}, at::kFloat),
                                        leaf({16, 16}, at::kFloat), leaf({9, 16}, at::kFloat)};
  std::vector<at::Tensor> memory;
  optim::GradientMemory offers;
  for (const at::Tensor& each : weights) {
    const at::Tensor& here = memory.emplace_back(at::full(each.sizes(), NAN));
    if (!offered) continue;
    offers.offer(each, [here] {
      return at::empty({0}).set_(here.storage(), 0, here.sizes(), here.strides());
    });
  }
  const at::Tensor ids = at::randint(9, {rows}, at::kLong);
  DropoutStream stream;
  at::Tensor x = linear(nmt::embedding(weights[0], ids), weights[1], {}, type);
  x = linear_relu_dropout(x, weights[2], at::zeros({16}).to(type), {.type = type}, stream);
  smoothed_cross_entropy(x, weights[3], ids, 0.1).loss.backward(at::scalar_tensor(0.25));
  std::vector<at::Tensor> found;
  for (size_t i = 0; i < weights.size(); ++i) {
    found.push_back(weights[i].grad());
    EXPECT_EQ(found[i].const_data_ptr() == memory[i].const_data_ptr(), offered) << i;
  }
  return found;
}

// The loss of 1,500 rows is one of two chunks.
TEST(FusedTest, GradientsOfWeightsAreWrittenWhereTheyAreWanted) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const int64_t rows : {5, 1500}) {
      const auto own = gradients_of_weights(type, rows, false);
      const auto offered = gradients_of_weights(type, rows, true);
      for (size_t i = 0; i < own.size(); ++i) {
        EXPECT_GT(own[i].abs().max().item<float>(), 0) << i;
        EXPECT_TRUE(at::equal(own[i], offered[i])) << type << " " << rows << " rows, weight " << i;
      }
    }
  }
}

TEST(FusedTest, TheLossComputesNoGradientOfAWeightThatTakesNone) {
  for (const int64_t rows : {5, 1500}) {
    const at::Tensor hidden = leaf({rows, 16}, at::kFloat), plain = leaf({rows, 16}, at::kFloat);
    plain.set_data(hidden.detach().clone());
    const at::Tensor words = at::randn({9, 16}), same = words.clone().requires_grad_(true);
    const at::Tensor ids = at::randint(9, {rows}, at::kLong);
    smoothed_cross_entropy(hidden, words, ids, 0.1).loss.backward();
    smoothed_cross_entropy(plain, same, ids, 0.1).loss.backward();
    EXPECT_TRUE(at::equal(hidden.grad(), plain.grad())) << rows;
    EXPECT_FALSE(words.grad().defined());
    EXPECT_TRUE(same.grad().defined());
  }
}

TEST(FusedTest, AddDropoutComputesNoGradientOfAYThatTakesNone) {
  const at::Tensor x = leaf({4, 9}, at::kFloat), y = at::randn({4, 9});
  const test::HostLaunches cuda;
  DropoutStream stream;
  const at::Tensor sum = add_dropout(x, y, 0.5, stream);
  const int calls = cuda.calls();
  EXPECT_GT(calls, 0);
  sum.backward(at::ones({4, 9}));
  EXPECT_EQ(cuda.calls(), calls);
  EXPECT_TRUE(at::equal(x.grad(), at::ones({4, 9})));
}

}  // namespace fused_test
}  // namespace cohort::nmt
