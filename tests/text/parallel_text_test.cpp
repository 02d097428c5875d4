// SPDX-License-Identifier: Apache-2.0
#include "cohort/text/parallel_text.h"

#include <fstream>
#include <gtest/gtest.h>
#include <sstream>
#include <sys/stat.h>
#include <thread>

#include "tests/support/message_of.h"
#include "tests/text/text_test_files.h"

namespace cohort::text {
namespace parallel_text_test {

using Lines = std::vector<std::string>;

class ParallelTextTest : public testing::Test {
 protected:
  // Writes files of these names and contents and reads them.
  ParallelText read(const std::vector<std::pair<std::string, std::string>>& files) const {
    std::vector<std::filesystem::path> paths;
    for (const auto& [name, content] : files) paths.push_back(folder_.write(name, content));
    return read_parallel_text(paths);
  }

  // Returns the error of reading them, with "@" for the folder's path.
  std::string error(const std::vector<std::pair<std::string, std::string>>& files) const {
    return shortened(test::message_of<ConfigError>([&] { read(files); }));
  }

  std::string shortened(std::string text) const {
    const std::string folder = folder_.path().string();
    for (size_t at = 0; (at = text.find(folder)) != std::string::npos;) {
      text.replace(at, folder.size(), "@");
    }
    return text;
  }

