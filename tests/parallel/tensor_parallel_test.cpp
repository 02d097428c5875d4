// SPDX-License-Identifier: Apache-2.0
// The pieces of tensor parallelism against the same formulas on whole matrices, in float64.
#include "cohort/parallel/tensor_parallel.h"

#include <gtest/gtest.h>
#include <memory>
#include <torch/nn/functional/loss.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/base/tensor_part.h"
#include "cohort/translate/tensor_memory.h"

#include "tests/support/ranks.h"

namespace cohort::parallel {
namespace tensor_parallel_test {

// Sums of at most some hundred terms near 1, in another order: 100 x 2^-53, and a few of them in a
// row.
constexpr double kRounding = 1e-13;

double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

at::Tensor leaf(at::Tensor values) {
  return values.detach().clone().requires_grad_(true);
}

at::Tensor rows_of(const at::Tensor& whole, const comm::ProcessGroup& group, int64_t dim = 0) {
  const auto [begin, end] = cut_of(whole.size(dim), group.rank(), group.size());
  return whole.narrow(dim, begin, end - begin);
}

// Whether all ranks have the same bits.
bool is_replicated(const at::Tensor& tensor, const comm::ProcessGroup& group) {
  for (const at::Tensor& other : group.all_gather(tensor.detach().contiguous()))
    if (!at::equal(other, tensor)) return false;
  return true;
}

void expect_two_products(const comm::ProcessGroup& group) {
  torch::manual_seed(1);
  const auto random = [](at::IntArrayRef shape) { return at::randn(shape, at::kDouble); };
  const at::Tensor x = leaf(random({3, 5, 6})), first = leaf(random({9, 6})),
                   first_bias = leaf(random({9})), second = leaf(random({4, 9})),
                   second_bias = leaf(random({4})), grad = random({3, 5, 4});
  const at::Tensor plain =
      at::linear(at::tanh(at::linear(x, first, first_bias)), second, second_bias);
  plain.backward(grad);

  const at::Tensor own_x = leaf(x), own_first = leaf(rows_of(first, group)),
                   own_first_bias = leaf(rows_of(first_bias, group)),
                   own_second = leaf(rows_of(second, group, 1)),
                   own_second_bias = leaf(second_bias);
  const at::Tensor h = at::tanh(column_parallel_linear(own_x, own_first, own_first_bias, group));
  const at::Tensor y = row_parallel_linear(h, own_second, own_second_bias, group);
  EXPECT_LE(difference(y, plain), kRounding);
  EXPECT_TRUE(is_replicated(y, group));
  y.backward(grad);
  EXPECT_LE(difference(own_x.grad(), x.grad()), kRounding);
  EXPECT_TRUE(is_replicated(own_x.grad(), group));
  EXPECT_LE(difference(own_first.grad(), rows_of(first.grad(), group)), kRounding);
  EXPECT_LE(difference(own_first_bias.grad(), rows_of(first_bias.grad(), group)), kRounding);
  EXPECT_LE(difference(own_second.grad(), rows_of(second.grad(), group, 1)), kRounding);
  EXPECT_TRUE(at::equal(own_second_bias.grad(), second_bias.grad()));
}

TEST(TensorParallelTest, TwoProductsOnTwoRanksEqualTheWholeOnes) {
  test::ranks(2, expect_two_products);
}

TEST(TensorParallelTest, TwoProductsOnFourRanksEqualTheWholeOnes) {
  test::ranks(4, expect_two_products);
}

TEST(TensorParallelTest, ColumnsOfAllRanksComeTogether) {
  test::ranks(3, [](const comm::ProcessGroup& group) {
    const at::Tensor whole = at::arange(2 * 7, at::kDouble).view({2, 7});
    const at::Tensor own = leaf(rows_of(whole, group, 1));
    const at::Tensor all = gather_from_group(own, 7, group);
    EXPECT_TRUE(at::equal(all, whole));
    all.backward(whole + 1);
    EXPECT_TRUE(at::equal(own.grad(), rows_of(whole + 1, group, 1)));
  });
}

// 11 rows: the ranks have different numbers of them.
TEST(TensorParallelTest, AnEmbeddingCutByVocabularyIsTheWholeTables) {
  test::ranks(3, [](const comm::ProcessGroup& group) {
    torch::manual_seed(2);
    const at::Tensor table = leaf(at::randn({11, 4}, at::kDouble));
    const at::Tensor ids = at::randint(11, {3, 8}, at::kLong);
    const at::Tensor grad = at::randn({3, 8, 4}, at::kDouble);
    const at::Tensor plain = at::embedding(table, ids);
    plain.backward(grad);
    const at::Tensor own = leaf(rows_of(table, group));
    const at::Tensor rows = vocabulary_parallel_embedding(own, ids, 11, group);
    EXPECT_TRUE(at::equal(rows, plain));
    rows.backward(grad);
    EXPECT_LE(difference(own.grad(), rows_of(table.grad(), group)), kRounding);
  });
}

// 1,100 rows are two chunks; 30 is no multiple of 4 ranks.
void expect_cross_entropy(const comm::ProcessGroup& group) {
  torch::manual_seed(3);
  constexpr int64_t kVocabulary = 30;
  const at::Tensor hidden = leaf(at::randn({1100, 6}, at::kDouble)),
                   weight = leaf(at::randn({kVocabulary, 6}, at::kDouble) * 3);
  const at::Tensor labels = at::randint(kVocabulary, {1100}, at::kLong);
  namespace F = torch::nn::functional;
  const auto options = F::CrossEntropyFuncOptions().reduction(torch::kSum);
  const at::Tensor logits = at::mm(hidden, weight.t());
  const at::Tensor plain =
      F::cross_entropy(logits, labels, F::CrossEntropyFuncOptions(options).label_smoothing(0.1));
  (plain * 0.25).backward();

  const at::Tensor own_hidden = leaf(hidden), own_weight = leaf(rows_of(weight, group));
  const auto sums =
      vocabulary_parallel_cross_entropy(own_hidden, own_weight, labels, 0.1, kVocabulary, group);
  // 1,100 losses near 10, each off by some 1e-15.
  EXPECT_LE(difference(sums.loss, plain), 2e-11);
  EXPECT_LE(difference(sums.nll, F::cross_entropy(logits, labels, options)), 2e-11);
  EXPECT_TRUE(is_replicated(sums.loss, group));
  (sums.loss * 0.25).backward();
  EXPECT_LE(difference(own_hidden.grad(), hidden.grad()), kRounding);
  EXPECT_TRUE(is_replicated(own_hidden.grad(), group));
  EXPECT_LE(difference(own_weight.grad(), rows_of(weight.grad(), group)), 1e-12);

  const at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(vocabulary_parallel_cross_entropy(hidden, rows_of(weight, group), labels,
                                                          0.1, kVocabulary, group)
                            .loss,
                        sums.loss));
}

TEST(TensorParallelTest, CrossEntropyCutByVocabularyOnTwoRanksEqualsAtens) {
  test::ranks(2, expect_cross_entropy);
}

TEST(TensorParallelTest, CrossEntropyCutByVocabularyOnFourRanksEqualsAtens) {
  test::ranks(4, expect_cross_entropy);
}

// Scores of which one rank's are all far below the others': its share of the sum must vanish, not
// become NaN.
TEST(TensorParallelTest, CrossEntropyHoldsGreatScores) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    const at::Tensor hidden = at::ones({2, 1}, at::kDouble);
    const at::Tensor weight =
        at::tensor({-4000.0, -4001.0, 5000.0, 4999.0}, at::kDouble).view({4, 1});
    const at::Tensor labels = at::tensor({2, 3}, at::kLong);
    const auto sums =
        vocabulary_parallel_cross_entropy(hidden, rows_of(weight, group), labels, 0, 4, group);
    const double log_sum = std::log1p(std::exp(-1.0));
    EXPECT_NEAR(sums.nll.item<double>(), log_sum + log_sum + 1, 1e-12);
  });
}

