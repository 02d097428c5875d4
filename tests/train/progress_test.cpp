// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/progress.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>

namespace cohort::train {
namespace progress_test {

using std::chrono::milliseconds;
using std::chrono::seconds;

const ProgressTimes kTimes{.elapsed = seconds(31), .left = seconds(72)};

ProgressState state(std::vector<double> rates, int64_t step = 120) {
  return {.epoch = 3,
          .step = step,
          .num_steps = 400,
          .loss = 3.412,
          .learning_rate = 2.1e-4,
          .rank_tokens_per_s = std::move(rates)};
}

size_t columns(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

TEST(RenderProgressTest, ShowsEveryFigureAt80Columns) {
  EXPECT_EQ(render_progress(state({8115.2}), kTimes, 80, ProgressGlyphs::kAscii),
            (std::vector<std::string>{"epoch 3 [===>         ] 120/400  loss 3.412  lr 2.1e-04  "
                                      "8,115 tok/s  01:12 left"}));
}

// As narrow as it gets before a figure goes.
TEST(RenderProgressTest, TheShortestBarHasEightCells) {
  EXPECT_EQ(render_progress(state({8115.2}), kTimes, 75, ProgressGlyphs::kAscii),
            (std::vector<std::string>{"epoch 3 [==>     ] 120/400  loss 3.412  lr 2.1e-04  "
                                      "8,115 tok/s  01:12 left"}));
  const std::string narrower =
      render_progress(state({8115.2}), kTimes, 74, ProgressGlyphs::kAscii).at(0);
  EXPECT_NE(narrower.find("=>"), std::string::npos) << narrower;
  EXPECT_EQ(narrower.find("lr "), std::string::npos) << narrower;
}

TEST(RenderProgressTest, GivesEachRankItsBar) {
  EXPECT_EQ(render_progress(state({4060, 3045}), kTimes, 100, ProgressGlyphs::kAscii)[1],
            "2 ranks: rank 0 [============] 4,060 | rank 1 [=========>  ] 3,045 tok/s");
  EXPECT_EQ(render_progress(state({4060, 3045}), kTimes, 60, ProgressGlyphs::kAscii)[1],
            "2 ranks: 0 [========] 4,060 | 1 [======> ] 3,045 tok/s");
  EXPECT_EQ(render_progress(state(std::vector<double>(64, 1000.0)), kTimes, 80,
                            ProgressGlyphs::kAscii)[1],
            "64 ranks: slowest rank 0 1,000 | fastest rank 0 1,000 tok/s");
}

TEST(RenderProgressTest, ShowsEachRanksLossWhereItFits) {
  auto two = state({4060, 3045});
  two.rank_losses = {3.402, 3.4219};
  EXPECT_EQ(render_progress(two, kTimes, 100, ProgressGlyphs::kAscii)[1],
            "2 ranks: rank 0 [============] 4,060 loss 3.402 | rank 1 [=========>  ] 3,045 loss "
            "3.422 tok/s");
  EXPECT_EQ(render_progress(two, kTimes, 70, ProgressGlyphs::kAscii)[1],
            "2 ranks: 0 [====] 4,060 loss 3.402 | 1 [===>] 3,045 loss 3.422 tok/s");
  EXPECT_EQ(render_progress(two, kTimes, 53, ProgressGlyphs::kAscii)[1],
            "2 ranks: 0 [====] 4,060 | 1 [===>] 3,045 tok/s");
}

TEST(RenderProgressTest, APhaseHasABarAndATimeAndNoLoss) {
  const ProgressState validation{.phase = "validation", .step = 12, .num_steps = 40};
  EXPECT_EQ(render_progress(validation, kTimes, 60, ProgressGlyphs::kNone)[0],
            "validation 12/40  01:12 left");
  EXPECT_EQ(render_progress(validation, kTimes, 44, ProgressGlyphs::kAscii)[0],
            "validation [===>         ] 12/40  01:12 left");
}

TEST(RenderProgressTest, TheTotalMayBeLessThanTheRanksSpeedsWithoutWaiting) {
  auto waited = state({4060, 3045});
  waited.tokens_per_s = 6090;
  const auto lines = render_progress(waited, kTimes, 100, ProgressGlyphs::kAscii);
  EXPECT_NE(lines[0].find(" 6,090 tok/s"), std::string::npos) << lines[0];
  EXPECT_NE(lines[1].find("3,045 tok/s"), std::string::npos) << lines[1];
}

TEST(RenderProgressTest, NeverExceedsTheWidth) {
  for (auto glyphs : {ProgressGlyphs::kNone, ProgressGlyphs::kAscii, ProgressGlyphs::kBlocks}) {
    for (size_t ranks : {0, 1, 2, 3, 8, 100}) {
      for (int width = 1; width <= 200; width += width < 100 ? 1 : 20) {
        for (int64_t step : {0, 1, 399, 400, 401}) {
          const auto lines = render_progress(state(std::vector<double>(ranks, 12345.6), step),
                                             kTimes, width, glyphs);
          if (glyphs == ProgressGlyphs::kNone) continue;  // One line for both parts.
          for (const auto& line : lines) ASSERT_LE(columns(line), width) << line;
        }
      }
    }
  }
}

TEST(RenderProgressTest, BlocksShowEighthsOfACell) {
  auto half = state({}, 1);
  half.num_steps = 16;
  half.epoch = 1;
  EXPECT_EQ(render_progress(half, kTimes, 24, ProgressGlyphs::kBlocks)[0],
            "epoch 1 \xE2\x96\x95\xE2\x96\x8C       \xE2\x96\x8F  1/16");
}

TEST(RenderProgressTest, SurvivesOddFigures) {
  auto odd = state({std::nan(""), INFINITY, -1.0, 1e300});
  odd.loss = std::nan("");
  odd.num_steps = -5;
  for (auto glyphs : {ProgressGlyphs::kNone, ProgressGlyphs::kAscii, ProgressGlyphs::kBlocks}) {
    EXPECT_FALSE(render_progress(odd, {}, 80, glyphs).empty());
  }
}

TEST(RenderProgressTest, AtTheEndItSaysHowLongItTook) {
  const auto line = render_progress(state({}, 400), kTimes, 60, ProgressGlyphs::kNone)[0];
  EXPECT_EQ(line, "epoch 3 400/400  loss 3.412  lr 2.1e-04  in 00:31");
}

// A Progress with a clock that the test sets.
class ProgressTest : public testing::Test {
 protected:
  ~ProgressTest() override {
    for (int descriptor : {reader_, writer_}) ::close(descriptor);
  }

  void open_pipe() {
    std::array<int, 2> ends{};
    ASSERT_EQ(::pipe2(ends.data(), O_NONBLOCK), 0);
    reader_ = ends[0];
    writer_ = ends[1];
  }
  void open_terminal(unsigned short width) {
    ::setenv("TERM", "xterm", 1);
    ::setenv("LC_ALL", "C", 1);
    winsize size{.ws_row = 24, .ws_col = width, .ws_xpixel = 0, .ws_ypixel = 0};
    ASSERT_EQ(::openpty(&reader_, &writer_, nullptr, nullptr, &size), 0);
    ASSERT_EQ(::fcntl(reader_, F_SETFL, O_NONBLOCK), 0);
  }

  ProgressOptions options() {
    return {.descriptor = writer_,
            .now = [this] { return std::chrono::steady_clock::time_point(clock_); }};
  }

  // Returns what was written since the last call.
  std::string written() const {
    std::string text;
    std::array<char, 4096> chunk{};
    for (ssize_t count = 0; (count = ::read(reader_, chunk.data(), chunk.size())) > 0;) {
      text.append(chunk.data(), static_cast<size_t>(count));
    }
    return text;
  }

  int reader_ = -1;
  int writer_ = -1;
  milliseconds clock_{1'000'000};
};

TEST_F(ProgressTest, WithoutATerminalItWritesPlainLinesNowAndThenAndAtTheEnd) {
  open_pipe();
  Progress progress(options());
  for (int64_t step = 1; step <= 400; ++step) {
    progress.update(state({4060, 4055}, step));
    clock_ += milliseconds(55);
  }
  progress.finish();
  // 400 steps of 55 ms: lines after 10 and 20 s, and the last.
  EXPECT_EQ(written(),
            "epoch 3 183/400  loss 3.412  lr 2.1e-04  8,115 tok/s  00:12 left  "
            "2 ranks: rank 0 4,060 | rank 1 4,055 tok/s\n"
            "epoch 3 365/400  loss 3.412  lr 2.1e-04  8,115 tok/s  00:02 left  "
            "2 ranks: rank 0 4,060 | rank 1 4,055 tok/s\n"
            "epoch 3 400/400  loss 3.412  lr 2.1e-04  8,115 tok/s  in 00:22  "
            "2 ranks: rank 0 4,060 | rank 1 4,055 tok/s\n");
}

TEST_F(ProgressTest, AnUnfinishedEpochShowsItsLastStateOnFinish) {
  open_pipe();
  {
    Progress progress(options());
    progress.update(state({}, 1));
    progress.update(state({}, 2));
    EXPECT_EQ(written(), "");
  }
  EXPECT_EQ(written(), "epoch 3 2/400  loss 3.412  lr 2.1e-04  00:00 left\n");
}

TEST_F(ProgressTest, OnATerminalItRedrawsInPlaceAtMostTenTimesASecond) {
  open_terminal(80);
  Progress progress(options());
  progress.update(state({4060, 4055}, 1));
  const std::string first = written();
  EXPECT_EQ(first.find("\x1b"), std::string::npos);
  EXPECT_NE(first.find("epoch 3 [>"), std::string::npos) << first;
  EXPECT_NE(first.find("--:-- left"), std::string::npos) << first;
  clock_ += milliseconds(99);
  progress.update(state({4060, 4055}, 2));
  EXPECT_EQ(written(), "");
  clock_ += milliseconds(1);
  progress.update(state({4060, 4055}, 3));
  // Up to the first of two lines, erase, draw again.
  const std::string second = written();
  EXPECT_EQ(second.substr(0, 8), "\r\x1b[1A\x1b[J") << second;
  EXPECT_NE(second.find("  3/400"), std::string::npos) << second;
  progress.clear();
  EXPECT_EQ(written(), "\r\x1b[1A\x1b[J");
  progress.finish();
  EXPECT_EQ(written().substr(0, 1), "\r");
}

TEST_F(ProgressTest, FollowsTheWidthOfTheTerminal) {
  open_terminal(80);
  Progress progress(options());
  progress.update(state({8115}, 1));
  EXPECT_EQ(columns(written()), 79U);  // The last column stays free.
  const winsize size{.ws_row = 24, .ws_col = 60, .ws_xpixel = 0, .ws_ypixel = 0};
  ASSERT_EQ(::ioctl(writer_, TIOCSWINSZ, &size), 0);
  clock_ += milliseconds(100);
  progress.update(state({8115}, 2));
  const std::string text = written();
  EXPECT_LE(columns(text), 59 + std::string("\r\x1b[J").size());
  EXPECT_EQ(text.find("lr "), std::string::npos) << text;
}

}  // namespace progress_test
}  // namespace cohort::train
