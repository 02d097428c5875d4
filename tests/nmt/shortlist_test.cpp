// SPDX-License-Identifier: Apache-2.0
// Candidates of a sentence, and searches among them.
#include "cohort/nmt/shortlist.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <torch/types.h>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/nmt/search.h"

#include "tests/support/message_of.h"
#include "tests/support/sentences.h"

namespace cohort::nmt {
namespace shortlist_test {

using Pieces = std::vector<int32_t>;

// Three source pieces of interest: 4 becomes 9 or 7, 5 becomes 8, the end id becomes 6.
LexicalTable small_table() {
  return {.offsets = {0, 0, 0, 0, 1, 3, 4, 4},
          .targets = {6, 9, 7, 8},
          .probabilities = {0.5F, 0.75F, 0.25F, 0.125F},
          .frequent = {11, 10},
          .target_pieces = 12};
}

TEST(ShortlistTest, CandidatesAreSpecialFrequentAndLikelyPieces) {
  const LexicalTable table = small_table();
  const std::vector<int64_t> source{4, 5, 3};
  EXPECT_EQ(Shortlist(table, {}).candidates(source), (Pieces{0, 1, 2, 3, 6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(Shortlist(table, {.first = 1, .best = 1}).candidates(source),
            (Pieces{0, 1, 2, 3, 6, 8, 9, 11}));
  EXPECT_EQ(Shortlist(table, {.first = 0, .best = 100, .prune = 0.25}).candidates(source),
            (Pieces{0, 1, 2, 3, 6, 7, 9}));
  EXPECT_EQ(Shortlist(table, {.first = 0, .best = 0}).candidates(source), (Pieces{0, 1, 2, 3}));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(Shortlist(table, {.first = kMost, .best = kMost, .prune = 0}).candidates(source),
            (Pieces{0, 1, 2, 3, 6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(Shortlist(table, {.first = -1, .best = -1}).candidates(source), (Pieces{0, 1, 2, 3}));
  LexicalTable joined = table;
  joined.joined = true;
  EXPECT_EQ(Shortlist(joined, {.first = 0, .best = 0}).candidates(source),
            (Pieces{0, 1, 2, 3, 4, 5}));
}

constexpr int64_t kWords = 1300;  // products in several blocks

TransformerOptions wide_options() {
  auto options = test::tiny_options();
  options.dim_vocab_source = options.dim_vocab_target = kWords;
  return options;
}

Transformer wide_model(Precision precision) {
  Transformer model(wide_options(), precision);
  model->initialise(7);
  const at::NoGradGuard no_grad;
  for (auto& item : model->named_parameters())
    if (item.key() == "generator.weight") item.value().mul_(4);
  model->eval();
  return model;
}

std::vector<test::Sentence> wide_sentences(int count) {
  auto sentences = test::make_sentences(count, 6);
  std::mt19937 random(2);
  for (auto& sentence : sentences)
    for (auto& token : sentence.source) token = 4 + static_cast<int64_t>(random() % (kWords - 4));
  return sentences;
}

// Each source piece has 60 targets anywhere.
std::shared_ptr<const Shortlist> wide_shortlist(int64_t best = 60) {
  LexicalTable table{.offsets = {0}, .target_pieces = kWords};
  std::mt19937 random(3);
  for (int64_t piece = 0; piece < kWords; ++piece) {
    for (int i = 0; i < 60; ++i) {
      table.targets.push_back(static_cast<int32_t>(random() % kWords));
      table.probabilities.push_back(0.01F);
    }
    table.offsets.push_back(std::ssize(table.targets));
  }
  table.frequent = {100, 50, 1299};
  return std::make_shared<const Shortlist>(table, ShortlistOptions{.best = best});
}

TEST(ShortlistTest, AScoreDoesNotDependOnWhatElseWasChosen) {
  const at::NoGradGuard no_grad;
  std::mt19937 random(5);
  for (const auto precision : {Precision::kFloat32, Precision::kBFloat16, Precision::kInt8}) {
    SCOPED_TRACE(to_string(precision));
    const auto context = std::make_shared<LayerContext>();
    context->precision = precision;
    Projection projection(ProjectionShape{.in = 512, .out = kWords}, context);
    projection->eval();
    if (precision == Precision::kInt8) {
      const Int8Rows rows = quantize_rows("w", at::randn({kWords, 512}));
      projection->weight.copy_(rows.values);
      projection->weight_scale.copy_(rows.scales);
    } else {
      projection->weight.normal_();
    }
    const at::Tensor x =
        at::randn({70, 512}).to(precision == Precision::kBFloat16 ? at::kBFloat16 : at::kFloat);
    Pieces every(kWords);
    std::iota(every.begin(), every.end(), 0);
    const at::Tensor all = projection->choose(every).multiply(x);
    for (const int64_t count : {1, 5, 512, 700}) {
      std::ranges::shuffle(every, random);
      const Pieces chosen(every.begin(), every.begin() + count);
      const at::Tensor index = at::tensor(at::ArrayRef<int32_t>(chosen)).to(at::kLong);
      for (const int64_t rows : {1, 17, 70}) {
        EXPECT_TRUE(at::equal(projection->choose(chosen).multiply(x.narrow(0, 0, rows)),
                              all.narrow(0, 0, rows).index_select(1, index)))
            << count << " columns, " << rows << " rows";
      }
    }
  }
}

// ... as if the model's vocabulary were those pieces.
TEST(ShortlistTest, ASearchChoosesAmongTheCandidates) {
  const at::NoGradGuard no_grad;
  Transformer model = wide_model(Precision::kFloat32);
  model->to(at::kDouble);
  const auto shortlist = wide_shortlist();
  for (const auto& sentence : wide_sentences(6)) {
    const auto batch = test::make_test_batch({sentence});
    auto source = sentence.source;
    source.push_back(3);
    const Pieces pieces = shortlist->candidates(source);
    const at::Tensor index = at::tensor(at::ArrayRef<int32_t>(pieces)).to(at::kLong);
    DecoderState state = model->begin_decoding(
        model->encode(batch.source_BS, batch.source_lengths_B), batch.source_lengths_B);
    Pieces expected;
    double log_prob = 0;
    int64_t last = 2;
    while (std::ssize(expected) < 8) {
      const at::Tensor scores =
          model->decode_step(at::tensor({last}, at::kLong), state).index_select(1, index);
      const at::Tensor log_probs = at::log_softmax(scores, 1);
      const auto best = log_probs.narrow(1, 3, log_probs.size(1) - 3).argmax(1).item<int64_t>() + 3;
      log_prob += log_probs[0][best].item<double>();
      last = pieces[static_cast<size_t>(best)];
      if (last == 3) break;
      expected.push_back(static_cast<int32_t>(last));
    }
    if (last != 3) {
      log_prob +=
          at::log_softmax(
              model->decode_step(at::tensor({last}, at::kLong), state).index_select(1, index),
              1)[0][3]
              .item<double>();
    }
    const auto found = search(model, batch.source_BS, batch.source_lengths_B,
                              {.beam_size = 1, .max_length = 8, .shortlist = shortlist});
    EXPECT_EQ(found[0][0].tokens, expected);
    // 9 sums of exponentials of some 300 float64 numbers.
    EXPECT_NEAR(found[0][0].log_prob, log_prob, 1e-10);
  }
}

TEST(ShortlistTest, OfAllPiecesItChangesNoTranslation) {
  Transformer model = wide_model(Precision::kFloat32);
  LexicalTable table{.offsets = std::vector<int64_t>(kWords + 1), .target_pieces = kWords};
  table.frequent.resize(kWords);
  std::iota(table.frequent.begin(), table.frequent.end(), 0);
  const auto all =
      std::make_shared<const Shortlist>(table, ShortlistOptions{.first = kWords, .best = 0});
  const auto batch = test::make_test_batch(wide_sentences(9));
  for (const int64_t beam_size : {1, 4}) {
    SearchOptions options{.beam_size = beam_size, .max_length = 10};
    const auto expected = search(model, batch.source_BS, batch.source_lengths_B, options);
    options.shortlist = all;
    const auto found = search(model, batch.source_BS, batch.source_lengths_B, options);
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_EQ(found[i].front().tokens, expected[i].front().tokens);
  }
}

TEST(ShortlistTest, NoBitDependsOnTheBatch) {
  const auto sentences = wide_sentences(19);
  auto backwards = sentences;
  std::ranges::reverse(backwards);
  for (const auto precision : {Precision::kFloat32, Precision::kBFloat16, Precision::kInt8}) {
    const bool int8 = precision == Precision::kInt8;
    Transformer model = wide_model(int8 ? Precision::kFloat32 : precision);
    if (int8) model = quantize(model);
    for (const int64_t beam_size : {1, 4}) {
      SCOPED_TRACE(to_string(precision) + ", beam " + std::to_string(beam_size));
      const auto found_in = [&](const std::vector<test::Sentence>& batch_of) {
        const auto batch = test::make_test_batch(batch_of);
        return search(model, batch.source_BS, batch.source_lengths_B,
                      {.beam_size = beam_size, .max_length = 12, .shortlist = wide_shortlist()});
      };
      const auto together = found_in(sentences);
      const auto reversed = found_in(backwards);
      for (size_t i = 0; i < sentences.size(); ++i) {
        const auto alone = found_in({sentences[i]}).front();
        for (const auto& other : {alone, reversed[sentences.size() - 1 - i]}) {
          ASSERT_EQ(other.size(), together[i].size());
          for (size_t k = 0; k < other.size(); ++k) {
            EXPECT_EQ(other[k].tokens, together[i][k].tokens);
            EXPECT_EQ(other[k].log_prob, together[i][k].log_prob);
          }
        }
      }
    }
  }
}

TEST(ShortlistTest, FewerCandidatesThanPlacesOfTheBeamAreEnough) {
  Transformer model = wide_model(Precision::kFloat32);
  const auto only = std::make_shared<const Shortlist>(
      LexicalTable{
          .offsets = std::vector<int64_t>(kWords + 1), .frequent = {77}, .target_pieces = kWords},
      ShortlistOptions{});
  const auto batch = test::make_test_batch(wide_sentences(3));
  const auto found = search(model, batch.source_BS, batch.source_lengths_B,
                            {.beam_size = 6, .max_length = 4, .shortlist = only});
  for (const auto& hypotheses : found) {
    ASSERT_FALSE(hypotheses.empty());
    for (const auto& hypothesis : hypotheses)
      for (const int32_t token : hypothesis.tokens) EXPECT_EQ(token, 77);
  }
}

TEST(ShortlistTest, WithoutAnyCandidateATranslationIsEmpty) {
  Transformer model = wide_model(Precision::kFloat32);
  const auto nothing = std::make_shared<const Shortlist>(
      LexicalTable{.offsets = std::vector<int64_t>(kWords + 1), .target_pieces = kWords},
      ShortlistOptions{});
  const auto batch = test::make_test_batch(wide_sentences(3));
  for (const int64_t beam_size : {1, 4}) {
    const auto found =
        search(model, batch.source_BS, batch.source_lengths_B,
               {.beam_size = beam_size, .max_length = 4, .min_length = 1, .shortlist = nothing});
    ASSERT_EQ(found.size(), 3U);
    for (const auto& hypotheses : found) {
      ASSERT_EQ(hypotheses.size(), 1U);
      EXPECT_TRUE(hypotheses[0].tokens.empty());
    }
  }
}

TEST(ShortlistTest, NoSentencesHaveNoTranslations) {
  Transformer model = wide_model(Precision::kFloat32);
  const at::Tensor none = at::empty({0, 3}, at::kLong), lengths = at::empty({0}, at::kLong);
  EXPECT_TRUE(search(model, none, lengths, {.shortlist = wide_shortlist()}).empty());
  EXPECT_TRUE(search(model, none, lengths, {}).empty());
}

TEST(ShortlistTest, WhatCannotUseOneIsRefusedByName) {
  Transformer model = wide_model(Precision::kFloat32);
  const auto batch = test::make_test_batch(wide_sentences(2));
  const auto refusal = [&](Transformer& of, SearchOptions options, auto shortlist) {
    options.shortlist = shortlist;
    return test::message_of<ConfigError>(
        [&] { search(of, batch.source_BS, batch.source_lengths_B, options); });
  };
  EXPECT_EQ(refusal(model, {.sampling = {.enabled = true}}, wide_shortlist()),
            "--shortlist: expected no --sampling");
  EXPECT_EQ(
      refusal(model, {}, std::make_shared<const Shortlist>(small_table(), ShortlistOptions{})),
      "--shortlist: expected one for vocabularies of 1300 and 1300 pieces, got one for 7 and "
      "12");
  Transformer shard(wide_options(), Precision::kFloat32, c10::kCPU,
                    std::make_shared<const TensorParallelContext>(0, 2));
  EXPECT_EQ(refusal(shard, {}, wide_shortlist()),
            "--shortlist: expected a whole model, got one of 2 tensor-parallel shards");
}

}  // namespace shortlist_test
}  // namespace cohort::nmt