TEST(TensorParallelTest, SumsOfProductsAndRowsNeedNoCopy) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    constexpr int64_t kMiB = 1 << 20;
    const at::Tensor x = at::ones({256, 512}), weight = leaf(at::ones({1024, 512}));
    const at::Tensor ids = at::arange(256, at::kLong).remainder(8);
    const auto product = [&] { row_parallel_linear(x, weight, {}, group); };
    const auto rows = [&] {
      vocabulary_parallel_embedding(leaf(at::ones({4, 1024})), ids, 8, group);
    };
    EXPECT_LE(translate::peak_tensor_bytes(product), kMiB + kMiB / 4) << "[256, 1024]";
    EXPECT_LE(translate::peak_tensor_bytes(rows), kMiB + kMiB / 4) << "[256, 1024]";
  });
}

TEST(TensorParallelTest, ASumInPlaceMayBeChangedInPlace) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    const at::Tensor x = leaf(at::ones({2, 3})), weight = leaf(at::ones({4, 3}));
    at::Tensor y = row_parallel_linear(x, weight, {}, group);
    EXPECT_TRUE(at::equal(y, at::full({2, 4}, 6.0)));
    y.mul_(2).sum().backward();
    EXPECT_TRUE(at::equal(x.grad(), at::full({2, 3}, 8.0)));
    EXPECT_TRUE(at::equal(weight.grad(), at::full({4, 3}, 4.0)));
  });
}

TEST(TensorParallelTest, ShapesThatDoNotFitAreRefused) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    EXPECT_THROW(
        vocabulary_parallel_embedding(at::ones({3, 2}), at::zeros({1}, at::kLong), 8, group),
        c10::ValueError);
    EXPECT_THROW(gather_from_group(at::ones({1, 3}), 9, group), c10::ValueError);
    EXPECT_THROW(vocabulary_parallel_cross_entropy(at::ones({2, 3}), at::ones({4, 2}),
                                                   at::zeros({2}, at::kLong), 0, 8, group),
                 c10::ValueError);
  });
}

TEST(TensorParallelTest, AGraphKeepsItsGroup) {
  comm::ProcessGroup group(comm::RankInfo{});
  const at::Tensor x = leaf(at::ones({2, 3}));
  const at::Tensor weight = leaf(at::ones({4, 3}));
  const at::Tensor loss = column_parallel_linear(x, weight, {}, group).sum();
  const at::Tensor others = reduce_from_group(x, group) + gather_from_group(x, 3, group);
  group = {};
  loss.backward();
  EXPECT_TRUE(x.grad().equal(at::full({2, 3}, 4.0)));
  others.sum().backward();
  EXPECT_TRUE(x.grad().equal(at::full({2, 3}, 6.0)));
}

}  // namespace tensor_parallel_test
}  // namespace cohort::parallel