  TestFolder folder_;
};

TEST_F(ParallelTextTest, TwoFilesGivePairsInOrder) {
  const ParallelText text = read({{"a.en", "one\ntwo\n"}, {"a.zh", "\u4E00\n\u4E8C"}});
  EXPECT_EQ(text.source, (Lines{"one", "two"}));
  EXPECT_EQ(text.target, (Lines{"\u4E00", "\u4E8C"}));
  EXPECT_EQ(text.num_dropped_empty, 0);
}

TEST_F(ParallelTextTest, LineEndsAndByteOrderMarkAreTolerated) {
  const ParallelText text = read({{"a.en", "\xEF\xBB\xBFone\r\ntwo\r\n"}, {"a.zh", " x\ny\rz"}});
  EXPECT_EQ(text.source, (Lines{"one", "two"}));
  EXPECT_EQ(text.target, (Lines{" x", "y\rz"}));
}

TEST_F(ParallelTextTest, PairsWithAnEmptySideAreDroppedAndCounted) {
  const ParallelText text =
      read({{"a.en", "one\n\n \xE3\x80\x80\nfour\n"}, {"a.zh", "1\n2\n3\n4\n"}});
  EXPECT_EQ(text.source, (Lines{"one", "four"}));
  EXPECT_EQ(text.target, (Lines{"1", "4"}));
  EXPECT_EQ(text.num_dropped_empty, 2);
}

TEST_F(ParallelTextTest, TsvAndJsonGiveTheSamePairs) {
  const ParallelText tsv = read({{"a.tsv", "one\t\u4E00\n\t2\nthree\t\u4E09\r\n"}});
  const ParallelText json = read(
      {{"a.json", "\xEF\xBB\xBF[[\"one\", \"\\u4e00\"], [\"\", \"2\"], [\"three\", \"\u4E09\"]]"}});
  EXPECT_EQ(tsv.source, (Lines{"one", "three"}));
  EXPECT_EQ(tsv.target, (Lines{"\u4E00", "\u4E09"}));
  EXPECT_EQ(json.source, tsv.source);
  EXPECT_EQ(json.target, tsv.target);
  EXPECT_EQ(tsv.num_dropped_empty, 1);
  EXPECT_EQ(json.num_dropped_empty, 1);
}

TEST_F(ParallelTextTest, UnreadableFilesAreNamed) {
  const std::vector<std::filesystem::path> missing = {folder_.path() / "none.tsv"};
  EXPECT_EQ(shortened(test::message_of<ConfigError>([&] { read_parallel_text(missing); })),
            "@/none.tsv: cannot be read: No such file or directory");
  EXPECT_EQ(shortened(test::message_of<ConfigError>([&] { read_lines(folder_.path()); })),
            "@: cannot be read: Is a directory");
  // A file that opens, and whose first byte cannot be read.
  const auto link = folder_.path() / "m.json";
  std::filesystem::create_symlink("/proc/self/mem", link);
  EXPECT_EQ(
      shortened(test::message_of<ConfigError>([&] { read_parallel_text(std::vector{link}); })),
      "@/m.json: cannot be read");
  EXPECT_EQ(test::message_of<ConfigError>([] { read_file("/proc/self/mem"); }),
            "/proc/self/mem: cannot be read: Input/output error");
}

TEST_F(ParallelTextTest, UnequalLengthsNameBothCountsAndFiles) {
  EXPECT_EQ(error({{"a.en", "1\n2\n3\n"}, {"a.zh", "1\n2\n"}}),
            "@/a.en has 3 lines but @/a.zh has 2: expected as many");
}

TEST_F(ParallelTextTest, InvalidUtf8NamesFileAndLine) {
  EXPECT_EQ(error({{"a.en", "1\n2\n"}, {"a.zh", "1\n\xC3(\n"}}),
            "@/a.zh: line 2 is not valid UTF-8");
  EXPECT_EQ(error({{"a.tsv", "a\tb\na\tb\n\xFF\tb\n"}}), "@/a.tsv: line 3 is not valid UTF-8");
  for (const char* bad :
       {"\xFF", "a\xC3(", "\xC0\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xE4\xB8"}) {
    EXPECT_EQ(error({{"a.json", "[[\"a\", \"b\"],\n[\"" + std::string(bad) + "\", \"b\"]]"}}),
              "@/a.json: item 1 is not valid UTF-8");
  }
}

TEST_F(ParallelTextTest, TsvLinesHaveOneTab) {
  EXPECT_EQ(error({{"a.tsv", "a\tb\nc d\n"}}),
            "@/a.tsv: line 2: expected source<TAB>target, found 0 tabs");
  EXPECT_EQ(error({{"a.tsv", "a\tb\tc\n"}}),
            "@/a.tsv: line 1: expected source<TAB>target, found 2 tabs");
}

TEST_F(ParallelTextTest, JsonOfAnotherFormIsNamed) {
  EXPECT_EQ(error({{"a.json", "[[\"a\", \"b\"],\n[\"a\" \"b\"]]"}}),
            "@/a.json: line 2: expected JSON [[\"source\", \"target\"], ...], found a syntax "
            "error");
  EXPECT_EQ(error({{"a.json", ""}}),
            "@/a.json: line 1: expected JSON [[\"source\", \"target\"], ...], found a syntax "
            "error");
  EXPECT_EQ(error({{"a.json", "{\"a\": 1}"}}),
            "@/a.json: expected JSON [[\"source\", \"target\"], ...], found object");
  EXPECT_EQ(error({{"a.json", "[[\"a\", \"b\"], [\"a\"]]"}}),
            "@/a.json: item 1: expected [\"source\", \"target\"]");
  EXPECT_EQ(error({{"a.json", "[[\"a\", 1]]"}}),
            "@/a.json: item 0: expected [\"source\", \"target\"]");
  EXPECT_EQ(error({{"a.json", "[[\"a\", 1e999]]"}}),
            "@/a.json: item 0: expected [\"source\", \"target\"]");
  EXPECT_EQ(error({{"a.json", "[[\"a\", \"b\"], [\"a\\nb\", \"c\"]]"}}),
            "@/a.json: item 1: expected sentences of one line each");
}

TEST_F(ParallelTextTest, JsonOnOneLongLineIsRead) {
  // Python's json.dump writes it so.
  const size_t many = LineReader::kMaxLineBytes / 40;
  std::string json = "[";
  for (size_t i = 0; i < many; ++i)
    json += std::string(i > 0 ? ", " : "") + "[\"a sentence of some length\", \"another\"]";
  ASSERT_GT(json.size(), LineReader::kMaxLineBytes);
  const ParallelText text = read({{"a.json", json + "]"}});
  EXPECT_EQ(text.source.size(), many);
  EXPECT_EQ(text.target.back(), "another");
  EXPECT_EQ(
      error({{"a.json", "[[\"a\", \"b\"], [\"" + std::string(LineReader::kMaxLineBytes + 1, 'x') +
                            "\", \"b\"]]"}}),
      "@/a.json: item 1: expected sentences of at most 16 MiB");
}

TEST_F(ParallelTextTest, AFileIsReadOnce) {
  // A pipe gives its text once; what is wrong with it is said all the same.
  const auto read_pipe = [&](const std::string& text) {
    const auto path = folder_.path() / "pipe.json";
    std::filesystem::remove(path);
    EXPECT_EQ(::mkfifo(path.c_str(), 0600), 0);
    const std::jthread writer([&] { std::ofstream(path) << text; });
    return read_parallel_text(std::vector{path});
  };
  EXPECT_EQ(read_pipe("[[\"one\", \"1\"],\n[\"two\", \"2\"]]").source, (Lines{"one", "two"}));
  EXPECT_EQ(shortened(test::message_of<ConfigError>([&] { read_pipe("[[\"one\",\n\n1 2]]"); })),
            "@/pipe.json: item 0: expected [\"source\", \"target\"]");
  EXPECT_EQ(shortened(test::message_of<ConfigError>([&] { read_pipe("[[\"one\",\n\n}"); })),
            "@/pipe.json: line 3: expected JSON [[\"source\", \"target\"], ...], found a syntax "
            "error");
}

TEST_F(ParallelTextTest, WhatIsNoRegularFileIsRefusedUnread) {
  const auto refused = [&](const std::filesystem::path& path) {
    const std::vector<std::filesystem::path> paths = {folder_.write("a.en", "x\n"), path};
    return shortened(test::message_of<ConfigError>([&] { check_regular_files(paths); }));
  };
  const auto pipe = folder_.path() / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(refused(pipe), "@/pipe: expected a regular file, for it is read more than once");
  EXPECT_EQ(refused("/dev/null"),
            "/dev/null: expected a regular file, for it is read more than once");
  EXPECT_EQ(refused(folder_.path() / "none"), "@/none: cannot be read: No such file or directory");
  EXPECT_EQ(refused(folder_.path()), "@: cannot be read: Is a directory");
  EXPECT_EQ(refused(folder_.write("b", "x\n")), "nothing was thrown");
}

TEST_F(ParallelTextTest, OtherNumbersAndKindsOfFilesAreErrors) {
  EXPECT_EQ(test::message_of<ConfigError>([] { read_parallel_text({}); }),
            "parallel text: expected one or two files, got 0");
  EXPECT_EQ(error({{"a", "x"}, {"b", "x"}, {"c", "x"}}),
            "parallel text: expected one or two files, got 3");
  EXPECT_EQ(error({{"a.txt", "x"}}),
            "@/a.txt: expected a .tsv or .json file, or two files (source, target)");
  EXPECT_EQ(error({{"a.en", "x"}, {"a.zh.gz", "x"}}),
            "@/a.zh.gz: expected unpacked text (gunzip --keep)");
}

TEST_F(ParallelTextTest, NoPairIsAnError) {
  EXPECT_EQ(error({{"a.tsv", "\tb\n"}}), "@/a.tsv: no sentence pair in it, 1 dropped as empty");
  EXPECT_EQ(error({{"a.en", ""}, {"a.zh", ""}}),
            "@/a.en: no sentence pair in it, 0 dropped as empty");
}

TEST_F(ParallelTextTest, PairsBeforeABadLineAreTakenInOrder) {
  const std::vector<std::filesystem::path> paths = {folder_.write("a.tsv", "1\ta\n\tb\n3\tc\nd\n")};
  Lines sources;
  EXPECT_EQ(shortened(test::message_of<ConfigError>([&] {
              for_each_pair(paths,
                            [&](std::string& source, std::string&) { sources.push_back(source); });
            })),
            "@/a.tsv: line 4: expected source<TAB>target, found 0 tabs");
  EXPECT_EQ(sources, (Lines{"1", "3"}));
}

TEST_F(ParallelTextTest, ASampleIsEvenAndTheSameEveryTime) {
  std::string pairs;
  for (int i = 0; i < 3000; ++i) pairs += std::to_string(i) + "\t" + std::to_string(-i) + "\n";
  const std::vector<std::filesystem::path> paths = {folder_.write("a.tsv", pairs)};
  EXPECT_EQ(sample_parallel_text(paths, 3000).source, read_parallel_text(paths).source);
  const ParallelText sample = sample_parallel_text(paths, 600);
  ASSERT_EQ(sample.source.size(), 600);
  EXPECT_EQ(sample.source, sample_parallel_text(paths, 600).source);
  int late = 0;
  for (size_t i = 0; i < 600; ++i) {
    const int number = std::stoi(sample.source[i]);
    EXPECT_EQ(std::stoi(sample.target[i]), -number) << "pairs stay together";
    late += number >= 1500;
  }
  EXPECT_NEAR(late, 300, 45);  // 4 standard deviations of a fair draw
}

TEST_F(ParallelTextTest, StreamsReadAsFilesDo) {
  std::istringstream stream("a\r\n\nb");
  EXPECT_EQ(read_lines(stream, "standard input"), (Lines{"a", "", "b"}));
}

TEST_F(ParallelTextTest, LinesAreWholeWhateverTheirLengthUpTo16MiB) {
  Lines lines;
  std::string content;
  for (const size_t length : {16382, 16383, 16384, 32766, 32767, 100000}) {  // about the buffer's
    lines.push_back(std::string(length, 'x'));
    content += lines.back() + "\n";
    EXPECT_EQ(split_lines(lines.back(), "no line end"), Lines{lines.back()});
  }
  EXPECT_EQ(split_lines(content, "lines"), lines);
  EXPECT_EQ(split_lines("a\n" + std::string(LineReader::kMaxLineBytes, 'x'), "lines").size(), 2U);
  EXPECT_EQ(test::message_of<ConfigError>([] {
              split_lines("a\n" + std::string(LineReader::kMaxLineBytes + 1, 'x') + "\n", "lines");
            }),
            "lines: line 2 has more than 16 MiB: expected sentences");
}

}  // namespace parallel_text_test
}  // namespace cohort::text
