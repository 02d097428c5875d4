// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/token_cache.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <set>
#include <sys/resource.h>

#include "cohort/base/error.h"
#include "cohort/base/safetensors.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace cohort::translate {
namespace token_cache_test {

namespace fs = std::filesystem;

// Text of 40 pairs in a folder, two of them with an empty side, and a vocabulary for both sides.
class TokenCacheTest : public testing::Test {
 protected:
  TokenCacheTest() {
    write_text("");
    const text::ParallelText pairs = text::read_parallel_text(inputs_.text);
    text::train_tokenizer(pairs.source, folder_ / "v.spm",
                          {.vocab_size = 40, .character_coverage = 1.0});
  }

  void write_text(const std::string& more) const {
    const std::vector<std::string> words = {"red", "green", "blue", "one", "two", "cat", "dog"};
    std::string source;
    std::string target;
    for (size_t i = 0; i < 40; ++i) {
      for (size_t k = 0; k <= i % 9; ++k) source += words[(i * 5 + k * 3) % words.size()] + " ";
      if (i != 7) target += words[i % words.size()] + (i % 3 == 0 ? " dog" : "");
      if (i == 11) source.erase(source.rfind('\n') + 1);
      source += "\n";
      target += "\n";
    }
    write_file(folder_ / "a.en", source + more);
    write_file(folder_ / "a.xx", target + more);
  }

  TrainingText cached() {
    comm::ProcessGroup alone(comm::RankInfo{});
    return cached_text(file_, inputs_, tokenizer(), tokenizer(), alone);
  }
  text::Tokenizer tokenizer() const { return text::Tokenizer(folder_ / "v.spm"); }

  TemporaryFolder folder_;
  const fs::path file_ = folder_ / "cache.safetensors";
  TokenCacheInputs inputs_{.text = {folder_ / "a.en", folder_ / "a.xx"},
                           .vocabularies = {folder_ / "v.spm", folder_ / "v.spm"},
                           .lengths = {}};
};

void expect_equal(const Corpus& a, const Corpus& b) {
  ASSERT_EQ(a.size(), b.size());
  for (int64_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a.source(i), b.source(i)) << i;
    EXPECT_EQ(a.target(i), b.target(i)) << i;
    EXPECT_EQ(a.lengths()[static_cast<size_t>(i)].source, std::ssize(b.source(i)) + 1);
    EXPECT_EQ(a.lengths()[static_cast<size_t>(i)].target, std::ssize(b.target(i)) + 1);
  }
}

TEST_F(TokenCacheTest, HoldsWhatTokenisingGives) {
  const TrainingText text = cached();
  expect_equal(text.corpus,
               tokenize(text::read_parallel_text(inputs_.text), tokenizer(), tokenizer()));
  EXPECT_EQ(text.counts.read, 40);
  EXPECT_EQ(text.counts.dropped_empty, 2);
  EXPECT_EQ(text.counts.kept, 38);
  EXPECT_EQ(text.origin, "built");
  const TrainingText again = cached();
  EXPECT_EQ(again.origin, "used");
  expect_equal(again.corpus, text.corpus);
  EXPECT_EQ(again.sha256, text.sha256);
  EXPECT_EQ(again.counts.kept, 38);
}

