// SPDX-License-Identifier: Apache-2.0
#include "cohort/text/tokenizer.h"

#include <gtest/gtest.h>
#include <thread>

#include "cohort/text/sentencepiece_bridge.h"
#include "cohort/text/text_file.h"

#include "tests/support/message_of.h"
#include "tests/text/text_test_files.h"

namespace cohort::text {
namespace tokenizer_test {

// Sentences of made-up words in Latin letters, and of Chinese characters, without spaces.
std::vector<std::string> generated_sentences() {
  const std::vector<std::string> syllables = {"ka", "to", "mi", "re", "lun", "sha", "vo", "pel"};
  const std::vector<std::string> characters = {"\u4F60", "\u597D", "\u4E16", "\u754C", "\u6211",
                                               "\u4EEC", "\uFF0C", "\u3002", "\u4ECA", "\u5929"};
  uint32_t state = 1;
  const auto next = [&state](size_t size) {
    state = state * 1664525u + 1013904223u;
    return static_cast<size_t>(state >> 16) % size;
  };
  std::vector<std::string> sentences;
  for (int i = 0; i < 300; ++i) {
    std::string latin;
    for (size_t word = 0; word < 3 + next(6); ++word) {
      if (word > 0) latin += ' ';
      for (size_t n = 0; n < 1 + next(3); ++n) latin += syllables[next(syllables.size())];
    }
    sentences.push_back(latin);
    std::string chinese;
    for (size_t n = 0; n < 4 + next(10); ++n) chinese += characters[next(characters.size())];
    sentences.push_back(chinese);
  }
  return sentences;
}

constexpr int32_t kVocabSize = 120;

class TokenizerTest : public testing::Test {
 protected:
  std::filesystem::path train(const TokenizerOptions& options, const std::string& name) const {
    const std::filesystem::path file = folder_.path() / name;
    train_tokenizer(sentences_, file, options);
    return file;
  }
  std::filesystem::path train() const { return train({.vocab_size = kVocabSize}, "a.spm"); }

  std::string load_error(const std::filesystem::path& file) const {
    const std::string text = test::message_of<ConfigError>([&] { Tokenizer tokenizer(file); });
    const std::string folder = folder_.path().string();
    return text.rfind(folder, 0) == 0 ? "@" + text.substr(folder.size()) : text;
  }

