// SPDX-License-Identifier: Apache-2.0
// The drawing half of progress.h: pure functions from figures to text.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <utility>

#include "cohort/train/progress.h"

namespace cohort::train {
namespace {

constexpr int kMinBar = 8;
constexpr int kMaxBar = 40;

template <class... Values>
std::string print(const char* format, Values... values) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, values...);
  return text.data();
}

// 8115.3 -> "8,115"
std::string grouped(double value) {
  if (!std::isfinite(value) || std::fabs(value) >= 1e15) return print("%g", value);
  std::string digits = print("%.0f", std::max(0.0, value));
  for (auto place = static_cast<ptrdiff_t>(digits.size()) - 3; place > 0; place -= 3) {
    digits.insert(static_cast<size_t>(place), ",");
  }
  return digits;
}

std::string clock_text(std::chrono::seconds time) {
  const auto seconds = std::max<int64_t>(0, time.count());
  const int hours = static_cast<int>(std::min<int64_t>(seconds / 3600, 99'999));
  const int minutes = static_cast<int>(seconds / 60 % 60);
  const int rest = static_cast<int>(seconds % 60);
  if (hours > 0) return print("%d:%02d:%02d", hours, minutes, rest);
  return print("%02d:%02d", minutes, rest);
}

// Columns on the screen: bytes that do not continue a UTF-8 character.
int columns(const std::string& text) {
  return static_cast<int>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

// A bar of `cells` columns between brackets, `share` of it filled.
std::string bar(double share, int cells, ProgressGlyphs glyphs) {
  share = std::isfinite(share) ? std::clamp(share, 0.0, 1.0) : 0.0;
  std::string text;
  if (glyphs == ProgressGlyphs::kAscii) {
    const int full = static_cast<int>(share * cells);
    text.append(static_cast<size_t>(full), '=');
    if (full < cells) text += '>';
    text.resize(static_cast<size_t>(cells), ' ');
    return "[" + text + "]";
  }
  // Eighths of a cell: U+2588 is a full one, U+258F one eighth.
  const int eighths = static_cast<int>(share * cells * 8);
  for (int i = 0; i < eighths / 8; ++i) text += "\xE2\x96\x88";
  int used = eighths / 8;
  if (eighths % 8 != 0) {
    text += "\xE2\x96";
    text += static_cast<char>(0x90 - eighths % 8);
    ++used;
  }
  text.append(static_cast<size_t>(cells - used), ' ');
  return "\xE2\x96\x95" + text + "\xE2\x96\x8F";  // Thin frame, U+2595 and U+258F.
}

double total(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

std::string epoch_line(const ProgressState& state, const ProgressTimes& times, int width,
                       ProgressGlyphs glyphs) {
  const bool counted = state.num_steps > 0;
  const std::string head =
      state.phase.empty() ? "epoch " + std::to_string(state.epoch) : state.phase;
  std::string count = std::to_string(state.step);
  if (counted) {
    const std::string all = std::to_string(state.num_steps);
    // A fixed place for the count, so that the bar does not jump.
    if (glyphs != ProgressGlyphs::kNone && count.size() < all.size())
      count.insert(0, all.size() - count.size(), ' ');
    count += "/" + all;
  } else {
    count = "step " + count;
  }
  // Figures in the order of the display, each with its importance.
  struct Figure {
    std::string text;
    int importance;
  };
  std::vector<Figure> figures;
  if (state.phase.empty())
    figures = {{print("loss %.3f", state.loss), 4}, {print("lr %.1e", state.learning_rate), 1}};
  if (!state.rank_tokens_per_s.empty()) {
    const double all = state.tokens_per_s.value_or(total(state.rank_tokens_per_s));
    figures.push_back({grouped(all) + " tok/s", 2});
  }
  if (counted && state.step >= state.num_steps) {
    figures.push_back({"in " + clock_text(times.elapsed), 3});
  } else if (counted) {
    figures.push_back({(times.left ? clock_text(*times.left) : "--:--") + " left", 3});
  }

  const auto assemble = [&](const std::string& middle) {
    std::string line = head + " " + middle + count;
    for (const Figure& figure : figures) line += "  " + figure.text;
    return line;
  };
  // The bar, its two brackets and the space after it.
  const bool has_bar = counted && glyphs != ProgressGlyphs::kNone;
  const int bar_columns = has_bar ? kMinBar + 3 : 0;
  while (!figures.empty() && columns(assemble("")) + bar_columns > width) {
    figures.erase(std::min_element(
        figures.begin(), figures.end(),
        [](const Figure& a, const Figure& b) { return a.importance < b.importance; }));
  }
  const int room = width - columns(assemble("")) - 3;
  if (!has_bar || room < kMinBar) {
    return assemble("").substr(0, static_cast<size_t>(width));
  }
  const double share = static_cast<double>(state.step) / static_cast<double>(state.num_steps);
  return assemble(bar(share, std::min(room, kMaxBar), glyphs) + " ");
}

std::string ranks_line(const ProgressState& state, int width, ProgressGlyphs glyphs) {
  const std::vector<double>& rates = state.rank_tokens_per_s;
  const bool has_losses = state.rank_losses.size() == rates.size();
  const std::string head = std::to_string(rates.size()) + " ranks";
  const double fastest = *std::max_element(rates.begin(), rates.end());
  const auto all = [&](const char* label, int cells, bool losses) {
    std::string line = head + ": ";
    for (size_t rank = 0; rank < rates.size(); ++rank) {
      line += (rank == 0 ? "" : " | ") + std::string(label) + std::to_string(rank) + " ";
      if (cells > 0) line += bar(fastest > 0 ? rates[rank] / fastest : 0.0, cells, glyphs) + " ";
      line += grouped(rates[rank]);
      if (losses) line += print(" loss %.3f", state.rank_losses[rank]);
    }
    return line + " tok/s";
  };
  const bool bars = glyphs != ProgressGlyphs::kNone;
  for (const bool losses : {has_losses, false}) {
    for (const auto& [label, cells] :
         {std::pair{"rank ", 12}, {"rank ", 8}, {"", 8}, {"", 4}, {"", 0}}) {
      std::string line = all(label, bars ? cells : 0, losses);
      if (columns(line) <= width) return line;
    }
  }
  const auto end = [&](const char* name, auto place) {
    return std::string(name) + " rank " + std::to_string(place - rates.begin()) + " " +
           grouped(*place);
  };
  const std::string slow = end("slowest", std::min_element(rates.begin(), rates.end()));
  const std::string fast = end("fastest", std::max_element(rates.begin(), rates.end()));
  const std::string both = head + ": " + slow + " | " + fast + " tok/s";
  const std::string one = head + ": " + slow + " tok/s";
  if (columns(both) <= width) return both;
  return (columns(one) <= width ? one : head).substr(0, static_cast<size_t>(width));
}

}  // namespace

std::vector<std::string> render_progress(const ProgressState& state, const ProgressTimes& times,
                                         int width, ProgressGlyphs glyphs) {
  width = std::max(width, 1);
  std::vector<std::string> lines = {epoch_line(state, times, width, glyphs)};
  if (state.rank_tokens_per_s.size() > 1) {
    std::string ranks = ranks_line(state, width, glyphs);
    if (glyphs == ProgressGlyphs::kNone) {
      lines[0] += "  " + ranks;
    } else {
      lines.push_back(std::move(ranks));
    }
  }
  return lines;
}

}  // namespace cohort::train