TEST_F(TokenCacheTest, EveryPairIsKeptCroppedOrDropped) {
  const TrainingText all = cached();
  for (const bool crop : {false, true}) {
    inputs_.lengths = {.max_length = 8, .max_length_crop = crop};
    const TrainingText text = cached();
    const PairCounts& counts = text.counts;
    EXPECT_EQ(counts.read, 40);
    EXPECT_EQ(counts.kept + counts.cropped + counts.dropped_long + counts.dropped_empty, 40);
    EXPECT_EQ(counts.kept + counts.cropped, text.corpus.size());
    EXPECT_GT(crop ? counts.cropped : counts.dropped_long, 0);
    EXPECT_EQ(crop ? counts.dropped_long : counts.cropped, 0);
    for (const auto& [source, target] : text.corpus.lengths())
      EXPECT_LE(std::max(source, target), 8 + 1);
    if (!crop) continue;
    for (int64_t i = 0; i < all.corpus.size(); ++i) {
      auto whole = all.corpus.source(i);
      whole.resize(std::min<size_t>(whole.size(), 8));
      EXPECT_EQ(text.corpus.source(i), whole) << "its beginning";
    }
  }
  inputs_.lengths.max_length_crop = false;
  inputs_.lengths.max_length = 1;
  write_file(folder_ / "long.tsv", "red red green\tblue blue blue\n");
  inputs_.text = {folder_ / "long.tsv"};
  EXPECT_EQ(test::message_of<ConfigError>([&] { cached(); }),
            "--max-length 1: every training pair is longer");
}

TEST_F(TokenCacheTest, AViewOfMemoryAndOneOfWideIdsAreLikeIt) {
  const Corpus narrow = cached().corpus;
  std::vector<std::vector<int32_t>> sources, targets;
  std::vector<int32_t> ids;
  std::vector<int64_t> offsets;
  for (int64_t i = 0; i < narrow.size(); ++i) {
    sources.push_back(narrow.source(i));
    targets.push_back(narrow.target(i));
    offsets.push_back(std::ssize(ids));
    for (const auto* side : {&sources.back(), &targets.back()})
      ids.insert(ids.end(), side->begin(), side->end());
  }
  expect_equal(narrow, Corpus(sources, targets));
  // As vocabularies of more than 32768 pieces have them.
  const std::array tensors = {TensorView{.name = "ids",
                                         .dtype = DType::kI32,
                                         .shape = {std::ssize(ids)},
                                         .bytes = std::as_bytes(std::span(ids))},
                              TensorView{.name = "lengths",
                                         .dtype = DType::kI32,
                                         .shape = {narrow.size(), 2},
                                         .bytes = std::as_bytes(narrow.lengths())},
                              TensorView{.name = "offsets",
                                         .dtype = DType::kI64,
                                         .shape = {narrow.size()},
                                         .bytes = std::as_bytes(std::span(offsets))}};
  write_safetensors(folder_ / "wide", tensors);
  expect_equal(narrow, Corpus(std::make_shared<const SafetensorsFile>(folder_ / "wide")));
}

TEST_F(TokenCacheTest, AStaleCacheIsNeverUsed) {
  const auto expect_rebuilt = [&](const std::string& why) {
    const TrainingText text = cached();
    EXPECT_EQ(text.origin.find("built: the one there was stale: "), 0) << text.origin;
    EXPECT_NE(text.origin.find(why), std::string::npos) << text.origin;
    EXPECT_TRUE(text.was_bad);
    EXPECT_EQ(cached().origin, "used");
    return text;
  };
  const std::string before = cached().sha256;
  inputs_.lengths.max_length = 9;
  expect_rebuilt("max_length was 0, now it is 9");
  inputs_.lengths.max_length_crop = true;
  expect_rebuilt("max_length_crop was 0, now it is 1");
  inputs_.lengths = {};
  EXPECT_EQ(expect_rebuilt("max_length").sha256, before);
  write_text("one more\n");
  const TrainingText longer = expect_rebuilt("a.en has changed");
  EXPECT_EQ(longer.corpus.size(), 39);
  // As many bytes, and the time of the change set back.
  const auto time = fs::last_write_time(inputs_.text[0]);
  write_text("one nose\n");
  fs::last_write_time(inputs_.text[0], time);
  fs::last_write_time(inputs_.text[1], time);
  expect_rebuilt("a.en has changed");
  text::train_tokenizer(text::read_parallel_text(inputs_.text).source, folder_ / "v.spm",
                        {.vocab_size = 38, .character_coverage = 1.0});
  expect_rebuilt("vocabulary.source_sha256");
}

