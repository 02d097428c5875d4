// SPDX-License-Identifier: Apache-2.0
// Translating and scoring by a model on a device whose memory the host may not touch: the bits of
// the CPU with the same operations, and one copy to the device and one back for each token.
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <torch/types.h>

#include "cohort/nmt/search.h"
#include "cohort/translate/scoring.h"

#include "tests/device/second_device.h"
#include "tests/support/aten_kernels.h"
#include "tests/support/message_of.h"
#include "tests/support/sentences.h"

namespace cohort::nmt {
namespace search_device_test {

struct Case {
  Norm norm = Norm::kPre;
  bool tied = false;
  Precision precision = Precision::kFloat32;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Norm norm : {Norm::kPre, Norm::kPost}) {
    for (const bool tied : {false, true}) {
      for (const auto precision : {Precision::kFloat32, Precision::kBFloat16})
        all.push_back({norm, tied, precision});
    }
  }
  return all;
}

std::string name_of(const Case& c) {
  return to_string(c.norm) + (c.tied ? " tied " : " ") + to_string(c.precision);
}

Transformer model_of(const Case& c, at::Device device) {
  auto options = test::tiny_options();
  options.norm = c.norm;
  options.tied_embeddings = c.tied;
  Transformer model(options, c.precision);
  model->initialise(3);
  const at::NoGradGuard no_grad;
  for (auto& item : model->named_parameters()) {
    // Fresh parameters find all tokens about equally likely.
    if (item.key() == (c.tied ? "target_embedding" : "generator.weight")) item.value().mul_(4);
  }
  model->to(device);
  model->eval();
  return model;
}

test::Sentence sentence_of(int64_t source_tokens) {
  test::Sentence sentence;
  for (int64_t i = 0; i < source_tokens; ++i)
    sentence.source.push_back(4 + (7 * i * i + source_tokens) % (test::kVocabulary - 4));
  return sentence;
}

// Batches: one of lengths that differ much, one of a sentence alone.
const std::vector<std::vector<int64_t>> kBatches{{1, 40, 3, 17, 9, 2}, {5}};

// Unknown and banned pieces, ends that must wait, and a beam that asks for more than there are.
std::vector<SearchOptions> searches() {
  return {{.beam_size = 1, .max_length = 15},
          {.beam_size = 4, .normalize = 0.6, .max_length = 15},
          {.beam_size = 4, .normalize = 1, .allow_unk = true, .max_length = 12, .min_length = 5},
          {.beam_size = 3, .word_penalty = -100, .max_length = 9},
          {.beam_size = 50, .max_length = 3},
          {.beam_size = 3, .max_length = 12, .sampling = {.enabled = true, .seed = 7}},
          {.beam_size = 2,
           .max_length = 12,
           .sampling = {.enabled = true, .topk = 9, .topp = 0.8, .temperature = 1.5}}};
}

using Translations = std::vector<std::vector<Hypothesis>>;

// By search and batch, then by sentence.
std::vector<Translations> translated(Transformer& model) {
  std::vector<Translations> found;
  for (const SearchOptions& options : searches()) {
    for (const auto& lengths : kBatches) {
      std::vector<test::Sentence> sentences;
      for (const int64_t length : lengths) sentences.push_back(sentence_of(length));
      const Batch batch = test::make_test_batch(sentences);
      found.push_back(search(model, batch.source_BS, batch.source_lengths_B, options));
    }
  }
  return found;
}

void expect_equal(const std::vector<Translations>& got, const std::vector<Translations>& expected,
                  double bound) {
  ASSERT_EQ(got.size(), expected.size());
  size_t num_tokens = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].size(), expected[i].size());
    for (size_t b = 0; b < got[i].size(); ++b) {
      SCOPED_TRACE(std::to_string(i) + ", sentence " + std::to_string(b));
      ASSERT_EQ(got[i][b].size(), expected[i][b].size());
      for (size_t k = 0; k < got[i][b].size(); ++k) {
        const Hypothesis &found = got[i][b][k], &other = expected[i][b][k];
        EXPECT_EQ(found.tokens, other.tokens);
        EXPECT_NEAR(found.log_prob, other.log_prob, bound);
        EXPECT_NEAR(found.score, other.score, bound);
        num_tokens += found.tokens.size();
      }
    }
  }
  EXPECT_GT(num_tokens, 500) << "little is compared";
}

TEST(SearchDeviceTest, TranslationsHaveTheBitsOfTheCpuWithTheSameOperations) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(name_of(c));
    const auto expected = [&] {
      const test::AtenKernels guard;
      Transformer model = model_of(c, at::kCPU);
      return translated(model);
    }();
    Transformer model = model_of(c, test::second_device());
    expect_equal(translated(model), expected, 0);
  }
}

// In float64, where rounding does not choose between tokens.
TEST(SearchDeviceTest, TranslationsAreThoseOfTheCpusLoops) {
  for (const Case& c : {Case{}, Case{.norm = Norm::kPost, .tied = true}}) {
    SCOPED_TRACE(name_of(c));
    const auto found_on = [&](at::Device device) {
      Transformer model = model_of(c, device);
      model->to(at::kDouble);
      return translated(model);
    };
    // A score is a sum of 16 logarithms at most, each of some 1,000 roundings of numbers below 100.
    expect_equal(found_on(test::second_device()), found_on(at::kCPU),
                 16 * 1000 * 100 * std::numeric_limits<double>::epsilon());
  }
}

