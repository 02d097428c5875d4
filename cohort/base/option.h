// SPDX-License-Identifier: Apache-2.0
// Options as data: one table gives a program's flags with their help, and the record of their values.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace cohort {

// What a value is: help shows it, and shells complete FILE and FOLDER. The other names are units.
inline constexpr const char* kFile = "FILE";
inline constexpr const char* kFolder = "FOLDER";
inline constexpr const char* kTokens = "TOKENS";
inline constexpr const char* kUpdates = "UPDATES";
inline constexpr const char* kEpochs = "EPOCHS";
inline constexpr const char* kSeconds = "SECONDS";
inline constexpr const char* kMinutes = "MINUTES";
inline constexpr const char* kMebibytes = "MIB";

/// What a number may be. `expected` says so in a message.
struct Limits {
  bool (*holds)(double) = nullptr;  ///< nullptr: any number.
  const char* expected = "";
};
inline constexpr Limits kAboveZero{[](double n) { return n > 0; }, "a number above 0"};
inline constexpr Limits kZeroOrMore{[](double n) { return n >= 0; }, "0 or more"};
inline constexpr Limits kFinite{[](double) { return true; }, "a finite number"};
inline constexpr Limits kWholeNumber{
    [](double n) { return n >= 0 && n < 9e18 && n == std::floor(n); },
    "a whole number of 0 or more"};

/// A value whose user writes words for it.
struct TextValue {
  std::vector<std::string> words;  ///< What each word may be; empty: `set` decides.
  std::function<std::vector<std::string>()> get;
  /// Errors: ConfigError that names the flag.
  std::function<void(const std::vector<std::string>&)> set;
};

/// `member`, whose values `parse` makes of `words`, and to_string (found by its type) the reverse.
template <class T, class Parse>
TextValue words_for(T& member, std::vector<std::string> words, Parse parse) {
  return {std::move(words), [&member] { return std::vector<std::string>{to_string(member)}; },
          [&member, parse](const auto& given) { member = parse(given.front()); }};
}
/// The same for a member with several values.
template <class T, class Parse>
TextValue words_for(std::vector<T>& members, std::vector<std::string> words, Parse parse) {
  const auto get = [&members] {
    std::vector<std::string> texts;
    for (const T& member : members) texts.push_back(to_string(member));
    return texts;
  };
  const auto set = [&members, parse](const std::vector<std::string>& given) {
    members.clear();
    for (const std::string& text : given) members.push_back(parse(text));
  };
  return {std::move(words), get, set};
}

/// What a value must be, beyond its type.
struct OptionRule {
  const char* unit = "";  ///< "TOKENS", "FILE"; empty: the type's.
  Limits limits{};
  int min_values = 1;
  int max_values = 1;
  bool required = false;
  const char* needs = "";          ///< A flag that must be given, too.
  const char* excludes = "";       ///< A flag that must not be given, too.
  const char* shown_default = "";  ///< What help shows; empty: the value.
};

inline OptionRule rule(const char* unit) {
  return {.unit = unit};
}
inline OptionRule rule(const Limits& limits, const char* unit = "") {
  return {.unit = unit, .limits = limits};
}

/// One option. `value` is not owned: it points to the default, and to what the flag sets.
struct Option {
  std::string flag;  ///< "--mini-batch"
  std::variant<bool*, int64_t*, uint64_t*, double*, std::optional<double>*, std::array<double, 3>*,
               std::string*, std::vector<std::filesystem::path>*, TextValue>
      value;
  std::string help;
  OptionRule rule{};
};
using Options = std::vector<Option>;

/// Its name in a record: "mini_batch".
inline std::string record_name(const Option& option) {
  std::string name = option.flag.substr(2);
  std::ranges::replace(name, '-', '_');
  return name;
}

}  // namespace cohort
