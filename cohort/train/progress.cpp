// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/progress.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <sys/ioctl.h>

#include "cohort/base/env.h"

namespace cohort::train {
namespace {

int terminal_width(int descriptor) {
  winsize size{};
  // A terminal that does not know its size says 0.
  if (::ioctl(descriptor, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

constexpr int kPlainWidth = 200;  // Of lines in files and pipes.

}  // namespace

bool is_terminal(int descriptor) {
  return ::isatty(descriptor) != 0 && env_string("TERM") != "dumb";
}

ProgressGlyphs glyphs_of_locale() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    if (auto value = env_string(name)) {
      std::transform(value->begin(), value->end(), value->begin(),
                     [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
      const bool utf8 =
          value->find("utf-8") != std::string::npos || value->find("utf8") != std::string::npos;
      return utf8 ? ProgressGlyphs::kBlocks : ProgressGlyphs::kAscii;
    }
  }
  return ProgressGlyphs::kAscii;
}

Progress::Progress(const ProgressOptions& options)
    : options_(options), terminal_(is_terminal(options.descriptor)), glyphs_(glyphs_of_locale()) {}

void Progress::update(const ProgressState& state) {
  const auto now = options_.now();
  const bool new_epoch = !last_ || last_->epoch != state.epoch;
  if (new_epoch) {
    finish();
    first_step_ = state.step;
    first_time_ = now;
    if (!terminal_) shown_time_ = now;  // A first line of plain text would have no figures yet.
  }
  last_ = state;
  last_is_shown_ = false;
  const auto interval = terminal_ ? options_.redraw_interval : options_.line_interval;
  const bool last_step = state.num_steps > 0 && state.step >= state.num_steps;
  if (last_step || (terminal_ && new_epoch) || now - shown_time_ >= interval) show(state, now);
}

void Progress::show(const ProgressState& state, Clock::time_point now) {
  ProgressTimes times;
  const std::chrono::duration<double> elapsed = now - first_time_;
  times.elapsed = std::chrono::round<std::chrono::seconds>(elapsed);
  if (state.step > first_step_) {
    const auto done = static_cast<double>(state.step - first_step_);
    const auto rest = static_cast<double>(state.num_steps - state.step);
    times.left = std::chrono::round<std::chrono::seconds>(elapsed / done * rest);
  }
  std::string text;
  if (terminal_) {
    // The last column stays free: a character there makes some terminals wrap.
    const int width = terminal_width(options_.descriptor) - 1;
    const auto lines = render_progress(state, times, width, glyphs_);
    text = rewind();
    for (size_t i = 0; i < lines.size(); ++i) text += (i == 0 ? "" : "\r\n") + lines[i];
    num_lines_ = static_cast<int>(lines.size());
  } else {
    text = render_progress(state, times, kPlainWidth, ProgressGlyphs::kNone).front() + '\n';
  }
  write(text);
  shown_time_ = now;
  last_is_shown_ = true;
}

std::string Progress::rewind() const {
  if (num_lines_ == 0) return "";
  std::string text = "\r";
  if (num_lines_ > 1) text += "\x1b[" + std::to_string(num_lines_ - 1) + "A";
  return text + "\x1b[J";  // Erase from here to the end of the screen.
}

void Progress::clear() {
  write(rewind());
  num_lines_ = 0;
}

void Progress::finish() {
  if (!last_) return;
  if (!last_is_shown_) show(*last_, options_.now());
  if (terminal_) write("\r\n");
  num_lines_ = 0;
  last_.reset();
}

void Progress::write(const std::string& text) const {
  const char* place = text.data();
  size_t rest = text.size();
  while (rest > 0) {
    const ssize_t written = ::write(options_.descriptor, place, rest);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    place += written;
    rest -= static_cast<size_t>(written);
  }
}

}  // namespace cohort::train
