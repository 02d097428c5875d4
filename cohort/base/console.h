// SPDX-License-Identifier: Apache-2.0
// Printing from a program of many ranks.
#pragma once
#include <cstdio>
#include <string>

namespace cohort {

/// Prints on rank 0 only, or by force on the calling rank. A call's text is written in one piece and
/// flushed, so that the lines of several ranks on one terminal or in one pipe do not mix.
///
/// Local:   no communication.
/// Threads: any may call.
class Console {
 public:
  /// Prints to `out`, not owned.
  explicit Console(int rank, std::FILE* out = stdout) : rank_(rank), out_(out) {}

  /// Prints on rank 0, nothing on the others. Format and arguments are printf's; the line's end is
  /// the caller's.
  [[gnu::format(printf, 2, 3)]] void print(const char* format, ...) const;

  /// Prints on the rank that calls it, whichever it is, with "[rank r] " before each line. The
  /// launcher shows such lines under --tee rank0, too.
  [[gnu::format(printf, 2, 3)]] void force_print(const char* format, ...) const;

 private:
  void write(const std::string& text) const;

  int rank_;
  std::FILE* out_;
};

}  // namespace cohort
