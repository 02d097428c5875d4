// SPDX-License-Identifier: Apache-2.0
// The data of examples/ctr: lines, files, generator.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "cohort/base/error.h"

#include "examples/ctr/click_generator.h"
#include "examples/ctr/example_reader.h"
#include "examples/ctr/interruption.h"
#include "examples/ctr/table_limits.h"

namespace ctr {
namespace ctr_data_test {

// A fresh folder, removed with all it holds.
class Folder {
 public:
  Folder() {
    std::string name = std::filesystem::temp_directory_path().string() + "/ctr-test-XXXXXX";
    path_ = mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string file(const std::string& name, const std::string& text) const {
    std::ofstream(path_ + "/" + name, std::ios::binary) << text;
    return path_ + "/" + name;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// 13 numbers 0, 1, ..., 12 and 26 categories 0, 1, ...
std::string line_of(const std::string& label) {
  std::string line = label;
  for (int i = 0; i < kNumbers; ++i) line += "\t" + std::to_string(i);
  for (int i = 0; i < kCategories; ++i) {
    std::ostringstream hex;
    hex << std::hex << i;
    line += "\t" + hex.str();
  }
  return line;
}

// `line` with field `number`, from 1, replaced.
std::string with_field(const std::string& line, int number, const std::string& text) {
  std::istringstream stream(line);
  std::string result;
  int at = 0;
  for (std::string field; std::getline(stream, field, '\t');) {
    if (at > 0) result += '\t';
    ++at;
    result += at == number ? text : field;
  }
  return result;
}

std::string fault_of(std::string line, Labels labels = Labels::kGiven) {
  line += '\n';
  Example example;
  const auto fault = parse_line(line.data(), line.data() + line.size() - 1, labels, example);
  return fault ? std::to_string(fault->field) + ": " + fault->expected : "none";
}

Example parsed(std::string line, Labels labels = Labels::kGiven) {
  EXPECT_EQ(fault_of(line, labels), "none");
  line += '\n';
  Example example;
  parse_line(line.data(), line.data() + line.size() - 1, labels, example);
  return example;
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const cohort::ConfigError& error) {
    return cohort::one_line(error);
  }
  return "no error";
}

TEST(ExampleLineTest, NumbersAreLogarithmsAndCategoriesIdsOfTheirSlot) {
  const Example example = parsed(line_of("1"));
  EXPECT_EQ(example.label, 1);
  for (size_t i = 0; i < kNumbers; ++i) {
    EXPECT_FLOAT_EQ(example.numbers[i], std::log1p(static_cast<float>(i)));
  }
  for (size_t i = 0; i < kCategories; ++i) {
    EXPECT_EQ(example.ids[i], category_id(static_cast<int>(i), static_cast<uint32_t>(i)));
  }
  const Example other = parsed(line_of("").substr(1), Labels::kAbsent);
  EXPECT_EQ(other.label, 0);
}

TEST(ExampleLineTest, OddFieldsReadAsWhatTheyAre) {
  const auto number = [](const std::string& text) {
    return parsed(with_field(line_of("0"), 3, text)).numbers[1];
  };
  EXPECT_EQ(number(""), 0);
  EXPECT_EQ(number("-3"), 0);
  EXPECT_FLOAT_EQ(number("5000"), std::log1p(5000.0f));
  EXPECT_FLOAT_EQ(number("65535000"), std::log1p(65535000.0f));
  EXPECT_FLOAT_EQ(number("1.5"), std::log1p(1.5f));
  EXPECT_FLOAT_EQ(number("2e3"), std::log1p(2000.0f));
  EXPECT_FLOAT_EQ(number("12345678901234567890"), std::log1p(12345678901234567890.0f));
  EXPECT_FLOAT_EQ(number(std::string(30, '9')), std::log1p(1e30f));
  const auto id = [](const std::string& text) {
    return parsed(with_field(line_of("0"), 40, text)).ids[25];
  };
  EXPECT_EQ(id(""), category_id(25, std::nullopt));
  EXPECT_EQ(id("68fd1e64"), category_id(25, 0x68fd1e64));
  EXPECT_EQ(id("68FD1E64"), category_id(25, 0x68fd1e64));
  EXPECT_EQ(id("f"), category_id(25, 15));
  std::set<uint64_t> ids;
  for (int slot = 0; slot < kCategories; ++slot) {
    ids.insert(category_id(slot, std::nullopt));
    for (const uint32_t value : {0u, 1u, 0xffffffffu}) ids.insert(category_id(slot, value));
  }
  EXPECT_EQ(ids.size(), 4u * kCategories);
}

TEST(ExampleLineTest, FaultsNameFieldAndExpectation) {
  const std::string line = line_of("0");
  EXPECT_EQ(fault_of(with_field(line, 1, "2")), "1: a label, 0 or 1");
  EXPECT_EQ(fault_of(""), "1: a label, 0 or 1");
  EXPECT_EQ(fault_of("1"), "2: a number, or nothing, after a tab");
  EXPECT_EQ(fault_of(with_field(line, 5, "x")), "5: a number, or nothing");
  EXPECT_EQ(fault_of(with_field(line, 5, "-")), "5: a number, or nothing");
  EXPECT_EQ(fault_of(with_field(line, 5, "nan")), "5: a number, or nothing");
  EXPECT_EQ(fault_of(with_field(line, 5, "1 ")), "5: a number, or nothing");
  EXPECT_EQ(fault_of(with_field(line, 20, "12345678a")),
            "20: up to 8 hexadecimal digits, or nothing");
  EXPECT_EQ(fault_of(with_field(line, 20, "1234567g")),
            "20: up to 8 hexadecimal digits, or nothing");
  EXPECT_EQ(fault_of(line + "\t"), "41: the line's end");
  EXPECT_EQ(fault_of(line.substr(0, line.rfind('\t'))), "40: a field after a tab: the line ends");
  EXPECT_EQ(fault_of("0\t1\t2"), "4: a field after a tab: the line ends");
  EXPECT_EQ(fault_of(line.substr(2)), "40: a field after a tab: the line ends");
}

// Lines that say their number in the last category.
std::string numbered_lines(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    std::ostringstream hex;
    hex << std::hex << i;
    std::string line = with_field(line_of(i % 3 == 0 ? "1" : "0"), 40, hex.str());
    // Lengths differ.
    for (int field = 2; field < 2 + i % 7; ++field) line = with_field(line, field, "");
    text += line + "\n";
  }
  return text;
}

std::map<uint64_t, int> read_share(const ReaderOptions& options, int64_t& examples) {
  ExampleReader reader(options);
  std::map<uint64_t, int> seen;
  for (Batch batch; reader.next(batch);) {
    EXPECT_LE(batch.size, options.batch_size);
    EXPECT_EQ(batch.labels.size(), static_cast<size_t>(batch.size));
    EXPECT_EQ(batch.numbers.size(), static_cast<size_t>(batch.size * kNumbers));
    EXPECT_EQ(batch.ids.size(), static_cast<size_t>(batch.size * kCategories));
    for (size_t i = 0; i < static_cast<size_t>(batch.size); ++i) {
      ++seen[batch.ids[i * kCategories + 25]];
    }
  }
  examples += reader.counts().examples;
  return seen;
}

TEST(ExampleReaderTest, SharesTogetherReadEveryLineOnce) {
  constexpr int kLines = 500;
  const Folder folder;
  const std::string whole = folder.file("whole.tsv", numbered_lines(kLines));
  std::string open_end = numbered_lines(kLines);
  open_end.pop_back();
  const std::string open = folder.file("open.tsv", open_end);
  const std::string empty = folder.file("empty.tsv", "");
  for (const std::vector<std::string>& files :
       {std::vector{whole}, std::vector{open}, std::vector{empty, whole, empty}}) {
    // Blocks shorter than a line, about a line, and longer; one byte more or less.
    for (const int64_t block : {1, 7, 120, 121, 1000, 4096, 1 << 20, 0}) {
      for (const int shares : {1, 2, 3, 5}) {
        std::map<uint64_t, int> seen;
        int64_t examples = 0;
        int64_t lines = 0;
        for (int share = 0; share < shares; ++share) {
          lines +=
              count_lines({.files = files, .share = share, .shares = shares, .block_bytes = block});
          for (const auto& [id, count] : read_share({.files = files,
                                         .share = share,
                                         .shares = shares,
                                         .batch_size = 33,
                                         .block_bytes = block},
                                                    examples)) {
            seen[id] += count;
          }
        }
        ASSERT_EQ(examples, kLines) << block << " " << shares;
        ASSERT_EQ(lines, kLines);
        ASSERT_EQ(seen.size(), static_cast<size_t>(kLines));
      }
    }
  }
}

TEST(ExampleReaderTest, OneReaderKeepsTheOrderOfLines) {
  const Folder folder;
  const std::string path = folder.file("a.tsv", numbered_lines(100));
  ExampleReader reader({.files = {path, path}, .batch_size = 64, .block_bytes = 333});
  Batch batch;
  uint32_t line = 0;
  while (reader.next(batch)) {
    for (size_t i = 0; i < static_cast<size_t>(batch.size); ++i, ++line) {
      EXPECT_EQ(batch.ids[i * kCategories + 25], category_id(25, line % 100));
      EXPECT_EQ(batch.labels[i], line % 100 % 3 == 0 ? 1 : 0);
    }
  }
  EXPECT_EQ(line, 200u);
}

TEST(ExampleReaderTest, SharesOfASmallFileAreAboutEqual) {
  const Folder folder;
  const std::string path = folder.file("a.tsv", numbered_lines(20000));
  for (int share = 0; share < 4; ++share) {
    int64_t examples = 0;
    read_share({.files = {path}, .share = share, .shares = 4, .batch_size = 512}, examples);
    EXPECT_NEAR(static_cast<double>(examples), 5000, 500);
  }
}

TEST(ExampleReaderTest, AMalformedLineIsNamedOrCounted) {
  const Folder folder;
  std::string text = numbered_lines(5);
  text += with_field(line_of("0"), 7, "oops") + "\r\n" + line_of("1") + "\r\n";
  const std::string path = folder.file("bad.tsv", text);
  const auto read_all = [&](bool skip, int64_t block) {
    ExampleReader reader({.files = {path}, .skip_damaged = skip, .block_bytes = block});
    Batch batch;
    while (reader.next(batch)) {
    }
    return reader.counts();
  };
  EXPECT_EQ(error_of([&] { read_all(false, 0); }),
            path + ":6: field 7: expected a number, or nothing");
  EXPECT_EQ(error_of([&] { read_all(false, 100); }),
            path + ":6: field 7: expected a number, or nothing");
  const ReaderCounts counts = read_all(true, 0);
  EXPECT_EQ(counts.examples, 6);
  EXPECT_EQ(counts.damaged, 1);
}

TEST(ExampleReaderTest, BadFilesAndOptionsAreNamed) {
  const Folder folder;
  const auto refusal = [](ReaderOptions options) {
    return error_of([&] { ExampleReader reader(std::move(options)); });
  };
  EXPECT_EQ(refusal({.files = {"/nowhere.tsv"}}),
            "/nowhere.tsv: expected a file that can be read, got No such file or directory");
  EXPECT_EQ(refusal({.files = {folder.path()}}),
            folder.path() + ": expected a file that can be read, got a folder");
  EXPECT_EQ(refusal({.files = {"/dev/null"}}),
            "/dev/null: expected a file that can be read, got a device or pipe");
  EXPECT_EQ(error_of([&] { labels_of(folder.path()); }),
            folder.path() + ": expected a file that can be read, got a folder");
  EXPECT_EQ(refusal({.share = 2, .shares = 2}),
            "ExampleReader: expected 0 <= share < shares, got 2 of 2");
  const std::string long_line = folder.file("long.tsv", std::string((1 << 20) + (1 << 16), 'x'));
  EXPECT_NE(error_of([&] {
              ExampleReader reader({.files = {long_line}, .block_bytes = 100});
              Batch batch;
              reader.next(batch);
            }).find("expected lines of at most 1048576 bytes"),
            std::string::npos);
}

TEST(ExampleReaderTest, LabelsAreFoundByTheFirstLine) {
  const Folder folder;
  EXPECT_EQ(labels_of(folder.file("a", line_of("1") + "\n")), Labels::kGiven);
  EXPECT_EQ(labels_of(folder.file("b", line_of("").substr(1) + "\n")), Labels::kAbsent);
  EXPECT_NE(error_of([&] { labels_of(folder.path() + "/none"); }).find("/none: expected a file"),
            std::string::npos);
}

TEST(ClickGeneratorTest, EqualSeedsGiveEqualFilesAndAKnownAuc) {
  const Folder folder;
  const auto text = [&](const std::string& name) {
    std::ifstream file(folder.path() + "/" + name, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const Truth truth = generate_clicks({.rows = 20000, .seed = 3}, folder.path() + "/a");
  generate_clicks({.rows = 20000, .seed = 3}, folder.path() + "/b");
  generate_clicks({.rows = 2000, .seed = 4}, folder.path() + "/c");
  EXPECT_EQ(text("a/train.tsv"), text("b/train.tsv"));
  EXPECT_EQ(text("a/test.tsv"), text("b/test.tsv"));
  EXPECT_NE(text("a/train.tsv").substr(0, 1000), text("c/train.tsv").substr(0, 1000));
  EXPECT_EQ(truth.train.count, 20000);
  EXPECT_EQ(truth.test.count, 2000);
  EXPECT_DOUBLE_EQ(attainable_auc(folder.path() + "/a"), truth.test.auc);
  EXPECT_EQ(attainable_auc(folder.path() + "/none"), -1);
  // What the model is meant to be like: a task neither hopeless nor trivial, and honest odds.
  EXPECT_NEAR(truth.train.auc, 0.80, 0.03);
  const double click_rate = static_cast<double>(truth.train.clicks) / 20000;
  EXPECT_NEAR(click_rate, 0.25, 0.12);
  // Five standard deviations of a mean of 20,000 draws.
  EXPECT_NEAR(truth.train.mean_prediction, click_rate, 5 * 0.5 / std::sqrt(20000.0));
}

TEST(ClickGeneratorTest, FilesThatAreThereAreReplacedOnRequestAlone) {
  for (const char* name : {"train.tsv", "test.tsv", "truth.json"}) {
    const Folder folder;
    const std::string path = folder.file(name, "mine");
    EXPECT_EQ(
        error_of([&] { generate_clicks({.rows = 100}, folder.path()); }),
        path +
            ": is there already: name another folder, or let ctr generate --overwrite replace it");
    std::string text;
    std::ifstream(path) >> text;
    EXPECT_EQ(text, "mine");
    generate_clicks({.rows = 100, .overwrite = true}, folder.path());
    EXPECT_GT(std::filesystem::file_size(path), 4u);
  }
}

TEST(ClickGeneratorTest, ASignalLeavesNoPartOfAFile) {
  const Folder folder;
  std::atomic<bool> done = false;
  std::thread sender([&] {
    const auto is_under_way = [&] {
      return std::filesystem::exists(folder.path() + "/data") &&
             !std::filesystem::is_empty(folder.path() + "/data");
    };
    while (!is_under_way() && !done) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (!done) std::raise(SIGINT);
  });
  int signal = 0;
  try {
    generate_clicks({.rows = 100'000'000}, folder.path() + "/data");
  } catch (const Interrupted& interrupted) {
    signal = interrupted.signal;
  }
  done = true;
  sender.join();
  EXPECT_EQ(signal, SIGINT);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path() + "/data"));
}

// At each moment from the first file on: where train.tsv is, the others are of its generation.
TEST(ClickGeneratorTest, AnInterruptedReplacementLeavesNothingOfTheOldGeneration) {
  const Folder folder;
  generate_clicks({.rows = 100, .seed = 1}, folder.path());
  std::atomic<bool> done = false;
  std::atomic<bool> had_train = false;
  std::thread sender([&] {
    const auto writes_train = [&] {
      for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
        if (entry.path().filename().string().starts_with("train.tsv.tmp-")) return true;
      return false;
    };
    while (!writes_train() && !done) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    had_train = std::filesystem::exists(folder.path() + "/train.tsv");
    if (!done) std::raise(SIGINT);
  });
  int signal = 0;
  try {
    generate_clicks({.rows = 100'000'000, .test_rows = 50, .seed = 2, .overwrite = true},
                    folder.path());
  } catch (const Interrupted& interrupted) {
    signal = interrupted.signal;
  }
  done = true;
  sender.join();
  EXPECT_EQ(signal, SIGINT);
  EXPECT_FALSE(had_train) << "the old one, beside the new test.tsv";
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

// What training finds in a file is what the model drew.
TEST(ClickGeneratorTest, FilesSayWhatWasDrawn) {
  const Folder folder;
  generate_clicks({.rows = 300, .test_rows = 100, .seed = 5}, folder.path());
  const ClickModel model(5, GeneratorOptions().zipf);
  ExampleReader reader(
      {.files = {folder.path() + "/train.tsv", folder.path() + "/test.tsv"}, .batch_size = 400});
  Batch batch;
  ASSERT_TRUE(reader.next(batch));
  ASSERT_EQ(batch.size, 400);
  for (int64_t row = 0; row < 400; ++row) {
    const MadeExample made = model.draw(row);
    const auto at = static_cast<size_t>(row);
    EXPECT_EQ(batch.labels[at], made.click ? 1 : 0);
    for (size_t i = 0; i < kNumbers; ++i) {
      EXPECT_FLOAT_EQ(batch.numbers[at * kNumbers + i],
                      std::log1p(static_cast<float>(std::max<int64_t>(0, made.numbers[i]))));
    }
    for (size_t i = 0; i < kCategories; ++i) {
      EXPECT_EQ(batch.ids[at * kCategories + i],
                category_id(static_cast<int>(i), made.categories[i]));
    }
  }
}

// The share of category k of a slot of n is (k^(1-s) - (k+1)^(1-s)) / (1 - (n+1)^(1-s)).
TEST(ClickGeneratorTest, CategoriesFollowZipf) {
  constexpr int kRows = 20000;
  const ClickModel model(7, 1.1);
  std::map<uint32_t, int> counts;
  for (int64_t row = 0; row < kRows; ++row) ++counts[model.draw(row).categories[0]];
  std::vector<int> by_frequency;
  for (const auto& [category, count] : counts) by_frequency.push_back(count);
  std::sort(by_frequency.rbegin(), by_frequency.rend());
  for (const int k : {1, 2, 3, 10}) {
    const double share = (std::pow(k, -0.1) - std::pow(k + 1, -0.1)) / (1 - std::pow(1461, -0.1));
    const double expected = kRows * share;
    EXPECT_NEAR(by_frequency[static_cast<size_t>(k - 1)], expected, 6 * std::sqrt(expected)) << k;
  }
}

TEST(TableLimitsTest, FlagsSetTheTablesOptions) {
  using cohort::ps::AtCap;
  using cohort::ps::EntryPolicy;
  const cohort::ps::TableOptions plain{.name = "categories"};
  EXPECT_EQ(to_text(with_limits(plain, {})), to_text(plain));
  const auto table =
      with_limits(plain, {.memory_mib = 3, .at_cap = "spill", .admit_after = 4, .row_ttl_s = 5});
  EXPECT_EQ(table.memory_cap_bytes, 3 << 20);
  EXPECT_EQ(table.at_cap, AtCap::kSpill);
  EXPECT_EQ(table.entry.kind, EntryPolicy::Kind::kCount);
  EXPECT_EQ(table.entry.pushes, 4u);
  EXPECT_EQ(table.eviction.time_to_live_s, 5);
  const auto drawn = with_limits(plain, {.memory_mib = 3, .admit_probability = 0.5});
  EXPECT_EQ(drawn.at_cap, AtCap::kRefuse);
  EXPECT_EQ(drawn.entry.kind, EntryPolicy::Kind::kProbability);
  EXPECT_EQ(drawn.entry.probability, 0.5);
}

TEST(TableLimitsTest, RefusalsNameTheFlag) {
  const auto refusal = [](const TableLimits& limits) {
    return error_of([&] { with_limits({.name = "categories"}, limits); });
  };
  EXPECT_TRUE(refusal({.memory_mib = -1})
                  .starts_with("--table-memory-mib -1: table \"categories\": memory_cap_bytes: "
                               "expected 0 or at least "))
      << refusal({.memory_mib = -1});
  EXPECT_EQ(refusal({.admit_after = 257}),
            "--admit-after 257: table \"categories\": entry.pushes: expected 1 to 256, found 257");
  EXPECT_EQ(refusal({.admit_probability = 2}),
            "--admit-probability 2: table \"categories\": entry.probability: expected a number "
            "in (0, 1], found 2");
  EXPECT_EQ(refusal({.at_cap = "spill"}),
            "--at-cap spill: expected with --table-memory-mib, the cap that it speaks of");
}

}  // namespace ctr_data_test
}  // namespace ctr
