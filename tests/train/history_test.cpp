// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/history.h"

#include <cmath>
#include <csignal>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "cohort/base/error.h"

#include "tests/base/temporary_folder.h"

namespace cohort::train {
namespace history_test {

TEST(HistoryTest, WritesOneJsonObjectALineAtOnce) {
  const TemporaryFolder folder;
  const std::string path = folder / "history.jsonl";
  History history(path);
  history.append({{"step", 12},
                  {"loss", 3.25},
                  {"bleu", std::nan("")},
                  {"norm", INFINITY},
                  {"best", true},
                  {"name", "a \"b\"\n"}});
  history.append({{"tokens", int64_t{1} << 40}, {"lr", 0.1}});
  EXPECT_EQ(read_file(path),
            "{\"step\":12,\"loss\":3.25,\"bleu\":null,\"norm\":null,\"best\":true,"
            "\"name\":\"a \\\"b\\\"\\n\"}\n"
            "{\"tokens\":1099511627776,\"lr\":0.1}\n");
}

TEST(HistoryTest, AResumedRunContinuesAfterTheLastWholeLine) {
  const TemporaryFolder folder;
  const std::string path = folder / "history.jsonl";
  for (const auto& [before, kept] : {std::pair{"{\"a\":1}\n{\"a\":", "{\"a\":1}\n"},
                                     {"{\"a\":1}\n", "{\"a\":1}\n"},
                                     {"{", ""}}) {
    write_file(path, before);
    History(path).append({{"b", 2}});
    EXPECT_EQ(read_file(path), std::string(kept) + "{\"b\":2}\n");
  }
}

TEST(HistoryTest, LinesBeyondTheCheckpointAreCut) {
  const TemporaryFolder folder;
  const std::string path = folder / "history.jsonl";
  const std::string early = "{\"update\":5}\n{\"note\":\"no update\"}\n{\"update\":7}\n";
  write_file(path, early + "{\"update\":8}\n{\"update\":9}\n");
  History(path, 7).append({{"update", 8}});
  EXPECT_EQ(read_file(path), early + "{\"update\":8}\n");
}

TEST(HistoryTest, SoAreThoseOfAKindThatTheCheckpointDoesNotKnow) {
  const TemporaryFolder folder;
  const std::string path = folder / "history.jsonl";
  const std::string early =
      "{\"type\":\"valid\",\"update\":5}\n{\"update\":7}\n{\"type\":\"train\",\"update\":7}\n";
  write_file(path, early + "{\"type\":\"valid\",\"update\":7}\n{\"type\":\"end\",\"update\":7}\n");
  History(path, 7, "valid").append({{"update", 8}});
  EXPECT_EQ(read_file(path), early + "{\"update\":8}\n");
}

TEST(HistoryTest, HoldsSeveralNumbersOrTextsInOneField) {
  const TemporaryFolder folder;
  History history(folder / "h");
  history.append({{"speeds", std::vector<double>{1.5, std::nan("")}},
                  {"hosts", std::vector<std::string>{"a", "b"}}});
  EXPECT_EQ(read_file(folder / "h"), "{\"speeds\":[1.5,null],\"hosts\":[\"a\",\"b\"]}\n");
}

// A limit on the size of files stands for a full disk: both take the first half of a line.
TEST(HistoryTest, AFullDiskCostsTheLineAndNotTheFile) {
  const TemporaryFolder folder;
  const std::string path = folder / "h";
  History history(path);
  history.append({{"update", 1}});
  rlimit unlimited{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &unlimited), 0);
  std::signal(SIGXFSZ, SIG_IGN);
  const rlimit full{.rlim_cur = 20, .rlim_max = unlimited.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &full), 0);
  std::string message;
  try {
    history.append({{"update", 2}});
  } catch (const c10::Error& error) {
    message = one_line(error);
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &unlimited), 0);
  EXPECT_EQ(message, path + ": cannot write: File too large");
  EXPECT_EQ(read_file(path), "{\"update\":1}\n");
  history.append({{"update", 3}});
  EXPECT_EQ(read_file(path), "{\"update\":1}\n{\"update\":3}\n");
}

TEST(HistoryTest, NamesAFileThatCannotBeOpened) {
  const TemporaryFolder folder;
  try {
    History history(folder / "absent/h");
    FAIL() << "no exception";
  } catch (const ConfigError& error) {
    EXPECT_NE(one_line(error).find(folder / "absent/h"), std::string::npos) << one_line(error);
  }
}

}  // namespace history_test
}  // namespace cohort::train
