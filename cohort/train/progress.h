// SPDX-License-Identifier: Apache-2.0
// Progress of training for the eye: bars redrawn in place on a terminal, plain lines elsewhere.
//
//   epoch 3 [===>       ] 120/400  loss 3.412  lr 2.1e-04  8,115 tok/s  01:12 left
//   2 ranks: rank 0 [============] 4,060 loss 3.402 | rank 1 [===========>] 4,055 loss 3.421 tok/s
//   validation [===>       ] 12/40  00:31 left
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unistd.h>
#include <vector>

namespace cohort::train {

/// How far training is. The step counts from 1 within the epoch.
struct ProgressState {
  std::string phase{};  ///< Empty: training, by its epoch. Else shown in the epoch's place.
  int64_t epoch = 0;
  int64_t step = 0;
  int64_t num_steps = 0;  ///< Steps of the epoch; 0: not known, and no bar is drawn.
  double loss = 0.0;      ///< Shown while training, as is the learning rate.
  double learning_rate = 0.0;
  std::vector<double> rank_tokens_per_s{};  ///< One figure a rank.
  std::vector<double> rank_losses{};        ///< One a rank, or none.
  /// All ranks' together; unset: the sum of the above, which is too much if that leaves out
  /// waiting.
  std::optional<double> tokens_per_s{};
};

/// Times within the epoch.
struct ProgressTimes {
  std::chrono::seconds elapsed{0};             ///< Shown when the epoch is done ...
  std::optional<std::chrono::seconds> left{};  ///< ... and this before; nothing: not known yet.
};

/// What the bars are drawn with.
enum class ProgressGlyphs {
  kNone,  ///< No bars, all figures on one line: for files and pipes.
  kAscii,
  kBlocks,  ///< UTF-8 block characters.
};

/// Returns the lines of the display: one, and with bars another about the ranks if there are
/// several.
///
/// Each has at most `width` columns: the bars shrink, then the least important figures go. With
/// more ranks than fit, only the slowest and the fastest are shown.
std::vector<std::string> render_progress(const ProgressState& state, const ProgressTimes& times,
                                         int width, ProgressGlyphs glyphs);

/// Whether figures can be redrawn in place there: a terminal whose TERM is not "dumb".
bool is_terminal(int descriptor);

/// Returns kBlocks if LC_ALL, LC_CTYPE or LANG (the first that is set) names UTF-8, else kAscii.
ProgressGlyphs glyphs_of_locale();

struct ProgressOptions {
  int descriptor = STDERR_FILENO;  ///< Not owned. A terminal is recognised by itself.
  std::chrono::milliseconds redraw_interval{100};   ///< On a terminal.
  std::chrono::milliseconds line_interval{10'000};  ///< Elsewhere.
  /// The clock; tests bring their own.
  std::function<std::chrono::steady_clock::time_point()> now = std::chrono::steady_clock::now;
};

/// Shows progress; for rank 0 only.
///
/// The terminal's width is asked for at each redraw, block characters are used if LC_ALL, LC_CTYPE
/// or LANG (the first that is set) names UTF-8, and TERM=dumb counts as no terminal.
/// A display that cannot be written is no reason to stop training: such errors are ignored.
/// Threads: one caller at a time.
class Progress {
 public:
  explicit Progress(const ProgressOptions& options = {});
  ~Progress() { finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Shows `state`, if enough time has passed since the last time or the epoch's last step is
  /// done. Cheap otherwise. Another epoch starts a new bar, and the clock for the time left; another
  /// phase does not: call finish() before it, or use a Progress of its own.
  void update(const ProgressState& state);

  /// Removes the bars, so that something else can be printed. The next update draws them again.
  void clear();

  /// Leaves the last state in view and moves on to the next line. Nothing if there is no bar.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;

  void show(const ProgressState& state, Clock::time_point now);
  std::string rewind() const;
  void write(const std::string& text) const;

  ProgressOptions options_;
  bool terminal_;
  ProgressGlyphs glyphs_;
  std::optional<ProgressState> last_;  // Of the running epoch.
  bool last_is_shown_ = false;
  int64_t first_step_ = 0;          // Where the epoch's clock was started ...
  Clock::time_point first_time_{};  // ... and when.
  Clock::time_point shown_time_{};
  int num_lines_ = 0;  // Of bars now on the terminal; the cursor is at the end of the last.
};

}  // namespace cohort::train
