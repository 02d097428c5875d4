// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/log.h"

#include <cmath>
#include <gtest/gtest.h>
#include <optional>
#include <regex>
#include <sstream>
#include <thread>
#include <vector>

#include "cohort/base/error.h"

#include "tests/base/temporary_folder.h"

namespace cohort {
namespace log_test {

std::vector<std::string> lines_of(const std::string& path) {
  std::istringstream text(read_file(path));
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) {
    lines.push_back(std::regex_replace(
        line, std::regex(R"( time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$)"), " time"));
  }
  return lines;
}

TEST(LogTest, WritesTaggedLinesToItsFile) {
  const TemporaryFolder folder;
  const std::string file = folder / "logs/rank1.log";
  const Log log({.rank = 1, .world_size = 2, .file = file});
  log.debug("hidden");
  log.info("epoch done", {{"epoch", 3}, {"loss", 2.125}, {"note", "two words"}, {"none", ""}});
  log.warn("100% {} braces\nand lines");
  log.error("lost", {{"cause", "a \"b\"\nc"}});
  // No closing: each line is in the file at once.
  EXPECT_EQ(lines_of(file),
            (std::vector<std::string>{
                R"([rank 1/2] info epoch done epoch=3 loss=2.125 note="two words" none="" time)",
                "[rank 1/2] warn 100% {} braces and lines time",
                R"([rank 1/2] error lost cause="a \"b\"\nc" time)"}));
}

TEST(LogTest, ANumberThatIsNotThereIsNone) {
  const TemporaryFolder folder;
  const Log log({.file = folder / "log"});
  log.info("valid", {{"best", std::optional<double>()}, {"loss", std::optional(1.5)}});
  log.info("diverged", {{"loss", -std::nan("")}});
  EXPECT_EQ(lines_of(folder / "log"),
            (std::vector<std::string>{"[rank 0/1] info valid best=none loss=1.5 time",
                                      "[rank 0/1] info diverged loss=nan time"}));
}

TEST(LogTest, OnlyRankZeroSpeaksOnTheTerminalUnlessTold) {
  const auto spoken = [](int rank, LogConsole console) {
    testing::internal::CaptureStderr();
    Log({.rank = rank, .world_size = 2, .console = console}).info("hello", {{"a", "b"}});
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(spoken(0, LogConsole::kRankZero), "[rank 0/2] info hello a=b\n");
  EXPECT_EQ(spoken(1, LogConsole::kRankZero), "");
  EXPECT_EQ(spoken(1, LogConsole::kAlways), "[rank 1/2] info hello a=b\n");
  EXPECT_EQ(spoken(0, LogConsole::kNever), "");
}

TEST(LogTest, LinesOfManyThreadsDoNotMix) {
  const TemporaryFolder folder;
  const std::string file = folder / "log";
  const Log log({.file = file, .console = LogConsole::kNever});
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&log] {
        for (int j = 0; j < 200; ++j) log.info("message", {{"number", 12345}});
      });
    }
  }
  const auto lines = lines_of(file);
  EXPECT_EQ(lines.size(), 800U);
  for (const auto& line : lines) EXPECT_EQ(line, "[rank 0/1] info message number=12345 time");
}

TEST(LogTest, NamesAFileThatCannotBeWritten) {
  const TemporaryFolder folder;
  EXPECT_THROW(Log({.file = folder / "."}), ConfigError);
}

}  // namespace log_test
}  // namespace cohort
