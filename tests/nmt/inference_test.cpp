// SPDX-License-Identifier: Apache-2.0
// What inference computes by its own operations, against ATen's; and that a row's result is a
// function of that row: bit for bit the same whatever other rows there are.
#include <ATen/Parallel.h>
#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <random>
#include <torch/types.h>

#include "cohort/nmt/fused.h"
#include "cohort/nmt/kernels/cpu/loops.h"
#include "cohort/nmt/prepacked.h"
#include "cohort/nmt/transformer.h"

#include "tests/support/sentences.h"

namespace cohort::nmt {
namespace inference_test {

constexpr double kU = 0x1p-24;  // half the distance of 1 to its neighbour in float32

template <class Body>
void in_every_table(const Body& body) {
  for (const Loops* const* table = supported_loops(); *table != nullptr; ++table) {
    use_loops(**table);
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      SCOPED_TRACE(std::string((*table)->name) + " " + c10::toString(type));
      torch::manual_seed(6);
      body(type);
    }
  }
  use_loops(*supported_loops()[0]);
}

struct AttentionCase {
  at::Tensor queries_ND, rows_RE;
  SeenRows seen;
};

// Six queries that see 1, 2, ... or `most` of the rows, in no order and some of them twice.
AttentionCase make_case(int64_t width, size_t most, at::ScalarType type) {
  AttentionCase c{.queries_ND = (2 * at::randn({6, 3 * width})).to(type).narrow(1, 0, width),
                  .rows_RE = (2 * at::randn({40, 2 * width})).to(type),
                  .seen = {}};
  std::mt19937 random(static_cast<uint32_t>(most));
  const auto row_bytes = static_cast<size_t>(2 * width) * c.rows_RE.element_size();
  for (size_t n = 0; n < 6; ++n) {
    const size_t count = n == 0 ? most : 1 + random() % most;
    c.seen.of_query.push_back({c.seen.rows.size(), count});
    for (size_t i = 0; i < count; ++i) {
      c.seen.rows.push_back(static_cast<const char*>(c.rows_RE.const_data_ptr()) +
                            random() % 40 * row_bytes);
    }
  }
  return c;
}

void check_attention(int64_t heads, int64_t head_width, size_t most, at::ScalarType type) {
  SCOPED_TRACE(std::to_string(heads) + " heads of " + std::to_string(head_width) + ", " +
               std::to_string(most) + " keys");
  const int64_t width = heads * head_width;
  const AttentionCase c = make_case(width, most, type);
  const at::Tensor found = attend(c.queries_ND, c.seen, heads).to(at::kDouble);
  const double scale = 1 / std::sqrt(static_cast<double>(head_width));
  const double unit = type == at::kFloat ? kU : type == at::kDouble ? 0x1p-53 : 0x1p-8;
  const double sum_unit = type == at::kDouble ? 0x1p-53 : kU;
  for (int64_t n = 0; n < 6; ++n) {
    const auto [first, count] = c.seen.of_query[static_cast<size_t>(n)];
    std::vector<at::Tensor> rows;
    for (size_t i = 0; i < count; ++i) {
      const auto offset = static_cast<const char*>(c.seen.rows[first + i]) -
                          static_cast<const char*>(c.rows_RE.const_data_ptr());
      rows.push_back(c.rows_RE.select(
          0, offset / static_cast<int64_t>(c.rows_RE.element_size()) / (2 * width)));
    }
    const at::Tensor kv = at::stack(rows).to(at::kDouble).view({-1, 2, heads, head_width});
    const at::Tensor q = c.queries_ND.select(0, n).to(at::kDouble).view({1, heads, head_width});
    const at::Tensor keys = kv.select(1, 0);
    const at::Tensor values = kv.select(1, 1);
    const at::Tensor scores = (q * keys).sum(2) * scale;  // [count, heads]
    const at::Tensor weights = at::softmax(scores, 0).unsqueeze(2);
    const at::Tensor expected = (weights * values).sum(0).view({width});
    // To first order: a score is off by a rounding a term; exp(-a) by 3 a and 4 roundings; a weight
    // by its own and the worst of the others' error and the sum's; then the mean's terms and what
    // is stored. The scale is a float32 also in float64.
    const at::Tensor score_error =
        (static_cast<double>(head_width) + 2) * sum_unit * (q * keys).abs().sum(2) * scale +
        kU * scores.abs();
    const double range = (scores.amax(0) - scores.amin(0)).max().item<double>();
    const double weight_error = 2 * score_error.max().item<double>() +
                                (6 * range + 10 + 2 * static_cast<double>(count)) * sum_unit;
    const at::Tensor bound =
        (weights * values.abs()).sum(0).view({width}) * weight_error + unit * expected.abs();
    EXPECT_TRUE(((found.select(0, n) - expected).abs() <= 1.01 * bound).all().item<bool>())
        << "query " << n << " by " << (found.select(0, n) - expected).abs().max().item<double>();
  }
}

TEST(AttendTest, InEveryTableEqualsAtens) {
  in_every_table([](at::ScalarType type) {
    // Widths below, at, between and above whole registers; keys likewise.
    for (const int64_t head_width : {1, 8, 16, 24, 32, 40, 64, 100})
      for (const size_t most : {1, 2, 15, 16, 17, 40}) check_attention(2, head_width, most, type);
    check_attention(8, 64, 33, type);
  });
  check_attention(2, 24, 17, at::kDouble);
}

TEST(AttendTest, AQuerysResultDependsOnNothingElse) {
  in_every_table([](at::ScalarType type) {
    const AttentionCase c = make_case(64, 30, type);
    const at::Tensor together = attend(c.queries_ND, c.seen, 4);
    for (int64_t n = 0; n < 6; ++n) {
      const SeenRows alone{.rows = c.seen.rows,
                           .of_query = {c.seen.of_query[static_cast<size_t>(n)]}};
      EXPECT_TRUE(at::equal(attend(c.queries_ND.narrow(0, n, 1), alone, 4).select(0, 0),
                            together.select(0, n)));
    }
  });
}

TEST(LogProbsTest, InEveryTableEqualAtensLogSoftmax) {
  in_every_table([](at::ScalarType type) {
    for (const int64_t columns : {1, 5, 255, 256, 257, 1000}) {
      const at::Tensor scores = (3 * at::randn({3, columns})).to(type);
      const at::Tensor expected = at::log_softmax(scores.to(at::kDouble), 1);
      const LogProbs log_probs(scores);
      for (int64_t n = 0; n < 3; ++n) {
        const auto all = log_probs.all(n, {});
        ASSERT_EQ(std::ssize(all), columns);
        for (int64_t c = 0; c < columns; ++c) {
          // The sum of exponentials of differences up to 30, then its logarithm in double.
          const double bound = (3 * 30 + 4 + static_cast<double>(columns)) * kU;
          EXPECT_NEAR(log_probs.at(n, c), expected[n][c].item<double>(), bound);
          EXPECT_EQ(all[static_cast<size_t>(c)].log_prob, log_probs.at(n, c));
        }
      }
    }
  });
}

TEST(LogProbsTest, TheGreatestAreASortsFirst) {
  torch::manual_seed(7);
  const std::vector<int64_t> banned{0, 2, 300};
  for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const int64_t columns : {4, 256, 3000}) {
      // Few different values: many are equal.
      const at::Tensor scores = at::randint(40, {2, columns}, at::kFloat).to(type) / 4;
      const LogProbs log_probs(scores), bare(scores, std::nullopt, /*with_sums=*/false);
      for (const int64_t count : {1, 2, 8, 13, 5000}) {
        auto expected = log_probs.all(1, banned);
        std::ranges::stable_sort(expected, std::greater{}, &Candidate::log_prob);
        expected.resize(std::min(expected.size(), static_cast<size_t>(count)));
        const auto found = log_probs.greatest(1, count, banned);
        const auto same = bare.greatest(1, count, banned);
        ASSERT_EQ(found.size(), expected.size());
        ASSERT_EQ(same.size(), expected.size());
        for (size_t i = 0; i < found.size(); ++i) {
          EXPECT_EQ(found[i].column, expected[i].column) << type << " " << columns << " " << count;
          EXPECT_EQ(found[i].log_prob, expected[i].log_prob);
          EXPECT_EQ(same[i].column, expected[i].column);
          EXPECT_EQ(same[i].log_prob, scores[1][same[i].column].item<double>());
        }
      }
    }
  }
}

