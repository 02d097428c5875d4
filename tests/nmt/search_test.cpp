// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/search.h"

#include <gtest/gtest.h>
#include <limits>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/nmt/int8_matrix.h"

#include "tests/support/message_of.h"
#include "tests/support/sentences.h"

namespace cohort::nmt {
namespace search_test {

using Tokens = std::vector<int64_t>;

constexpr int64_t kTokens = 12;  // small enough to try every next token
constexpr int64_t kEnd = 3;

Transformer make_model(uint64_t seed) {
  auto options = test::tiny_options();
  options.dim_vocab_source = options.dim_vocab_target = kTokens;
  Transformer model(options);
  model->initialise(seed);
  {  // Fresh parameters find all tokens about equally likely: every step would be a near tie.
    const at::NoGradGuard no_grad;
    for (auto& item : model->named_parameters()) {
      if (item.key() == "generator.weight") item.value().mul_(4);
    }
  }
  model->to(at::kDouble);
  model->eval();
  return model;
}

std::vector<test::Sentence> make_sources() {
  std::vector<test::Sentence> sentences(5);
  uint64_t next = 1;
  for (size_t i = 0; i < sentences.size(); ++i) {
    for (size_t k = 0; k <= 2 * i; ++k) {
      next = next * 6364136223846793005 + 1442695040888963407;
      sentences[i].source.push_back(4 + static_cast<int64_t>((next >> 33) % (kTokens - 4)));
    }
  }
  return sentences;
}

// log p of `target` as the beginning of a translation, by one pass over the whole of it.
double log_prob(Transformer& model, const test::Sentence& sentence, const Tokens& target) {
  const at::NoGradGuard no_grad;
  nmt::Batch batch = test::make_test_batch({{sentence.source, {}}});
  batch.labels_BT = at::tensor(target, at::kLong).unsqueeze(0);
  Tokens input{2};
  input.insert(input.end(), target.begin(), target.end() - 1);
  batch.input_BT = at::tensor(input, at::kLong).unsqueeze(0);
  batch.target_lengths_B = at::tensor({std::ssize(target)}, at::kLong);
  return -std::get<1>(model->forward(batch)).item<double>();
}

struct Found {
  Tokens tokens;
  double log_prob, score;
};

// Beam search as a textbook has it: no cache, no batch, every next token of every beginning tried.
std::vector<Found> plain_search(Transformer& model, const test::Sentence& sentence,
                                const SearchOptions& options) {
  struct Candidate {
    Tokens tokens;
    double log_prob;
  };
  const auto beam_size = static_cast<size_t>(options.beam_size);
  std::vector<Candidate> beam{{}};
  std::vector<Found> ended;
  while (!beam.empty() && ended.size() < beam_size) {
    std::vector<Candidate> candidates;
    for (const Candidate& beginning : beam) {
      const bool full = std::ssize(beginning.tokens) == options.max_length;
      for (int64_t token = full ? kEnd : 3; token < (full ? kEnd + 1 : kTokens); ++token) {
        Tokens longer = beginning.tokens;
        longer.push_back(token);
        candidates.push_back({longer, log_prob(model, sentence, longer)});
      }
    }
    std::ranges::sort(candidates, std::greater{}, &Candidate::log_prob);
    beam.clear();
    for (size_t rank = 0; rank < candidates.size(); ++rank) {
      Candidate& c = candidates[rank];
      if (c.tokens.back() != kEnd) {
        if (beam.size() < beam_size) beam.push_back(c);
      } else if (rank < beam_size && ended.size() < beam_size) {
        const auto length = static_cast<double>(c.tokens.size());
        const double score =
            c.log_prob / std::pow(length, options.normalize) - options.word_penalty * length;
        c.tokens.pop_back();
        ended.push_back({c.tokens, c.log_prob, score});
      }
    }
  }
  std::ranges::stable_sort(ended, std::greater{}, &Found::score);
  return ended;
}

Tokens wide(const std::vector<int32_t>& tokens) {
  return {tokens.begin(), tokens.end()};
}

TEST(SearchTest, EqualsAPlainSearchWithoutCacheOrBatch) {
  Transformer model = make_model(1);
  const auto sentences = make_sources();
  const auto batch = test::make_test_batch(sentences);
  size_t ended_early = 0;
  for (const SearchOptions& options :
       {SearchOptions{.beam_size = 1, .max_length = 6},
        SearchOptions{.beam_size = 2, .max_length = 6},
        SearchOptions{.beam_size = 5, .normalize = 1, .max_length = 6},
        SearchOptions{.beam_size = 4, .word_penalty = -2, .max_length = 3}}) {
    const auto found = search(model, batch.source_BS, batch.source_lengths_B, options);
    ASSERT_EQ(found.size(), sentences.size());
    for (size_t i = 0; i < sentences.size(); ++i) {
      SCOPED_TRACE("beam " + std::to_string(options.beam_size) + ", sentence " + std::to_string(i));
      const auto expected = plain_search(model, sentences[i], options);
      ASSERT_EQ(found[i].size(), expected.size());
      for (size_t k = 0; k < expected.size(); ++k) {
        EXPECT_EQ(wide(found[i][k].tokens), expected[k].tokens);
        // The search adds up float32 logarithms of at most 7 tokens.
        EXPECT_NEAR(found[i][k].log_prob, expected[k].log_prob, 1e-5);
        EXPECT_NEAR(found[i][k].score, expected[k].score, 1e-5);
        ended_early += std::ssize(found[i][k].tokens) < options.max_length;
      }
    }
  }
  EXPECT_GT(ended_early, 5) << "some translations end before the limit, or little is compared";
}

TEST(SearchTest, ABeamOfOneTakesTheLikeliestTokenEachTime) {
  Transformer model = make_model(2);
  for (const auto& sentence : make_sources()) {
    const auto batch = test::make_test_batch({sentence});
    Tokens greedy;
    while (std::ssize(greedy) < 8) {
      std::pair<double, int64_t> best{-1e9, 0};
      for (int64_t token = 3; token < kTokens; ++token) {
        Tokens longer = greedy;
        longer.push_back(token);
        best = std::max(best, {log_prob(model, sentence, longer), token});
      }
      if (best.second == kEnd) break;
      greedy.push_back(best.second);
    }
    const auto found =
        search(model, batch.source_BS, batch.source_lengths_B, {.beam_size = 1, .max_length = 8});
    ASSERT_EQ(found[0].size(), 1);
    EXPECT_EQ(wide(found[0][0].tokens), greedy);
  }
}

TEST(SearchTest, TheResultDoesNotDependOnTheBatch) {
  Transformer model = make_model(3);
  const auto sentences = make_sources();
  const auto batch = test::make_test_batch(sentences);
  for (const int64_t beam_size : {1, 4}) {
    const SearchOptions options{.beam_size = beam_size, .normalize = 0.6};
    const auto together = search(model, batch.source_BS, batch.source_lengths_B, options);
    for (size_t i = 0; i < sentences.size(); ++i) {
      const auto alone = test::make_test_batch({sentences[i]});
      const auto found = search(model, alone.source_BS, alone.source_lengths_B, options)[0];
      ASSERT_EQ(found.size(), together[i].size());
      for (size_t k = 0; k < found.size(); ++k) EXPECT_EQ(found[k].tokens, together[i][k].tokens);
    }
  }
}

// ... to the bit, in the types that are searched in, whatever the batch's size and order.
TEST(SearchTest, NoBitDependsOnTheBatch) {
  for (const auto precision : {Precision::kFloat32, Precision::kBFloat16}) {
    Transformer model(test::tiny_options(), precision);
    const auto sentences = test::make_sentences(18, 4);  // more rows than a block has
    auto backwards = sentences;
    std::ranges::reverse(backwards);
    const auto found_in = [&](const std::vector<test::Sentence>& batch_of, int64_t beam_size) {
      const auto batch = test::make_test_batch(batch_of);
      return search(model, batch.source_BS, batch.source_lengths_B,
                    {.beam_size = beam_size, .max_length = 15});
    };
    for (const int64_t beam_size : {1, 4}) {
      const auto together = found_in(sentences, beam_size);
      const auto reversed = found_in(backwards, beam_size);
      for (size_t i = 0; i < sentences.size(); ++i) {
        const auto alone = found_in({sentences[i]}, beam_size).front();
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

TEST(SearchTest, LengthsAreBounded) {
  Transformer model = make_model(4);
  const auto sentences = make_sources();
  const auto batch = test::make_test_batch(sentences);
  // By this score the longest of the beam is the best: the lengths that were reached show.
  const auto longest = [&](SearchOptions options, size_t i) {
    options.beam_size = 3;
    options.word_penalty = -100;
    return search(model, batch.source_BS, batch.source_lengths_B, options)[i].front().tokens.size();
  };
  size_t most = 0;
  for (size_t i = 0; i < sentences.size(); ++i) {
    const size_t source_tokens = sentences[i].source.size() + 1;
    EXPECT_LE(longest({}, i), 3 * source_tokens + 10);
    EXPECT_LE(longest({.max_length_factor = 0}, i), 10);
    EXPECT_LE(longest({.max_length_factor = 1000, .max_length = 1000}, i), 63)
        << "the model has 64 positions";
    most = std::max(most, longest({.max_length = 2}, i));
  }
  EXPECT_EQ(most, 2);
  // By this score the shortest is the best.
  for (const auto& hypotheses :
       search(model, batch.source_BS, batch.source_lengths_B,
              {.beam_size = 3, .word_penalty = 100, .max_length = 7, .min_length = 7})) {
    EXPECT_EQ(hypotheses.front().tokens.size(), 7);
  }
}

TEST(SearchTest, TheUnknownPieceOnlyWhenAllowed) {
  Transformer model = make_model(5);
  {
    const at::NoGradGuard no_grad;  // The unknown piece's score becomes 9 times any other's.
    for (auto& item : model->named_parameters()) {
      if (item.key() == "generator.weight") item.value()[1] = item.value()[5] * 9;
    }
  }
  const auto batch = test::make_test_batch(make_sources());
  const auto count_unknown = [&](bool allow) {
    int64_t count = 0;
    for (const auto& hypotheses : search(model, batch.source_BS, batch.source_lengths_B,
                                         {.beam_size = 2, .allow_unk = allow})) {
      for (const auto& h : hypotheses) count += std::ranges::count(h.tokens, 1);
    }
    return count;
  };
  EXPECT_EQ(count_unknown(false), 0);
  EXPECT_GT(count_unknown(true), 0);
}

TEST(SearchTest, ADamagedModelIsNamed) {
  Transformer model = make_model(6);
  {
    const at::NoGradGuard no_grad;
    model->parameters()[0].fill_(std::nan(""));
  }
  const auto batch = test::make_test_batch(make_sources());
  EXPECT_THROW(search(model, batch.source_BS, batch.source_lengths_B), c10::Error);
  EXPECT_THROW(search(model, batch.source_BS, batch.source_lengths_B, {.beam_size = 0}),
               ConfigError);
}

std::vector<Hypothesis> samples_of(Transformer& model, const std::vector<test::Sentence>& sentences,
                                   const std::vector<int64_t>& numbers, size_t row,
                                   const SamplingOptions& sampling) {
  const auto batch = test::make_test_batch(sentences);
  return search(model, batch.source_BS, batch.source_lengths_B,
                {.beam_size = 3, .max_length = 12, .sampling = sampling}, numbers)[row];
}

TEST(SamplingTest, ASeedDrawsTheSameTranslationsWhateverTheBatch) {
  Transformer model(test::tiny_options(), Precision::kBFloat16);
  const auto sentences = test::make_sentences(9, 4);
  const std::vector<int64_t> numbers{10, 11, 12, 13, 14, 15, 16, 17, 18};
  const SamplingOptions sampling{.enabled = true, .seed = 7};
  for (size_t i = 0; i < sentences.size(); ++i) {
    const auto together = samples_of(model, sentences, numbers, i, sampling);
    const auto alone = samples_of(model, {sentences[i]}, {numbers[i]}, 0, sampling);
    ASSERT_EQ(together.size(), 3);
    EXPECT_NE(together[0].tokens, together[1].tokens) << "samples of a sentence differ";
    for (size_t k = 0; k < 3; ++k) {
      EXPECT_EQ(alone[k].tokens, together[k].tokens);
      EXPECT_EQ(alone[k].log_prob, together[k].log_prob);
    }
    const SamplingOptions other{.enabled = true, .seed = 8};
    EXPECT_NE(samples_of(model, sentences, numbers, i, other)[0].tokens, together[0].tokens);
    EXPECT_NE(samples_of(model, {sentences[i]}, {3}, 0, sampling)[0].tokens, together[0].tokens);
  }
}

// 40,000 draws from a row of 9 columns, one of them banned, beside the shares they should have.
TEST(SamplingTest, ShareOfEachTokenIsItsProbability) {
  torch::manual_seed(5);
  const LogProbs log_probs(2 * at::randn({1, 9}));
  const std::vector<int64_t> banned{4};
  const double draws = 40000;
  for (const SamplingOptions& options :
       {SamplingOptions{}, SamplingOptions{.temperature = 2}, SamplingOptions{.topk = 4},
        SamplingOptions{.topp = 0.8},
        SamplingOptions{.topk = 5, .topp = 0.9, .temperature = 0.7}}) {
    SCOPED_TRACE("topk " + std::to_string(options.topk) + " topp " + std::to_string(options.topp));
    // By the definition: all tokens sorted, cut after topk, cut where topp is reached.
    auto allowed = log_probs.all(0, banned);
    std::ranges::sort(allowed, std::greater{}, &Candidate::log_prob);
    if (options.topk > 0) allowed.resize(static_cast<size_t>(options.topk));
    const auto share = [&](const Candidate& c) {
      double sum = 0;
      for (const Candidate& other : allowed)
        sum += std::exp((other.log_prob - c.log_prob) / options.temperature);
      return 1 / sum;
    };
    double reached = 0;
    size_t kept = 0;
    while (kept < allowed.size() && reached < options.topp) reached += share(allowed[kept++]);
    if (options.topp < 1) allowed.resize(kept);

    std::vector<double> counts(9);
    for (int64_t i = 0; i < static_cast<int64_t>(draws); ++i) {
      const double number = sampling_number(11, i / 100, i % 4, i % 100 / 4);
      ++counts[static_cast<size_t>(draw(log_probs, 0, options, banned, number).column)];
    }
    double chi_square = 0;
    double counted = 0;
    for (const Candidate& c : allowed) {
      const double expected = draws * share(c);
      const double found = counts[static_cast<size_t>(c.column)];
      chi_square += (found - expected) * (found - expected) / expected;
      counted += found;
    }
    EXPECT_EQ(counted, draws) << "a token was drawn that is not allowed";
    // At most 7 degrees of freedom: beyond 29.9 in one of 10,000 seeds.
    EXPECT_LT(chi_square, 29.9);
  }
}

// Of many columns, in all forms that scores have, beside the definition in float64.
TEST(SamplingTest, TheLowestTemperatureDrawsTheLikeliest) {
  at::Tensor scores = at::zeros({1, 600});
  scores[0][400] = 1;
  for (const double temperature : {1e-3, 1e-39, 1e-308}) {
    EXPECT_EQ(draw(LogProbs(scores), 0, {.temperature = temperature}, {}, 0.5).column, 400)
        << temperature;
  }
}

TEST(SamplingTest, ANumberDrawsTheColumnWhoseShareItFallsInto) {
  torch::manual_seed(6);
  const std::vector<int64_t> banned{0, 2, 700};
  const Int8Matrix matrix(quantize_rows("w", at::randn({1000, 70})));
  const at::Tensor scores = 3 * at::randn({2, 1000});
  for (const LogProbs& log_probs :
       {LogProbs(scores), LogProbs(scores.to(at::kBFloat16)), LogProbs(scores.to(at::kDouble)),
        LogProbs(matrix.scores(at::randn({2, 70}) / 3, /*with_sums=*/true))}) {
    for (const double temperature : {0.5, 1.0, 3.0}) {
      const auto all = log_probs.all(1, banned);
      std::vector<double> reached{0};
      for (const Candidate& c : all)
        reached.push_back(reached.back() + std::exp(c.log_prob / temperature));
      const double top = log_probs.likeliest(1, banned).log_prob;
      const double sum = reached.back() * std::exp(-top / temperature);
      // As below, relative to the sum.
      EXPECT_NEAR(log_probs.sum_of_weights(1, 1 / temperature, banned), sum,
                  sum * (3 * 60 + 4 + 256) * 0x1p-24);
      for (int64_t i = 0; i < 2000; ++i) {
        const double number = sampling_number(3, 0, 0, i);
        const Candidate found = draw(log_probs, 1, {.temperature = temperature}, banned, number);
        const auto at_column = std::ranges::find(all, found.column, &Candidate::column);
        ASSERT_NE(at_column, all.end());
        EXPECT_EQ(found.log_prob, at_column->log_prob);
        const auto index = static_cast<size_t>(at_column - all.begin());
        // The sums of blocks are float32's of at most 256 terms, with exponents to 30 / 0.5.
        const double rounding = (3 * 60 + 4 + 256) * 0x1p-24;
        EXPECT_GE(number, reached[index] / reached.back() - rounding);
        EXPECT_LE(number, reached[index + 1] / reached.back() + rounding);
      }
    }
  }
}

TEST(SamplingTest, TheLikeliestOfOneIsGreedySearch) {
  Transformer model = make_model(7);
  const auto batch = test::make_test_batch(make_sources());
  const SearchOptions greedy{.max_length = 9};
  SearchOptions sampling = greedy;
  sampling.sampling = {.enabled = true, .topk = 1};
  const auto expected = search(model, batch.source_BS, batch.source_lengths_B, greedy);
  const auto found = search(model, batch.source_BS, batch.source_lengths_B, sampling);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(found[i][0].tokens, expected[i][0].tokens);
    EXPECT_EQ(found[i][0].log_prob, expected[i][0].log_prob);
  }
}

TEST(SearchTest, GreedySearchWithoutScoresFindsTheSameTokens) {
  for (const Precision precision : {Precision::kFloat32, Precision::kBFloat16}) {
    torch::manual_seed(7);
    Transformer model(test::tiny_options(), precision);
    const auto batch = test::make_test_batch(make_sources());
    const SearchOptions scored{.max_length = 9};
    SearchOptions bare = scored;
    bare.scores = false;
    const auto expected = search(model, batch.source_BS, batch.source_lengths_B, scored);
    const auto found = search(model, batch.source_BS, batch.source_lengths_B, bare);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_EQ(found[i].at(0).tokens, expected[i].at(0).tokens);
  }
}

TEST(SearchTest, BadOptionsAreNamedByTheirFlags) {
  const double inf = std::numeric_limits<double>::infinity();
  const auto message = [](const SearchOptions& options) {
    return test::message_of<ConfigError>([&] { validate(options); });
  };
  EXPECT_EQ(message({.beam_size = 0}), "--beam-size 0: expected at least 1");
  EXPECT_EQ(message({.max_length = 0}), "--max-output-length 0: expected at least 1");
  EXPECT_EQ(message({.min_length = -2}), "--min-output-length -2: expected at least 0");
  EXPECT_EQ(message({.max_length_factor = -0.5}), "--max-length-factor -0.5: expected at least 0");
  EXPECT_EQ(message({.normalize = inf}), "--normalize inf: expected a finite number");
  EXPECT_EQ(message({.word_penalty = -inf}), "--word-penalty -inf: expected a finite number");
  EXPECT_EQ(message({.sampling = {.topp = 1.5}}),
            "--sampling-topp 1.5: expected a share above 0, at most 1");
}

TEST(SamplingTest, BadOptionsAreNamed) {
  EXPECT_THROW(validate(SamplingOptions{.topk = -1}), ConfigError);
  EXPECT_THROW(validate(SamplingOptions{.topp = 0}), ConfigError);
  EXPECT_THROW(validate(SamplingOptions{.topp = 1.5}), ConfigError);
  EXPECT_THROW(validate(SamplingOptions{.temperature = 0}), ConfigError);
}

// Optimizers write through data(), which leaves a tensor's version as it was.
TEST(SearchTest, AnOptimizersStepInEvaluationModeIsSeen) {
  const auto batch = test::make_test_batch(test::make_sentences(4, 3));
  Transformer model(test::tiny_options()), fresh(test::tiny_options());
  model->initialise(3);
  model->eval();
  fresh->eval();
  const auto best = [&](Transformer& of) {
    const at::NoGradGuard no_grad;
    return search(of, batch.source_BS, batch.source_lengths_B)[0][0].log_prob;
  };
  const double before = best(model);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  std::get<0>(model->forward(batch)).backward();
  sgd.step();
  const auto learnt = model->named_parameters();
  for (auto& item : fresh->named_parameters()) {
    const at::NoGradGuard no_grad;
    item.value().copy_(learnt[item.key()]);
  }
  EXPECT_NE(best(model), before);
  EXPECT_EQ(best(model), best(fresh));
}

TEST(SearchTest, RunsInInferenceMode) {
  const auto batch = test::make_test_batch(test::make_sentences(2, 3));
  const auto best = [&] {
    Transformer model(test::tiny_options());
    model->initialise(3);
    model->eval();
    const at::NoGradGuard no_grad;
    return search(model, batch.source_BS, batch.source_lengths_B)[0][0].log_prob;
  };
  const double expected = best();
  const c10::InferenceMode inference;
  EXPECT_EQ(best(), expected);
}

}  // namespace search_test
}  // namespace cohort::nmt