TEST_F(TokenCacheTest, TextThatWasOnlyTouchedOrCopiedIsNotTokenisedAgain) {
  cached();
  for (const fs::path& path : inputs_.text)
    fs::last_write_time(path, fs::file_time_type::clock::now() - std::chrono::minutes(1));
  EXPECT_EQ(cached().origin, "used");
  fs::rename(folder_ / "a.en", folder_ / "b.en");
  fs::copy_file(folder_ / "b.en", folder_ / "a.en");
  EXPECT_EQ(cached().origin, "used");
}

TEST_F(TokenCacheTest, EveryFlippedByteAndEveryCutIsNoticed) {
  const std::string sum = cached().sha256;
  const std::string whole = read_file(file_);
  ASSERT_LT(whole.size(), 20'000);
  for (size_t i = 0; i < whole.size(); i += 3) {
    std::string flipped = whole;
    flipped[i] = static_cast<char>(flipped[i] ^ 1);
    write_file(file_, flipped);
    const OpenedCache opened = open_token_cache(file_, inputs_);
    ASSERT_FALSE(opened.text) << "byte " << i;
    ASSERT_EQ(opened.why.find("damaged: "), 0) << "byte " << i << ": " << opened.why;
  }
  for (size_t size = 0; size < whole.size(); size += 97) {
    write_file(file_, whole.substr(0, size));
    ASSERT_FALSE(open_token_cache(file_, inputs_).text) << size << " bytes";
  }
  const TrainingText rebuilt = cached();
  EXPECT_EQ(rebuilt.origin.find("built: the one there was damaged: "), 0) << rebuilt.origin;
  EXPECT_TRUE(rebuilt.was_bad);
  EXPECT_EQ(rebuilt.sha256, sum);
}

TEST_F(TokenCacheTest, AFullDiskIsOneLineAndLeavesNothing) {
  cached();
  const std::string before = read_file(file_);
  write_text("one more\n");
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder_.path()))
    names.insert(entry.path().filename());
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit low{.rlim_cur = 200, .rlim_max = limit.rlim_max};
  setrlimit(RLIMIT_FSIZE, &low);
  const std::string error = test::message_of<c10::Error>([&] { cached(); });
  setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(error, file_.string() + ": cannot write: File too large");
  for (const auto& entry : fs::directory_iterator(folder_.path()))
    EXPECT_TRUE(names.contains(entry.path().filename())) << entry.path();
  EXPECT_TRUE(read_file(file_) == before) << "the earlier file is as it was";
  EXPECT_EQ(cached().corpus.size(), 39);
}

TEST_F(TokenCacheTest, AnInputThatCannotBeReadIsNoDamageOfTheCache) {
  cached();
  const auto error = [&] {
    return test::message_of<ConfigError>([&] { open_token_cache(file_, inputs_); });
  };
  EXPECT_EQ(error(), "nothing was thrown");
  fs::rename(folder_ / "a.en", folder_ / "gone");
  EXPECT_EQ(error(), folder_ / "a.en" + ": cannot be read: No such file or directory");
  fs::create_symlink("/dev/null", folder_ / "a.en");
  EXPECT_EQ(error(), folder_ / "a.en" + ": expected a regular file, for it is read more than once");
  fs::remove(folder_ / "a.en");
  fs::rename(folder_ / "gone", folder_ / "a.en");
  fs::remove(folder_ / "v.spm");
  EXPECT_EQ(error(), folder_ / "v.spm" + ": expected a readable file: No such file or directory");
}

TEST_F(TokenCacheTest, AFolderThatTakesNoFilesIsTheCallersFault) {
  const auto error = [&](const fs::path& file) {
    return test::message_of<ConfigError>(
        [&] { build_token_cache(file, inputs_, tokenizer(), tokenizer()); });
  };
  const std::string expected = ": expected a folder in which the token cache can be written: ";
  EXPECT_EQ(error(folder_ / "a.en/c"), folder_ / "a.en" + expected + "Not a directory");
  EXPECT_EQ(error("/proc/self/c").find("/proc/self" + expected), 0) << error("/proc/self/c");
}