TEST(LogProbsTest, ScoresThatAreNotFiniteAreRefused) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity(),
                             -std::numeric_limits<double>::infinity()}) {
      at::Tensor scores = at::randn({3, 600}).to(type);
      scores[1][511] = bad;
      for (const bool with_sums : {true, false})
        EXPECT_THROW(LogProbs(scores, std::nullopt, with_sums), c10::Error) << with_sums;
    }
  }
}

// With each table, for the instruction set decides how products are cut.
TEST(PrepackedTest, ARowsProductDoesNotDependOnTheOthers) {
  in_every_table([](at::ScalarType type) {
    for (const auto& [in, out] : std::vector<std::pair<int64_t, int64_t>>{
             {16, 48}, {128, 97}, {128, 512}, {256, 1024}, {1024, 256}, {512, 1536}, {2048, 512}}) {
      const Prepacked weight(at::randn({out, in}).to(type));
      const at::Tensor bias = at::randn({out}).to(type);
      const at::Tensor x = at::randn({300, in}).to(type);
      const at::Tensor all = weight.multiply(x, bias);
      for (const int64_t rows : {1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 64, 100, 129, 299}) {
        EXPECT_TRUE(at::equal(weight.multiply(x.narrow(0, 300 - rows, rows), bias),
                              all.narrow(0, 300 - rows, rows)))
            << in << " to " << out << ", " << rows << " rows";
      }
    }
  });
}

