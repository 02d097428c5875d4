// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/console.h"

#include <cstdarg>

namespace cohort {
namespace {

std::string formatted(const char* format, std::va_list arguments) {
  std::va_list again;
  va_copy(again, arguments);
  const int size = std::vsnprintf(nullptr, 0, format, arguments);
  std::string text(static_cast<size_t>(size < 0 ? 0 : size), '\0');
  std::vsnprintf(text.data(), text.size() + 1, format, again);
  va_end(again);
  return text;
}

std::string with_rank_before_lines(int rank, const std::string& text) {
  const std::string mark = "[rank " + std::to_string(rank) + "] ";
  std::string result;
  for (size_t start = 0; start < text.size();) {
    const size_t newline = text.find('\n', start);
    const size_t end = newline == std::string::npos ? text.size() : newline + 1;
    result += mark + text.substr(start, end - start);
    start = end;
  }
  return result;
}

}  // namespace

void Console::print(const char* format, ...) const {
  if (rank_ != 0) return;
  std::va_list arguments;
  va_start(arguments, format);
  write(formatted(format, arguments));
  va_end(arguments);
}

void Console::force_print(const char* format, ...) const {
  std::va_list arguments;
  va_start(arguments, format);
  write(with_rank_before_lines(rank_, formatted(format, arguments)));
  va_end(arguments);
}

void Console::write(const std::string& text) const {
  std::fwrite(text.data(), 1, text.size(), out_);
  std::fflush(out_);
}

}  // namespace cohort
