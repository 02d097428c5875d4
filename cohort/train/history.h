// SPDX-License-Identifier: Apache-2.0
// The history of a run: a file with one JSON object a line, to be read by any tool.
#pragma once
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "cohort/base/append_file.h"

namespace cohort::train {

/// A number, a truth value or a text, or several numbers or texts.
class HistoryValue {
 public:
  HistoryValue(bool value) : value_(value) {}  // NOLINT(google-explicit-constructor)
  template <std::integral Number>
  HistoryValue(Number value)  // NOLINT(google-explicit-constructor)
      : value_(static_cast<int64_t>(value)) {}
  HistoryValue(double value) : value_(value) {}  // NOLINT(google-explicit-constructor)
  HistoryValue(std::string value) : value_(std::move(value)) {}    // NOLINT
  HistoryValue(const char* value) : value_(std::string(value)) {}  // NOLINT

  HistoryValue(std::vector<double> value) : value_(std::move(value)) {}       // NOLINT
  HistoryValue(std::vector<std::string> value) : value_(std::move(value)) {}  // NOLINT

  using Variant = std::variant<bool, int64_t, double, std::string, std::vector<double>,
                               std::vector<std::string>>;
  const Variant& get() const { return value_; }

 private:
  Variant value_;
};

/// Appends to a run's history; for rank 0 only, since the file has one writer.
class History {
 public:
  using Field = std::pair<std::string_view, HistoryValue>;

  /// Opens `path` for appending. A last line that a killed run left half written is cut off, and so
  /// are the last lines of a run that trained past its last checkpoint: from the first
  /// whose `counter` is above `last_update`, or is it and whose "type" is `later_type`.
  /// Errors: ConfigError that names the file if it cannot be opened.
  explicit History(const std::string& path,
                   int64_t last_update = std::numeric_limits<int64_t>::max(),
                   const std::optional<std::string>& later_type = {},
                   const std::string& counter = "update");

  /// Writes {"key": value, ...} in the order given as one line, and hands it to the system at
  /// once. NaN and infinities become null, as JSON has none of them.
  /// Errors: c10::Error that names the file and gives the system's reason; the file ends with the
  /// line before, and a later call may succeed.
  void append(std::initializer_list<Field> fields) { append(std::vector<Field>(fields)); }
  void append(const std::vector<Field>& fields);

 private:
  AppendFile file_;
};

}  // namespace cohort::train