  const TestFolder folder_;
  const std::vector<std::string> sentences_ = generated_sentences();
};

TEST_F(TokenizerTest, DecodingGivesBackTheText) {
  for (const TokenizerModel model : {TokenizerModel::kBpe, TokenizerModel::kUnigram}) {
    const Tokenizer tokenizer(train({.vocab_size = kVocabSize, .model = model}, "a.spm"));
    EXPECT_EQ(tokenizer.num_pieces(), kVocabSize);
    for (const std::string& sentence : sentences_) {
      const std::vector<int32_t> ids = tokenizer.encode(sentence);
      ASSERT_FALSE(ids.empty());
      for (const int32_t id : ids) {
        ASSERT_GT(id, kEosId);
        ASSERT_LT(id, kVocabSize);
      }
      ASSERT_EQ(tokenizer.decode(ids), sentence);
    }
    EXPECT_TRUE(tokenizer.encode("").empty());
    EXPECT_EQ(tokenizer.decode({}), "");
  }
}

// A line of a program's output is a sentence, whatever pieces a user's own model has.
TEST_F(TokenizerTest, DecodingGivesOneLine) {
  std::string error;
  const std::string bytes = bridge::train(sentences_,
                                          std::vector<bridge::TrainerFlag>{
                                              {"vocab_size", std::to_string(kVocabSize + 256)},
                                              {"model_type", "bpe"},
                                              {"byte_fallback", "true"},
                                              {"pad_id", "0"},
                                              {"unk_id", "1"},
                                              {"bos_id", "2"},
                                              {"eos_id", "3"},
                                          },
                                          error);
  ASSERT_EQ(error, "");
  const Tokenizer tokenizer(folder_.write("bytes.spm", bytes));
  const std::vector<int32_t> words = tokenizer.encode("ka to");
  for (const char* name : {"<0x0A>", "<0x0D>"}) {
    int32_t id = 0;
    while (id < tokenizer.num_pieces() && tokenizer.piece(id) != name) ++id;
    ASSERT_LT(id, tokenizer.num_pieces()) << name;
    std::vector<int32_t> ids = words;
    ids.push_back(id);
    ids.insert(ids.end(), words.begin(), words.end());
    EXPECT_EQ(tokenizer.decode(ids), "ka to  ka to") << name;
  }
}

TEST_F(TokenizerTest, SpecialIdsAreTheSameInEveryModel) {
  const Tokenizer tokenizer(train());
  EXPECT_EQ(tokenizer.piece(kPadId), "<pad>");
  EXPECT_EQ(tokenizer.piece(kUnkId), "<unk>");
  EXPECT_EQ(tokenizer.piece(kBosId), "<s>");
  EXPECT_EQ(tokenizer.piece(kEosId), "</s>");
  const std::vector<int32_t> ids = tokenizer.encode("ka \u9F98");
  EXPECT_EQ(ids.back(), kUnkId);
  std::vector<int32_t> framed = tokenizer.encode("ka to");
  framed.insert(framed.begin(), kBosId);
  framed.push_back(kEosId);
  framed.push_back(kPadId);
  EXPECT_EQ(tokenizer.decode(framed), "ka to");
}

TEST_F(TokenizerTest, ReservedPiecesInTextAreText) {
  const Tokenizer tokenizer(train());
  for (const int32_t id : tokenizer.encode("ka</s>to<pad>")) {
    EXPECT_NE(id, kEosId);
    EXPECT_NE(id, kPadId);
  }
}

TEST_F(TokenizerTest, NormalizationIsAChoice) {
  const Tokenizer kept(train());
  const Tokenizer folded(
      train({.vocab_size = kVocabSize, .normalization = Normalization::kNmtNfkc}, "b.spm"));
  EXPECT_EQ(kept.decode(kept.encode("\u4F60\uFF0C\u597D")), "\u4F60\uFF0C\u597D");
  EXPECT_EQ(folded.decode(folded.encode("\u4F60\uFF0C\u597D")), "\u4F60,\u597D");
}

TEST_F(TokenizerTest, TwoTrainingsGiveEqualBytesAndNothingElse) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const std::string first = read_file(train({.vocab_size = kVocabSize}, "a.spm"));
  const std::string second = read_file(train({.vocab_size = kVocabSize}, "b.spm"));
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_TRUE(first == second);
  const std::filesystem::directory_iterator files(folder_.path());
  EXPECT_EQ(std::distance(begin(files), end(files)), 2);
}

TEST_F(TokenizerTest, ThreadsShareOneTokenizer) {
  const Tokenizer tokenizer(train());
  std::vector<std::vector<int32_t>> expected;
  for (const std::string& sentence : sentences_) expected.push_back(tokenizer.encode(sentence));
  std::vector<int> num_different(4, 0);
  {
    std::vector<std::jthread> threads;
    for (int& count : num_different) {
      threads.emplace_back([&] {
        for (size_t i = 0; i < sentences_.size(); ++i) {
          count += tokenizer.encode(sentences_[i]) != expected[i];
          count += tokenizer.decode(expected[i]) != sentences_[i];
        }
      });
    }
  }
  EXPECT_EQ(num_different, std::vector<int>(4, 0));
}

TEST_F(TokenizerTest, SizesThatTheTextDoesNotAllowNameTheBound) {
  const auto error = [this](int32_t size) {
    return test::message_of<ConfigError>([&] { train({.vocab_size = size}, "a.spm"); });
  };
  const std::string too_large = error(32000);
  const std::string start = "vocab_size 32000 is more than the text allows: expected at most ";
  ASSERT_EQ(too_large.rfind(start, 0), 0u) << too_large;
  const int32_t most = std::stoi(too_large.substr(start.size()));
  EXPECT_EQ(Tokenizer(train({.vocab_size = most}, "a.spm")).num_pieces(), most);
  EXPECT_EQ(error(most + 1), "vocab_size " + std::to_string(most + 1) +
                                 " is more than the text allows: expected at most " +
                                 std::to_string(most));
  EXPECT_EQ(error(10),
            "vocab_size 10 is less than the text's letters need: expected at least 30, "
            "or a lower character_coverage");
  EXPECT_EQ(error(4), "vocab_size is 4: expected at least 5 (four special pieces and one letter)");
}

TEST_F(TokenizerTest, OptionsOutOfRangeAreErrors) {
  EXPECT_EQ(test::message_of<ConfigError>([&] { train({.character_coverage = 0.5}, "a.spm"); }),
            "character_coverage is 0.500000: expected a number in [0.98, 1]");
  EXPECT_EQ(test::message_of<ConfigError>([&] { train({.num_threads = 0}, "a.spm"); }),
            "num_threads is 0: expected a number in [1, 1024]");
  const std::vector<std::string> blank = {"", " "};
  EXPECT_EQ(test::message_of<ConfigError>([&] { train_tokenizer(blank, "a.spm"); }),
            "a.spm: no text to train the tokenizer on");
  EXPECT_NE(test::message_of<ConfigError>([&] {
              train({.vocab_size = kVocabSize}, "none/a.spm");
            }).find("none/a.spm: "),
            std::string::npos);
}

TEST_F(TokenizerTest, FilesThatAreNoModelAreNamed) {
  EXPECT_EQ(load_error(folder_.path() / "none.spm"),
            "@/none.spm: cannot be read: No such file or directory");
  EXPECT_EQ(load_error(folder_.write("empty.spm", "")),
            "@/empty.spm: expected a whole SentencePiece model, found 0 bytes that are none");
  EXPECT_EQ(load_error(folder_.write("text.spm", "no model")),
            "@/text.spm: expected a whole SentencePiece model, found 8 bytes that are none");
}

// As spm_train writes them, unless it is told otherwise.
TEST_F(TokenizerTest, OtherSpecialIdsAreRefusedWithTheFlagsOfTheRightOnes) {
  std::string error;
  const std::vector<bridge::TrainerFlag> flags = {{"vocab_size", std::to_string(kVocabSize)},
                                                  {"model_type", "bpe"}};
  const std::string bytes = bridge::train(sentences_, flags, error);
  ASSERT_EQ(error, "");
  EXPECT_EQ(load_error(folder_.write("other.spm", bytes)),
            "@/other.spm: expected pad 0, unk 1, bos 2, eos 3 (spm_train --pad_id=0 --unk_id=1 "
            "--bos_id=2 --eos_id=3), found pad -1, unk 0, bos 1, eos 2");
}

TEST_F(TokenizerTest, AFileCutShortIsAnErrorWhereverTheCut) {
  const std::string bytes = read_file(train());
  for (size_t size = 0; size < bytes.size(); size += 4 + size / 60) {
    const std::string error = load_error(folder_.write("cut.spm", bytes.substr(0, size)));
    ASSERT_NE(error.find("expected a whole SentencePiece model"), std::string::npos) << size;
  }
}

TEST_F(TokenizerTest, IdsOutOfRangeAreErrors) {
  const Tokenizer tokenizer(train());
  EXPECT_THROW(tokenizer.decode(std::vector<int32_t>{kVocabSize}), c10::ValueError);
  EXPECT_THROW(tokenizer.decode(std::vector<int32_t>{-1}), c10::ValueError);
  EXPECT_THROW(tokenizer.piece(kVocabSize), c10::ValueError);
}

}  // namespace tokenizer_test
}  // namespace cohort::text
