#include "cohort/nmt/search.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include "cohort/base/error.h"

#include "tests/support/sentences.h"

namespace cohort::nmt {
namespace {

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

}  // namespace
}  // namespace cohort::nmt