// The largest products of the base model, and several threads, which may share a row's sum.
TEST(PrepackedTest, NorDoesARowOfTheBaseModelsProductsOrTheNumberOfThreads) {
  const int threads = at::get_num_threads();
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    for (const auto& [in, out] :
         std::vector<std::pair<int64_t, int64_t>>{{2048, 512}, {512, 2048}, {512, 8000}}) {
      const Prepacked weight(at::randn({out, in}).to(type));
      const at::Tensor x = at::randn({600, in}).to(type);
      at::set_num_threads(1);
      const at::Tensor all = weight.multiply(x, at::Tensor());
      for (const int used : {1, 4}) {
        at::set_num_threads(used);
        for (const int64_t rows : {1, 16, 40, 64, 65, 192, 600}) {
          EXPECT_TRUE(at::equal(weight.multiply(x.narrow(0, 600 - rows, rows), at::Tensor()),
                                all.narrow(0, 600 - rows, rows)))
              << in << " to " << out << ", " << rows << " rows, " << used << " threads, " << type;
        }
      }
    }
  }
  at::set_num_threads(threads);
}

// Tiles of every height, blocks that are not whole, and sizes of 1.
TEST(PrepackedTest, InEveryTableEqualsAtensLinear) {
  const auto check = [](at::ScalarType type) {
    for (const auto& [in, out] :
         std::vector<std::pair<int64_t, int64_t>>{{70, 50}, {1, 1}, {3, 32}, {33, 95}}) {
      const at::Tensor w = at::randn({out, in}).to(type), bias = at::randn({out}).to(type);
      const Prepacked weight(w);
      for (const int64_t rows : {0, 1, 2, 3, 4, 5, 7, 9, 10, 11, 25, 26}) {
        const at::Tensor x = at::randn({2 * rows, in}).to(type).view({2, rows, in});
        const at::Tensor found = weight.multiply(x, bias).to(at::kDouble);
        const auto exact = [](const at::Tensor& t) { return t.to(at::kDouble); };
        const at::Tensor expected = at::linear(exact(x), exact(w), exact(bias));
        const at::Tensor magnitude = at::linear(exact(x.abs()), exact(w.abs()), exact(bias.abs()));
        const double stored = type == at::kBFloat16 ? 0x1p-8 : kU;
        EXPECT_EQ(found.sizes(), at::IntArrayRef({2, rows, out}));
        EXPECT_TRUE(((found - expected).abs() <=
                     stored * expected.abs() + static_cast<double>(in + 1) * kU * magnitude)
                        .all()
                        .item<bool>())
            << in << " to " << out << ", " << 2 * rows << " rows, " << type;
      }
    }
  };
  in_every_table(check);
  check(at::kDouble);
}