TEST_F(TokenCacheTest, ALongTokenisationTellsHowFarItIs) {
  std::string many;
  for (int i = 0; i < 20'000; ++i) many += "red cat\n";
  write_text(many);
  std::vector<int64_t> told;
  const auto tell = [&](int64_t num_pairs) { told.push_back(num_pairs); };
  build_token_cache(file_, inputs_, tokenizer(), tokenizer(), {.tell = tell, .interval = {}});
  ASSERT_GE(told.size(), 3);
  EXPECT_TRUE(std::ranges::is_sorted(told));
  EXPECT_GT(told.front(), 0);
  EXPECT_LE(told.front(), 10'000);
  EXPECT_EQ(told.back(), 20'038);
  told.clear();
  build_token_cache(file_, inputs_, tokenizer(), tokenizer(), {.tell = tell});
  EXPECT_TRUE(told.empty()) << "it took less than 30 s";
}

TEST_F(TokenCacheTest, RunsCanShareAFolder) {
  const auto name = [&] { return token_cache_file(inputs_, "/cache", "/run").string(); };
  const std::string first = name();
  EXPECT_EQ(first.find("/cache/"), 0);
  EXPECT_EQ(name(), first);
  inputs_.lengths.max_length = 9;
  EXPECT_NE(name(), first);
  EXPECT_EQ(token_cache_file(inputs_, "", "/run"), "/run/train-tokens.safetensors");
}

// One folder for all ranks, each of which is a process that comes by here: the first fills it.
fs::path shared_folder(const char* name, const std::string& text) {
  const fs::path folder = fs::temp_directory_path() / (std::string("cohort-test-") + name);
  if (std::getenv("COHORT_TEST_RANK") != nullptr) return folder;
  fs::remove_all(folder);
  fs::create_directories(folder);
  write_file(folder / "a.tsv", text);
  text::train_tokenizer(std::vector<std::string>{"red cat 0123456789", "blue dog"},
                        folder / "v.spm", {.vocab_size = 40, .character_coverage = 1.0});
  return folder;
}

TrainingText text_in(const fs::path& folder, const comm::ProcessGroup& group) {
  const text::Tokenizer tokenizer(folder / "v.spm");
  const TokenCacheInputs inputs{.text = {folder / "a.tsv"},
                                .vocabularies = {folder / "v.spm", folder / "v.spm"},
                                .lengths = {}};
  return cached_text(folder / "c.safetensors", inputs, tokenizer, tokenizer, group);
}

TEST(TokenCacheRanksTest, OneRankBuildsAndAllHaveTheSameText) {
  std::string pairs;
  for (int i = 0; i < 500; ++i) pairs += "red cat " + std::to_string(i % 10) + "\tblue dog\n";
  const fs::path folder = shared_folder("token-cache-ranks", pairs);
  test::ranks(3, [&](const comm::ProcessGroup& group) {
    const TrainingText text = text_in(folder, group);
    EXPECT_EQ(text.corpus.size(), 500);
    EXPECT_EQ(text.origin, group.rank() == 0 ? "built" : "used");
  });
  fs::remove_all(folder);
}

TEST(TokenCacheRanksTest, AllRanksHearWhyTheBuilderFailed) {
  const fs::path folder = shared_folder("token-cache-failure", "red\tblue\nred blue\n");
  const auto ends =
      test::run_ranks(3, [&](const comm::ProcessGroup& group) { text_in(folder, group); });
  for (const auto& end : ends) {
    EXPECT_EQ(end.exit_code, 2) << end.output;
    EXPECT_NE(end.output.find("a.tsv: line 2: expected source<TAB>target, found 0 tabs"),
              std::string::npos)
        << end.output;
  }
  EXPECT_FALSE(fs::exists(folder / "c.safetensors"));
  fs::remove_all(folder);
}

}  // namespace token_cache_test
}  // namespace cohort::translate
