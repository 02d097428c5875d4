// SPDX-License-Identifier: Apache-2.0
// A rank-tagged log. Each process owns its own Log object; there is no global one.
//
// Line on the terminal:  [rank 0/2] info epoch done epoch=3 loss=2.1
// Line in the file:      the same, then time=2025-01-31T12:00:00.123Z (UTC)
#pragma once
#include <concepts>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace cohort {

enum class LogLevel { kDebug, kInfo, kWarn, kError };

/// Which ranks write to stderr as well as to the log file.
enum class LogConsole {
  kRankZero,  ///< Rank 0 only.
  kAlways,    ///< Every rank.
  kNever,     ///< The file only.
};

struct LogOptions {
  int rank = 0;
  int world_size = 1;
  std::string file{};                ///< This rank's own file, appended to; empty: none.
  LogLevel level = LogLevel::kInfo;  ///< Lines below it are dropped.
  LogConsole console = LogConsole::kRankZero;
};

/// One `key=value` at the end of a line. A value that is empty, or has a space, '=', '"', '\', a tab
/// or a line end, is quoted. Other control characters become spaces.
struct LogField {
  LogField(std::string_view field_key, std::string field_value)
      : key(field_key), value(std::move(field_value)) {}
  template <std::integral Number>
  LogField(std::string_view field_key, Number number)
      : key(field_key), value(std::to_string(number)) {}
  /// Six significant digits; "nan" whatever its sign.
  LogField(std::string_view field_key, double number);
  /// "none" where there is no number.
  LogField(std::string_view field_key, std::optional<double> number)
      : LogField(number ? LogField(field_key, *number) : LogField(field_key, std::string("none"))) {
  }

  std::string_view key;
  std::string value;
};

/// Writes lines, each flushed at once, so that the last words of a killed process are there.
///
/// Threads: any thread may call; lines never mix.
class Log {
 public:
  using Fields = std::initializer_list<LogField>;

  /// Opens the file and makes its folder.
  /// Errors: ConfigError that names the file if it cannot be written.
  explicit Log(const LogOptions& options);
  ~Log();
  Log(Log&&) noexcept;
  Log& operator=(Log&&) noexcept;

  void debug(std::string_view message, Fields fields = {}) const {
    write(LogLevel::kDebug, message, fields);
  }
  void info(std::string_view message, Fields fields = {}) const {
    write(LogLevel::kInfo, message, fields);
  }
  void warn(std::string_view message, Fields fields = {}) const {
    write(LogLevel::kWarn, message, fields);
  }
  void error(std::string_view message, Fields fields = {}) const {
    write(LogLevel::kError, message, fields);
  }
  /// Newlines in `message` become spaces: one call is one line.
  void write(LogLevel level, std::string_view message, Fields fields = {}) const;

 private:
  struct Sinks;
  std::unique_ptr<Sinks> sinks_;
};

}  // namespace cohort