TEST(PrepackedTest, RowsOfAnotherSizeOrTypeAreRefused) {
  const Prepacked weight(at::ones({5, 4}));
  EXPECT_THROW(weight.multiply(at::ones({2, 3}), {}), c10::ValueError);
  EXPECT_THROW(weight.multiply(at::ones({0, 3}), {}), c10::ValueError);
  EXPECT_THROW(weight.multiply(at::ones({}), {}), c10::ValueError);
  EXPECT_THROW(weight.multiply(at::ones({2, 4}, at::kDouble), {}), c10::ValueError);
  EXPECT_THROW(weight.multiply(at::ones({2, 4}), at::ones({6})), c10::ValueError);
  EXPECT_THROW(weight.multiply(at::ones({2, 4}), at::ones({1})), c10::ValueError);
  EXPECT_THROW(weight.multiply(at::ones({2, 4}), at::ones({5}, at::kDouble)), c10::ValueError);
}

// Widths that fill no whole registers, and more elements than one thread takes.
TEST(ActivationTest, ARowsResultDependsOnNothingElse) {
  const int threads = at::get_num_threads();
  for (const int used : {1, 2, 3}) {
    at::set_num_threads(used);
    in_every_table([](at::ScalarType type) {
      DropoutStream stream;
      for (const int64_t width : {1, 37, 100, 2048}) {
        const at::Tensor x = (2 * at::randn({1200, width})).to(type);
        const auto activated = [&](const at::Tensor& rows, Activation activation) {
          return activation == Activation::kRelu   ? relu_dropout(rows, 0, stream)
                 : activation == Activation::kGelu ? gelu_dropout(rows, 0, stream)
                                                   : swish_dropout(rows, 0, stream);
        };
        for (const auto activation : {Activation::kRelu, Activation::kGelu, Activation::kSwish}) {
          const at::Tensor all = activated(x, activation);
          for (const int64_t rows : {1, 2, 3, 5, 16, 33, 501, 1199}) {
            EXPECT_TRUE(at::equal(activated(x.narrow(0, 1200 - rows, rows), activation),
                                  all.narrow(0, 1200 - rows, rows)))
                << to_string(activation) << ", " << width << " wide, " << rows << " rows";
          }
        }
      }
    });
  }
  at::set_num_threads(threads);
}

// The model's, in both precisions: the states of sentences of one length, alone and together.
TEST(InferenceTest, ASentencesStatesDoNotDependOnTheBatch) {
  const int threads = at::get_num_threads();
  const at::NoGradGuard no_grad;
  torch::manual_seed(5);
  const int64_t batch = 100, length = 11;
  const at::Tensor source = at::randint(4, test::kVocabulary, {batch, length}, at::kLong);
  const at::Tensor lengths = at::full({batch}, length, at::kLong);
  for (const auto activation : {Activation::kRelu, Activation::kGelu, Activation::kSwish}) {
    for (const auto precision : {Precision::kFloat32, Precision::kBFloat16}) {
      auto options = test::tiny_options();
      options.ffn_activation = activation;
      options.dim_ffn = 37;
      Transformer model(options, precision);
      model->initialise(3);
      model->eval();
      for (const int used : {1, 2, 3}) {
        at::set_num_threads(used);
        const at::Tensor all = model->encode(source, lengths);
        for (const int64_t rows : {1, 2, 3, 7, 16, 50, 99}) {
          const at::Tensor part =
              model->encode(source.narrow(0, batch - rows, rows), lengths.narrow(0, 0, rows));
          EXPECT_TRUE(at::equal(part, all.narrow(0, batch - rows, rows)))
              << to_string(activation) << " in " << to_string(precision) << ", " << rows
              << " sentences, " << used << " threads";
        }
      }
    }
  }
  at::set_num_threads(threads);
}

// Training's operations and inference's are different ones; in float64 they agree to rounding.
TEST(InferenceTest, TheLossEqualsTrainings) {
  Transformer model(test::tiny_options());
  model->to(at::kDouble);
  model->eval();
  const auto batch = test::make_test_batch(test::make_sentences(7, 3));
  const double trainings = std::get<1>(model->forward(batch)).item<double>();
  const at::NoGradGuard no_grad;
  // The kernel's scale is a float32: 2^-24 of scores below 1, in each of 8 attentions.
  EXPECT_NEAR(std::get<1>(model->forward(batch)).item<double>(), trainings, trainings * 8 * kU);
}

}  // namespace inference_test
}  // namespace cohort::nmt
