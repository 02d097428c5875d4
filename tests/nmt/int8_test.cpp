// SPDX-License-Identifier: Apache-2.0
// 8-bit products against sums of 64-bit whole numbers, bit for bit; and models that compute with them.
#include <ATen/Parallel.h>
#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <string>
#include <torch/types.h>
#include <utility>
#include <vector>

#include "cohort/nmt/fused.h"
#include "cohort/nmt/int8_matrix.h"
#include "cohort/nmt/kernels/cpu/loops.h"
#include "cohort/nmt/search.h"
#include "cohort/train/checkpoint.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/message_of.h"
#include "tests/support/sentences.h"

namespace cohort::nmt {
namespace int8_test {

template <class Body>
void in_every_table(const Body& body) {
  for (const Loops* const* table = supported_loops(); *table != nullptr; ++table) {
    use_loops(**table);
    SCOPED_TRACE((*table)->name);
    torch::manual_seed(8);
    body();
  }
  use_loops(*supported_loops()[0]);
}

// What int8_matrix.h says, by operations of ATen.
Int8Rows plainly_quantized(const at::Tensor& rows) {
  const at::Tensor top = rows.abs().amax(1);
  return {at::round(rows * (127 / top).unsqueeze(1)).to(at::kChar), top / 127};
}

at::Tensor plain_product(const at::Tensor& x, const Int8Rows& w, const at::Tensor& bias) {
  const Int8Rows rows = plainly_quantized(x);
  // Sums of at most 2,048 products of 14 bits are exact in float64.
  const at::Tensor sums =
      at::mm(rows.values.to(at::kDouble), w.values.to(at::kDouble).t()).to(at::kFloat).contiguous();
  const at::Tensor scales = rows.scales.unsqueeze(1) * w.scales;
  if (!bias.defined()) return sums * scales;
  const at::Tensor out = at::empty_like(sums);
  for (int64_t i = 0; i < out.numel(); ++i) {
    out.mutable_data_ptr<float>()[i] =
        std::fma(sums.const_data_ptr<float>()[i], scales.const_data_ptr<float>()[i],
                 bias.const_data_ptr<float>()[i % bias.numel()]);
  }
  return out;
}

TEST(Int8MatrixTest, InEveryTableEqualsSumsOfWholeNumbers) {
  in_every_table([] {
    for (const int64_t in : {1, 3, 64, 65, 130, 2048}) {
      for (const int64_t out : {1, 15, 64, 200}) {
        const at::Tensor weight = at::randn({out, in});
        const Int8Rows rows = quantize_rows("w", weight);
        const Int8Rows expected = plainly_quantized(weight);
        EXPECT_TRUE(at::equal(rows.values, expected.values));
        EXPECT_TRUE(at::equal(rows.scales, expected.scales));
        const Int8Matrix matrix(rows);
        const at::Tensor bias = at::randn({out});
        for (const int64_t count : {1, 2, 17, 67}) {
          const at::Tensor x = 3 * at::randn({count, in});
          SCOPED_TRACE(std::to_string(count) + " rows, " + std::to_string(in) + " to " +
                       std::to_string(out));
          EXPECT_TRUE(at::equal(matrix.multiply(x, bias, 0, out), plain_product(x, rows, bias)));
          EXPECT_TRUE(at::equal(matrix.multiply(x, {}, 0, out), plain_product(x, rows, {})));
        }
      }
    }
  });
}

// Where every product is of the greatest numbers, kernels with 16-bit sums would overflow.
TEST(Int8MatrixTest, TheGreatestNumbersDoNotOverflow) {
  in_every_table([] {
    for (const int64_t in : {64, 4096, 65536}) {
      const Int8Matrix matrix(quantize_rows("w", at::cat({at::ones({1, in}), -at::ones({1, in})})));
      const at::Tensor y = matrix.multiply(at::ones({1, in}), {}, 0, 2);
      const float expected = static_cast<float>(127 * 127 * in) * ((1.0F / 127) * (1.0F / 127));
      EXPECT_EQ(y[0][0].item<float>(), expected);
      EXPECT_EQ(y[0][1].item<float>(), -expected);
    }
  });
}

TEST(Int8MatrixTest, ARowDependsOnNothingElse) {
  const int threads = at::get_num_threads();
  in_every_table([] {
    const Int8Matrix matrix(quantize_rows("w", at::randn({777, 520})));
    const at::Tensor bias = at::randn({777});
    const at::Tensor x = at::randn({10, 15, 520});
    const at::Tensor all = matrix.multiply(x, bias, 0, 777);
    ASSERT_EQ(all.sizes(), at::IntArrayRef({10, 15, 777}));
    const at::Tensor flat = x.view({150, 520}), all_flat = all.view({150, 777});
    for (const int used : {1, 3}) {
      at::set_num_threads(used);
      for (const int64_t rows : {1, 2, 3, 4, 31, 64, 65, 149}) {
        EXPECT_TRUE(at::equal(matrix.multiply(flat.narrow(0, 150 - rows, rows), bias, 0, 777),
                              all_flat.narrow(0, 150 - rows, rows)))
            << rows << " rows, " << used << " threads";
      }
      for (const auto& [first, count] : std::vector<std::pair<int64_t, int64_t>>{
               {0, 1}, {63, 2}, {64, 64}, {100, 333}, {776, 1}})
        EXPECT_TRUE(at::equal(matrix.multiply(flat, bias.narrow(0, first, count), first, count),
                              all_flat.narrow(1, first, count)))
            << count << " from " << first;
    }
  });
  at::set_num_threads(threads);
}

TEST(Int8MatrixTest, ScoresAreTheProductInBlocks) {
  in_every_table([] {
    for (const int64_t out : {1, 64, 100, 1000}) {
      const Int8Matrix matrix(quantize_rows("w", at::randn({out, 70})));
      const at::Tensor x = at::randn({67, 70});
      const at::Tensor product = matrix.multiply(x, {}, 0, out);
      const LogProbs expected(product), found(matrix.scores(x, /*with_sums=*/true)),
          bare(matrix.scores(x, /*with_sums=*/false));
      const std::vector<int64_t> banned{0, 2};
      for (const int64_t row : {0, 1, 66}) {
        const int64_t last = out - 1;
        // Two sums of exponentials of differences up to 30, each of `out` terms.
        const double bound = 2 * (3 * 30 + 4 + static_cast<double>(out)) * 0x1p-24;
        EXPECT_NEAR(found.at(row, last), expected.at(row, last), bound);
        EXPECT_EQ(bare.at(row, last), static_cast<double>(product[row][last].item<float>()));
        for (const int64_t count : {1, 5, 2000}) {
          const auto best = expected.greatest(row, count, banned);
          const auto same = found.greatest(row, count, banned);
          const auto scores = bare.greatest(row, count, banned);
          ASSERT_EQ(same.size(), best.size());
          ASSERT_EQ(scores.size(), best.size());
          for (size_t i = 0; i < best.size(); ++i) {
            EXPECT_EQ(same[i].column, best[i].column);
            EXPECT_EQ(scores[i].column, best[i].column);
            EXPECT_NEAR(same[i].log_prob, best[i].log_prob, bound);
          }
        }
        EXPECT_EQ(found.all(row, banned).size(), expected.all(row, banned).size());
      }
    }
    // One column behind the first block: a sum times an infinite product of scales, or 0 times that.
    for (const float x0 : {1e30F, 0.0F}) {
      at::Tensor weight = at::zeros({150, 2}), x = at::tensor({x0, 1e30F}).unsqueeze(0);
      weight.select(1, 0).fill_(1);
      weight[100] = at::tensor({1e30F, 0.0F});
      const Int8Matrix large(quantize_rows("w", weight));
      ASSERT_EQ(at::isfinite(large.multiply(x, {}, 0, 150)).sum().item<int64_t>(), 149);
      for (const bool with_sums : {true, false}) {
        EXPECT_TRUE(test::message_of<c10::Error>([&] {
                      LogProbs{large.scores(x, with_sums)};
                    }).starts_with("the model's scores are not finite: "));
      }
    }
    at::Tensor bad = at::randn({3, 70});
    bad[1][0] = std::nan("");
    const Int8Matrix matrix(quantize_rows("w", at::randn({5, 70})));
    for (const bool with_sums : {true, false})
      EXPECT_THROW(LogProbs{matrix.scores(bad, with_sums)}, c10::Error);
  });
}

TEST(Int8MatrixTest, RunsInGeneratedKernelsWhereTheProcessorHasThem) {
  if (!__builtin_cpu_supports("avx512vnni")) GTEST_SKIP() << "no AVX512-VNNI";
  EXPECT_TRUE(Int8Matrix::uses_brgemm());
}

TEST(Int8MatrixTest, RowsWithoutASizeAreNothingAndBadOnesAreNaN) {
  in_every_table([] {
    at::Tensor x = at::randn({4, 70});
    x[1] = 0;
    x[2][69] = 1e-37;
    x[2].narrow(0, 0, 69).zero_();
    x[3][33] = std::nan("");
    const Int8Matrix matrix(quantize_rows("w", at::randn({5, 70})));
    const at::Tensor y = matrix.multiply(x, {}, 0, 5);
    EXPECT_TRUE(at::isfinite(y[0]).all().item<bool>());
    EXPECT_EQ(y.narrow(0, 1, 2).count_nonzero().item<int64_t>(), 0);
    EXPECT_TRUE(at::isnan(y[3]).all().item<bool>());
    x[3][33] = -std::numeric_limits<float>::infinity();
    EXPECT_TRUE(at::isnan(matrix.multiply(x, {}, 0, 5)[3]).all().item<bool>());
  });
}

TEST(Int8MatrixTest, BadNumbersAndShapesAreRefused) {
  at::Tensor weight = at::ones({3, 4});
  weight[2][1] = std::nan("");
  EXPECT_EQ(test::message_of<std::exception>([&] { quantize_rows("linear.weight", weight); }),
            "linear.weight: expected finite numbers, got NaN or infinity in row 2");
  const Int8Rows rows = quantize_rows("w", at::ones({3, 4}));
  EXPECT_THROW(Int8Matrix({rows.values, at::ones({4})}), c10::ValueError);
  EXPECT_THROW(Int8Matrix({rows.values.to(at::kInt), rows.scales}), c10::ValueError);
  EXPECT_THROW(Int8Matrix({at::zeros({1, 65537}, at::kChar), at::ones({1})}), c10::ValueError);
  const Int8Matrix matrix(rows);
  EXPECT_THROW(matrix.multiply(at::ones({1, 5}), {}, 0, 3), c10::ValueError);
  EXPECT_THROW(matrix.multiply(at::ones({1, 4}, at::kBFloat16), {}, 0, 3), c10::ValueError);
  EXPECT_THROW(matrix.multiply(at::ones({1, 4}), {}, 1, 3), c10::ValueError);
  EXPECT_THROW(matrix.multiply(at::ones({1, 4}), at::ones({2}), 0, 3), c10::ValueError);
}

Transformer made_model(bool tied_all = false, Precision precision = Precision::kFloat32) {
  auto options = test::tiny_options();
  options.tied_embeddings_all = options.tied_embeddings = tied_all;
  options.dim_ffn = 37;
  Transformer model(options, precision);
  model->initialise(3);
  model->eval();
  return model;
}

TEST(Int8ModelTest, HasTheRowsOfEachWeightAndACopyOfEverythingElse) {
  for (const bool tied : {false, true}) {
    const Transformer model = made_model(tied), quantized = quantize(model);
    const auto given = model->named_parameters();
    const auto buffers = quantized->named_buffers();
    size_t num_found = 0;
    for (const auto& item : given) {
      const std::string& name = item.key();
      if (const at::Tensor* same = quantized->named_parameters().find(name)) {
        EXPECT_TRUE(at::equal(*same, item.value())) << name;
      } else {
        const Int8Rows rows = quantize_rows(name, item.value());
        EXPECT_TRUE(at::equal(buffers[name], rows.values)) << name;
        EXPECT_TRUE(at::equal(buffers[name + "_scale"], rows.scales)) << name;
      }
      ++num_found;
    }
    // Two attentions and two products of the encoder's layers, and so on; two tensors for each.
    EXPECT_EQ(buffers.size(), 2U * (2 * 4 + 2 * 6 + 1));
    EXPECT_EQ(num_found,
              quantized->named_parameters().size() + buffers.size() / 2 - (tied ? 1 : 0));
    if (tied) {
      EXPECT_TRUE(
          at::equal(buffers["generator.weight"], quantize_rows("", given["embedding"]).values));
    }
  }
}

TEST(Int8ModelTest, AProjectionIsTheMatrixsProduct) {
  const auto context = std::make_shared<LayerContext>();
  context->precision = Precision::kInt8;
  Projection projection(ProjectionShape{.in = 20, .out = 70, .bias = true}, context);
  projection->eval();
  const at::NoGradGuard no_grad;
  const at::Tensor weight = at::randn({70, 20}), bias = at::randn({70});
  const Int8Rows rows = quantize_rows("w", weight);
  projection->weight.copy_(rows.values);
  projection->weight_scale.copy_(rows.scales);
  projection->bias.copy_(bias);
  const at::Tensor x = at::randn({3, 2, 20});
  const at::Tensor expected = plain_product(x.view({6, 20}), rows, bias).view({3, 2, 70});
  EXPECT_TRUE(at::equal(projection->forward(x), expected));
  EXPECT_TRUE(at::equal(projection->part(x, 40, 30), expected.narrow(2, 40, 30)));
  // A weight that has changed is packed again.
  projection->weight.copy_(rows.values.neg());
  EXPECT_TRUE(at::equal(
      projection->forward(x),
      plain_product(x.view({6, 20}), {rows.values.neg(), rows.scales}, bias).view({3, 2, 70})));
}

TEST(Int8ModelTest, ATranslationDoesNotDependOnItsBatch) {
  Transformer model = quantize(made_model());
  const auto sentences = test::make_sentences(21, 5);
  const auto all = test::make_test_batch(sentences);
  for (const int64_t beam_size : {1, 4}) {
    const SearchOptions options{.beam_size = beam_size, .normalize = 1, .max_length = 12};
    const auto together = search(model, all.source_BS, all.source_lengths_B, options);
    for (size_t i = 0; i < sentences.size(); ++i) {
      const auto one = test::make_test_batch({sentences[i]});
      const auto alone = search(model, one.source_BS, one.source_lengths_B, options);
      ASSERT_EQ(alone[0].size(), together[i].size());
      for (size_t k = 0; k < alone[0].size(); ++k) {
        EXPECT_EQ(alone[0][k].tokens, together[i][k].tokens);
        EXPECT_EQ(alone[0][k].log_prob, together[i][k].log_prob);
      }
    }
    if (beam_size > 1) continue;
    SearchOptions unscored = options;
    unscored.scores = false;
    const auto bare = search(model, all.source_BS, all.source_lengths_B, unscored);
    for (size_t i = 0; i < sentences.size(); ++i)
      EXPECT_EQ(bare[i].front().tokens, together[i].front().tokens);
  }
}

// Rounding moves a log p, but by much less than another model's differs.
TEST(Int8ModelTest, ScoresAsTheModelThatItIsMadeOf) {
  Transformer model = made_model();
  Transformer quantized = quantize(model);
  const auto batch = test::make_test_batch(test::make_sentences(7, 3));
  const at::Tensor expected = model->log_probabilities(batch);
  const at::Tensor found = quantized->log_probabilities(batch);
  const double difference = (found - expected).abs().max().item<double>();
  EXPECT_GT(difference, 0) << "nothing was rounded";
  EXPECT_LT(difference, 0.05);
  EXPECT_GT((expected - expected.mean()).abs().max().item<double>(), 0.5);
}

// The sum along search's way, which keeps keys and values and takes scores in blocks, is that of one pass.
TEST(Int8ModelTest, ASearchSumsTheScores) {
  Transformer model = quantize(made_model());
  const auto sentences = test::make_sentences(7, 3);
  const auto sources = test::make_test_batch(sentences);
  for (const int64_t beam_size : {1, 4}) {
    const auto all = search(model, sources.source_BS, sources.source_lengths_B,
                            {.beam_size = beam_size, .max_length = 12});
    for (size_t i = 0; i < sentences.size(); ++i) {
      for (const Hypothesis& hypothesis : all[i]) {
        test::Sentence forced{.source = sentences[i].source, .target = {}};
        forced.target.assign(hypothesis.tokens.begin(), hypothesis.tokens.end());
        const auto batch = test::make_test_batch({forced});
        EXPECT_NEAR(model->log_probabilities(batch).sum().item<double>(), hypothesis.log_prob,
                    1e-3);
      }
    }
  }
}

TEST(Int8ModelTest, WhatItCannotDoIsRefusedByName) {
  Transformer model = quantize(made_model());
  const auto batch = test::make_test_batch(test::make_sentences(2, 3));
  const std::string inference = "an int8 model: expected inference on the CPU";
  const at::NoGradGuard no_grad;
  model->train();
  EXPECT_NE(test::message_of<std::exception>([&] { model->forward(batch); }).find(inference),
            std::string::npos);
  model->eval();
  EXPECT_NE(test::message_of<std::exception>([&] {
              model->initialise(1);
            }).find("expected values from a checkpoint"),
            std::string::npos);
  EXPECT_NE(test::message_of<std::exception>([&] {
              quantize(model);
            }).find("expected a float32 model, got an int8 one"),
            std::string::npos);
  EXPECT_EQ(
      test::message_of<std::exception>([] { check_precision(Precision::kInt8, /*on_cpu=*/false); }),
      "--precision int8: expected --device cpu");
  EXPECT_EQ(test::message_of<std::exception>(
                [] { Transformer(test::tiny_options(), Precision::kInt8, c10::kMeta); }),
            "an int8 model: expected the whole of it on the CPU");

  check_scales(model, "folder");
  model->named_buffers()["decoder.layers.1.linear1.weight_scale"][36] = std::nan("");
  EXPECT_EQ(
      test::message_of<std::exception>([&] { check_scales(model, "folder"); }),
      "folder: decoder.layers.1.linear1.weight_scale[36]: expected a finite scale that is not "
      "negative, got nan");
  Transformer bad = made_model();
  bad->named_parameters()["encoder.layers.0.self_attn.in_proj.weight"][5][1] = std::nan("");
  EXPECT_EQ(test::message_of<std::exception>([&] { quantize(bad); }),
            "encoder.layers.0.self_attn.in_proj.weight: expected finite numbers, got NaN or "
            "infinity in row 5");
}

TEST(Int8ModelTest, IsReadFromItsCheckpointAndByNoOtherModel) {
  const TemporaryFolder folder;
  Transformer model = quantize(made_model(true));
  train::save_checkpoint(folder.path().string(), *model, 7, {});
  Transformer read(model->options(), Precision::kInt8);
  train::load_checkpoint(folder.path().string(), *read);
  for (const auto& item : train::state_of(*model)) {
    const auto found = train::state_of(*read);
    const auto same = std::ranges::find(found, item.first, &train::NamedTensors::value_type::first);
    ASSERT_NE(same, found.end());
    EXPECT_TRUE(at::equal(same->second, item.second)) << item.first;
  }
  Transformer other = made_model(true);
  const std::string error = test::message_of<std::exception>(
      [&] { train::load_checkpoint(folder.path().string(), *other); });
  EXPECT_NE(error.find("weight is I8"), std::string::npos) << error;
  EXPECT_NE(error.find("expected F32"), std::string::npos) << error;
}

}  // namespace int8_test
}  // namespace cohort::nmt