// A translation of as many tokens as are asked for, in one step more.
TEST(SearchDeviceTest, AStepCopiesOnceToTheDeviceAndOnceBack) {
  Transformer model = model_of({}, test::second_device());
  const Batch batch = test::make_test_batch({sentence_of(4), sentence_of(11), sentence_of(1)});
  for (const bool sampling : {false, true}) {
    for (const int64_t beam_size : {1, 4}) {
      const SearchOptions options{.beam_size = beam_size,
                                  .max_length = 7,
                                  .min_length = 7,
                                  .sampling = {.enabled = sampling}};
      search(model, batch.source_BS, batch.source_lengths_B, options);  // Positions move once.
      test::reset_device_counts();
      const auto found = search(model, batch.source_BS, batch.source_lengths_B, options);
      const test::DeviceCounts counts = test::device_counts();
      for (const auto& hypotheses : found) {
        ASSERT_EQ(std::ssize(hypotheses), beam_size);
        for (const Hypothesis& h : hypotheses) EXPECT_EQ(h.tokens.size(), 7);
      }
      EXPECT_EQ(counts.host_to_device, 2 + 8) << "source ids, their lengths and 8 steps";
      EXPECT_EQ(counts.device_to_host, 8);
      EXPECT_EQ(counts.synchronisations, 8);
    }
  }
}

TEST(SearchDeviceTest, WhatIsElsewhereThanItShouldIsRefused) {
  const at::NoGradGuard no_grad;
  Transformer model = model_of({}, test::second_device());
  const Batch here = test::make_test_batch({sentence_of(4), sentence_of(2)});
  const Batch there = here.to(test::second_device());
  const auto message = [](const auto& call) { return test::message_of<c10::ValueError>(call); };
  EXPECT_EQ(message([&] { search(model, there.source_BS, there.source_lengths_B); }),
            "search: expected sentences and lengths on the CPU, got them on mtia:0 and mtia:0");
  const at::Tensor memory = model->encode(there.source_BS, there.source_lengths_B);
  EXPECT_EQ(message([&] { model->begin_decoding(memory, here.source_lengths_B); }),
            "begin_decoding: expected encodings and lengths on the model's device, mtia:0, got "
            "them on mtia:0 and cpu");
  DecoderState state = model->begin_decoding(memory, there.source_lengths_B);
  EXPECT_EQ(message([&] { model->decode_step(there.input_BT.select(1, 0), state); }),
            "decode_step: expected tokens on the CPU, got some on mtia:0");
}

TEST(SearchDeviceTest, ADamagedModelIsNamed) {
  Transformer model = model_of({}, test::second_device());
  {
    const at::NoGradGuard no_grad;
    model->parameters()[0].fill_(std::nan(""));
  }
  const Batch batch = test::make_test_batch({sentence_of(4)});
  const std::string message =
      test::message_of<c10::Error>([&] { search(model, batch.source_BS, batch.source_lengths_B); });
  EXPECT_NE(message.find("the model's scores are not finite"), std::string::npos) << message;
}

// Few different values, so that many are equal, also the last of the greatest and the next.
TEST(SearchDeviceTest, CandidatesAreThoseOfTheCpu) {
  torch::manual_seed(7);
  const std::vector<int64_t> banned{0, 2, 300};
  for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const int64_t columns : {4, 256, 3000}) {
      const at::Tensor scores = at::randint(40, {3, columns}, at::kFloat).to(type) / 4;
      const LogProbs here(scores);
      for (const int64_t count : {1, 2, 8, 13, 5000}) {
        const LogProbs there(scores.to(test::second_device()),
                             Questions{.greatest = count + std::ssize(banned), .column = 3});
        // Both sums of exponentials are of `columns` terms, each rounded twice, in float32.
        const double bound = 2 * (static_cast<double>(columns) + 4) * 0x1p-24;
        for (int64_t n = 0; n < 3; ++n) {
          SCOPED_TRACE(std::to_string(columns) + " columns, " + std::to_string(count));
          EXPECT_NEAR(there.at(n, 3), here.at(n, 3), bound);
          const auto expected = here.greatest(n, count, banned);
          const auto found = there.greatest(n, count, banned);
          ASSERT_EQ(found.size(), expected.size());
          for (size_t i = 0; i < found.size(); ++i) {
            EXPECT_EQ(found[i].column, expected[i].column);
            EXPECT_NEAR(found[i].log_prob, expected[i].log_prob, bound);
          }
        }
      }
      at::Tensor damaged = scores.clone();
      damaged[1][2] = std::numeric_limits<double>::infinity();
      EXPECT_THROW(LogProbs(damaged.to(test::second_device()), Questions{.greatest = 2}),
                   c10::Error);
    }
  }
}

TEST(ScoringDeviceTest, LogProbabilitiesOfTokensHaveTheBitsOfTheCpuWithTheSameOperations) {
  std::vector<std::vector<int32_t>> sources, targets;
  for (const auto& sentence : test::make_sentences(12, 5)) {
    sources.emplace_back(sentence.source.begin(), sentence.source.end());
    targets.emplace_back(sentence.target.begin(), sentence.target.end());
  }
  targets[3].clear();
  const translate::Corpus corpus(sources, targets);
  for (const Case& c : cases()) {
    SCOPED_TRACE(name_of(c));
    const auto expected = [&] {
      const test::AtenKernels guard;
      Transformer model = model_of(c, at::kCPU);
      return translate::token_log_probs(model, corpus, 40);
    }();
    Transformer model = model_of(c, test::second_device());
    EXPECT_EQ(translate::token_log_probs(model, corpus, 40), expected);
    for (size_t i = 0; i < targets.size(); ++i)
      EXPECT_EQ(expected[i].size(), targets[i].size() + 1);
  }
}

}  // namespace search_device_test
}  // namespace cohort::nmt
