// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/lexical_table.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "cohort/base/error.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/message_of.h"

namespace cohort::translate {
namespace lexical_table_test {

using Ids = std::vector<int32_t>;

// Piece s becomes s + 10; piece 9 of the target stands everywhere.
Corpus made_corpus(int count, int32_t pieces) {
  std::vector<Ids> sources, targets;
  uint64_t next = 1;
  for (int i = 0; i < count; ++i) {
    Ids source, target{9};
    for (int k = 0; k <= i % 6; ++k) {
      next = next * 6364136223846793005 + 1442695040888963407;
      source.push_back(4 + static_cast<int32_t>((next >> 33) % static_cast<uint64_t>(pieces)));
      target.push_back(source.back() + 10);
    }
    std::ranges::reverse(target);
    sources.push_back(source);
    targets.push_back(target);
  }
  return {sources, targets};
}

// IBM model 1 as its paper has it, over a dense table.
std::vector<std::vector<double>> plain_model(const Corpus& corpus, size_t sources, size_t targets,
                                             int64_t rounds) {
  std::vector<std::vector<double>> table(sources, std::vector<double>(targets, 1));
  for (int64_t round = 0; round < rounds; ++round) {
    std::vector<std::vector<double>> counts(sources, std::vector<double>(targets));
    for (int64_t pair = 0; pair < corpus.size(); ++pair) {
      Ids source = corpus.source(pair);
      source.push_back(3);
      for (const int32_t t : corpus.target(pair)) {
        double sum = 0;
        for (const int32_t s : source) sum += table[static_cast<size_t>(s)][static_cast<size_t>(t)];
        for (const int32_t s : source)
          counts[static_cast<size_t>(s)][static_cast<size_t>(t)] +=
              table[static_cast<size_t>(s)][static_cast<size_t>(t)] / sum;
      }
    }
    for (size_t s = 0; s < sources; ++s) {
      double total = 0;
      for (const double count : counts[s]) total += count;
      for (size_t t = 0; t < targets; ++t) table[s][t] = total > 0 ? counts[s][t] / total : 0;
    }
  }
  return table;
}

TEST(LexicalTableTest, IsIbmModelOne) {
  const Corpus corpus = made_corpus(300, 12);
  std::vector<double> log_probs;
  const auto table = learn_lexical_table(
      corpus, 16, 26,
      {.rounds = 4, .on_round = [&](int64_t, double mean) { log_probs.push_back(mean); }});
  const auto expected = plain_model(corpus, 16, 26, 4);
  ASSERT_EQ(table.offsets.size(), 17U);
  EXPECT_EQ(table.target_pieces, 26);
  for (size_t s = 0; s < 16; ++s) {
    double before = 1;
    size_t found = 0;
    for (auto i = static_cast<size_t>(table.offsets[s]);
         i < static_cast<size_t>(table.offsets[s + 1]); ++i) {
      const auto p = static_cast<double>(table.probabilities[i]);
      EXPECT_LE(p, before);
      before = p;
      // Each round rounds probabilities to float32, and divides such by their sum.
      const double exact = expected[s][static_cast<size_t>(table.targets[i])];
      EXPECT_NEAR(p, exact, 64 * 1.2e-7 * exact);
      ++found;
    }
    EXPECT_EQ(found, static_cast<size_t>(
                         std::ranges::count_if(expected[s], [](double p) { return p > 0; })));
    if (s < 4) continue;
    EXPECT_EQ(table.targets[static_cast<size_t>(table.offsets[s])], static_cast<int32_t>(s) + 10);
  }
  // The empty word explains what stands everywhere.
  EXPECT_EQ(table.targets[static_cast<size_t>(table.offsets[3])], 9);
  EXPECT_EQ(table.frequent.front(), 9);
  EXPECT_EQ(std::set<int32_t>(table.frequent.begin(), table.frequent.end()).size(), 13U);
  ASSERT_EQ(log_probs.size(), 4U);
  EXPECT_TRUE(std::ranges::is_sorted(log_probs)) << "no round makes the text less likely";
}

TEST(LexicalTableTest, KeepsTheBestOfEachPiece) {
  const auto all = learn_lexical_table(made_corpus(300, 12), 16, 26);
  const auto two = learn_lexical_table(made_corpus(300, 12), 16, 26, {.best = 2});
  for (size_t s = 0; s < 16; ++s) {
    const int64_t kept = two.offsets[s + 1] - two.offsets[s];
    EXPECT_EQ(kept, std::min<int64_t>(2, all.offsets[s + 1] - all.offsets[s]));
    for (int64_t i = 0; i < kept; ++i) {
      EXPECT_EQ(two.targets[static_cast<size_t>(two.offsets[s] + i)],
                all.targets[static_cast<size_t>(all.offsets[s] + i)]);
    }
  }
}

TEST(LexicalTableTest, PairsThatDoNotFitIntoMemoryAreTheRareOnes) {
  // Some 90,000 pairs of pieces, where 1 MiB has places for 36,000.
  const Corpus corpus = made_corpus(30'000, 600);
  const auto whole = learn_lexical_table(corpus, 604, 614);
  const auto bounded = learn_lexical_table(corpus, 604, 614, {.workspace_mib = 1});
  EXPECT_GT(whole.targets.size(), 60'000U);
  EXPECT_LT(bounded.targets.size(), 43'000U);
  int right = 0;
  for (size_t s = 4; s < 604; ++s)
    right +=
        bounded.targets[static_cast<size_t>(bounded.offsets[s])] == static_cast<int32_t>(s) + 10;
  EXPECT_GE(right, 590);
}

// Each pair once: all counts are equal, and whole target pieces lose their pairs.
TEST(LexicalTableTest, PairsOfEqualCountsAreGivenUpUntilTheRestFits) {
  constexpr int32_t kTargets = 120'000;
  std::vector<Ids> sources, targets;
  for (int32_t target = 4; target < kTargets; ++target) {
    sources.push_back({4});
    targets.push_back({target});
  }
  const Corpus corpus(sources, targets);
  const auto after = [&](int64_t rounds, double& log_prob) {
    return learn_lexical_table(corpus, 5, kTargets,
                               {.rounds = rounds,
                                .best = kTargets,
                                .workspace_mib = 1,
                                .on_round = [&](int64_t, double mean) { log_prob = mean; }});
  };
  double before = 0, log_prob = 0;
  const auto table = after(1, before);
  EXPECT_NEAR(before, -std::log(static_cast<double>(kTargets)), 1e-9);  // as below
  // 22 bytes a place, of which 3/4 are taken at most; half of them are left when they are full.
  constexpr size_t kMost = (1 << 20) / 22 * 3 / 4 + 1;
  EXPECT_LE(table.targets.size(), kMost);
  EXPECT_GE(table.targets.size(), kMost / 2 - 1);
  std::map<int32_t, double> sums;
  for (size_t i = 0; i < table.targets.size(); ++i)
    sums[table.targets[i]] += static_cast<double>(table.probabilities[i]);
  double expected = 0;
  for (const auto& [target, sum] : sums)
    expected += std::log(sum / 2) / static_cast<double>(sums.size());
  after(2, log_prob);
  EXPECT_NEAR(log_prob, expected, 1e-9);  // 40,000 sums of float64
}

class LexicalTableFileTest : public testing::Test {
 protected:
  LexicalTableFileTest() {
    write_file(vocabularies_[0].string(), "source");
    write_file(vocabularies_[1].string(), "target");
    write_lexical_table(file_, table_, vocabularies_);
  }
  std::string refusal(const std::string& file) const {
    return test::message_of<ConfigError>([&] { read_lexical_table(file, vocabularies_); });
  }

  TemporaryFolder folder_;
  const std::string file_ = folder_ / "shortlist";
  std::vector<std::filesystem::path> vocabularies_{folder_ / "s.spm", folder_ / "t.spm"};
  const nmt::LexicalTable table_ = learn_lexical_table(made_corpus(50, 12), 16, 26);
};

TEST_F(LexicalTableFileTest, ComesBackWhole) {
  const auto read = read_lexical_table(file_, vocabularies_);
  EXPECT_EQ(read.offsets, table_.offsets);
  EXPECT_EQ(read.targets, table_.targets);
  EXPECT_EQ(read.probabilities, table_.probabilities);
  EXPECT_EQ(read.frequent, table_.frequent);
  EXPECT_EQ(read.target_pieces, 26);
  EXPECT_EQ(read.best, 200);
  EXPECT_FALSE(read.joined);
  // One vocabulary for both.
  vocabularies_[1] = vocabularies_[0];
  write_lexical_table(file_, table_, vocabularies_);
  EXPECT_EQ(
      refusal(file_),
      file_ +
          ": expected a whole shortlist: both sides have one vocabulary, but not as many pieces");
  write_lexical_table(file_, learn_lexical_table(made_corpus(50, 12), 26, 26), vocabularies_);
  EXPECT_TRUE(read_lexical_table(file_, vocabularies_).joined);
}

TEST_F(LexicalTableFileTest, OtherVocabulariesAreNamed) {
  write_file(vocabularies_[1].string(), "another");
  EXPECT_EQ(refusal(file_), file_ + ": expected a shortlist made for the vocabulary " +
                                vocabularies_[1].string() + ", got one made for another");
}

TEST_F(LexicalTableFileTest, AChangedByteIsNoticed) {
  const std::string good = read_file(file_);
  for (size_t i = 0; i < good.size(); i += 1 + good.size() / 300) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 4);
    write_file(folder_ / "bad", bad);
    EXPECT_NE(refusal(folder_ / "bad"), "nothing was thrown") << "byte " << i;
  }
  for (const size_t size : {size_t{0}, size_t{7}, good.size() / 2, good.size() - 1}) {
    write_file(folder_ / "bad", good.substr(0, size));
    EXPECT_NE(refusal(folder_ / "bad"), "nothing was thrown") << size << " bytes";
  }
}

// ... and so is a table that cannot be, with sums that are right.
TEST_F(LexicalTableFileTest, ATableThatCannotBeIsRefused) {
  const auto written = [&](auto change) {
    nmt::LexicalTable table = table_;
    change(table);
    write_lexical_table(folder_ / "bad", table, vocabularies_);
    return refusal(folder_ / "bad");
  };
  const std::string start = (folder_ / "bad") + ": expected a whole shortlist: ";
  EXPECT_EQ(written([](auto& t) { t.offsets[5] = -1; }), start + "offsets do not fit targets");
  EXPECT_EQ(written([](auto& t) { t.offsets.back() += 1; }), start + "offsets do not fit targets");
  EXPECT_EQ(written([](auto& t) { t.offsets.clear(); }), start + "offsets do not fit targets");
  EXPECT_EQ(written([](auto& t) { t.targets[0] = 26; }),
            start + "a piece is not in the vocabulary");
  EXPECT_EQ(written([](auto& t) { t.frequent[0] = -1; }),
            start + "a piece is not in the vocabulary");
  EXPECT_EQ(written([](auto& t) { t.probabilities.pop_back(); }),
            start + "probabilities do not fit targets");
  EXPECT_EQ(written([](auto& t) { t.probabilities[0] = NAN; }),
            start + "a probability is not in [0, 1]");
  EXPECT_EQ(written([](auto& t) { t.target_pieces = 0; }), start + "target_pieces is out of range");
  EXPECT_EQ(written([](auto& t) { t.best = 0; }), start + "best is out of range");
}

class LexicalTextTest : public testing::Test {
 protected:
  LexicalTextTest() {
    text::train_tokenizer(std::vector<std::string>{"red cat red cat red cat"}, folder_ / "s.spm",
                          {.vocab_size = 13, .character_coverage = 1.0});
    text::train_tokenizer(std::vector<std::string>{"grove chat grove chat"}, folder_ / "t.spm",
                          {.vocab_size = 15, .character_coverage = 1.0});
  }
  LexicalText read(const std::string& text) const {
    write_file(folder_ / "lex", text);
    return read_lexical_text(folder_ / "lex", text::Tokenizer(folder_ / "s.spm"),
                             text::Tokenizer(folder_ / "t.spm"), 10);
  }
  TemporaryFolder folder_;
};

TEST_F(LexicalTextTest, LinesHaveTargetSourceProbability) {
  const text::Tokenizer source(folder_ / "s.spm"), target(folder_ / "t.spm");
  const std::string s = source.piece(5), t = target.piece(6), u = target.piece(7);
  const auto [table, unknown] = read(t + " " + s + " 0.25\n" + u + " " + s + " 0.5\n" + t +
                                     " NULL 1e-3\nNULL " + s + " 0.2\nneither " + s + " 0.1\n");
  EXPECT_EQ(unknown, 1);
  EXPECT_EQ(table.targets, (Ids{6, 7, 6}));  // the empty word's, then s's
  EXPECT_EQ(table.probabilities, (std::vector<float>{1e-3F, 0.5F, 0.25F}));
  EXPECT_EQ(table.offsets[4] - table.offsets[3], 1);
  EXPECT_EQ(table.offsets[6] - table.offsets[5], 2);
  EXPECT_EQ(table.best, 10);
  Ids frequent;  // No place of the first is spent on the special pieces.
  for (int32_t piece = 4; piece < target.num_pieces(); ++piece) frequent.push_back(piece);
  EXPECT_EQ(table.frequent, frequent);
}

TEST_F(LexicalTextTest, BadLinesAreNamed) {
  const auto refusal = [&](const std::string& text) {
    return test::message_of<ConfigError>([&] { read(text); });
  };
  const std::string file = folder_ / "lex";
  for (const std::string line :
       {"a b", "a b c", "a b 1.5", "a b -0.1", "a b nan", "a b 0.5 x", ""}) {
    EXPECT_EQ(refusal("a b 0.5\n" + line + "\n"),
              file + ": line 2: expected \"target source probability\", got \"" + line + "\"");
  }
  EXPECT_EQ(refusal("x y 0.5\n"),
            file + ": expected pieces of both vocabularies, got none in 1 line");
  EXPECT_NE(refusal("\xff b 0.5\n").find("UTF-8"), std::string::npos);
}

}  // namespace lexical_table_test
}  // namespace cohort::translate
