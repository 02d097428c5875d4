// SPDX-License-Identifier: Apache-2.0
// What CLI11 knows of a program's commands and flags, in the form that help, configuration files
// and shell completion share.
#pragma once
#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

namespace cohort::cli {

/// `cohort-NAME __flags` prints its commands and flags for `cohort completion`, one a line: see
/// list_flags.
inline constexpr const char* kListFlags = "__flags";

/// One option of one command.
struct FlagInfo {
  const CLI::Option* option = nullptr;
  std::vector<std::string> names;  ///< With their dashes, short ones first; none: a positional.
  std::string value;  ///< FILE, TOKENS ...; empty for a flag without value. Of several the first.
  std::string usage;  ///< "FILE [FIRST [BEST]]" where values are of several kinds; else empty.
  std::vector<std::string> words;  ///< The values it accepts, if they are few.
  int min_values = 0;
  int max_values = 0;  ///< Of one use; kManyValues and above: no limit.
  std::vector<std::string> default_values;
};
inline constexpr int kManyValues = 1000;

/// The group of what every command has, such as --help; it is shown last.
inline constexpr const char* kOtherFlags = "Other";

/// The group of certificates and secrets.
inline constexpr const char* kSecurity = "Security";

/// The options of `command` that help shows, by group.
std::vector<FlagInfo> flags_of(const CLI::App& command);

/// The parts of `text` between separators, a last empty one included; none of an empty text.
std::vector<std::string> split(const std::string& text, char separator);

/// "a, b or c".
std::string any_of(const std::vector<std::string>& words);

/// Whether `option`, one without value, was given as --FLAG=false. To CLI11 it is given then.
bool is_off(const CLI::Option& option);

/// One command or option of a program, as fields of a line with tabs between them.
struct FlagLine {
  std::string kind;     ///< "command", "flag" or "positional".
  std::string command;  ///< Words after "cohort", such as "nmt train".
  std::string names;    ///< Of a flag, with "," between them.
  int max_values = 0;
  std::string value;        ///< As FlagInfo's.
  std::string words;        ///< With "," between them.
  std::string description;  ///< Its first line.
};

/// The commands of `app`, itself first, each with its options.
std::vector<FlagLine> list_flags(const CLI::App& app);

std::string to_text(const FlagLine& line);
/// Returns nothing for a line of another form.
std::optional<FlagLine> parse_flag_line(const std::string& text);

}  // namespace cohort::cli
