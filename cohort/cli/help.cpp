// SPDX-License-Identifier: Apache-2.0
#include "cohort/cli/help.h"

#include <algorithm>
#include <sstream>

#include "cohort/cli/flag_list.h"

namespace cohort::cli {
namespace {

constexpr size_t kWidth = 100;
constexpr size_t kLeftWidth = 36;  // of the column of names, with its margin

// Appends the words of `text` to the line at hand, whose first `column` characters are taken; lines
// after it begin at `indent`.
void wrap(const std::string& text, size_t column, size_t indent, std::string& out) {
  std::istringstream words(text);
  bool first = true;
  for (std::string word; words >> word;) {
    if (!first && column + 1 + word.size() > kWidth) {
      out += "\n" + std::string(indent, ' ');
      column = indent;
      first = true;
    }
    out += (first ? "" : " ") + word;
    column += word.size() + (first ? 0 : 1);
    first = false;
  }
  out += "\n";
}

void two_columns(const std::string& left, const std::string& right, std::string& out) {
  const std::string margined = "  " + left;
  out += margined;
  if (margined.size() + 2 > kLeftWidth) {
    out += "\n" + std::string(kLeftWidth, ' ');
  } else {
    out += std::string(kLeftWidth - margined.size(), ' ');
  }
  wrap(right, kLeftWidth, kLeftWidth, out);
}

// "FILE", "FILE [FILE]", "FILE ...", "FILE [FIRST [BEST]]" for the values of one use.
std::string placeholder_of(const FlagInfo& flag) {
  if (flag.max_values == 0) return "";
  if (!flag.usage.empty()) return flag.usage;
  if (flag.max_values >= kManyValues) return flag.value + " ...";
  std::string text;
  for (int i = 0; i < flag.max_values; ++i) {
    const bool needed = i < std::max(flag.min_values, 1);
    text += (i > 0 ? " " : "") + (needed ? flag.value : "[" + flag.value + "]");
  }
  return text;
}

std::string name_of(const FlagInfo& flag) {
  std::string text;
  for (const std::string& name : flag.names) text += (text.empty() ? "" : ",") + name;
  return text;
}

std::string positional_name(const FlagInfo& flag) {
  std::string name = flag.option->get_name(/*positional=*/true);
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::toupper(c); });
  return name;
}

std::string with_value(const std::string& name, const FlagInfo& flag) {
  return flag.max_values == 0 ? name : name + " " + placeholder_of(flag);
}

std::string usage_of(const CLI::App& app, const std::vector<FlagInfo>& flags) {
  std::string text;
  bool has_other = false;  // beside --help
  for (const FlagInfo& flag : flags) {
    const bool required = flag.option->get_required();
    if (flag.option->get_positional()) {
      const std::string name =
          positional_name(flag) + (flag.max_values >= kManyValues ? " ..." : "");
      text += required ? " " + name : " [" + name + "]";
    } else if (required) {
      text += " " + with_value(flag.names.back(), flag);
    } else {
      has_other = has_other || flag.option != app.get_help_ptr();
    }
  }
  if (app.get_prefix_command()) return text + " [FLAGS] [--] PROGRAM ...";
  const bool has_commands = !app.get_subcommands([](const CLI::App*) { return true; }).empty();
  if (has_commands) return text + " COMMAND [FLAGS]";
  return text + (has_other ? " [FLAGS]" : "");
}

std::string description_of(const FlagInfo& flag) {
  std::string text = flag.option->get_description();
  if (!flag.words.empty()) text += (text.empty() ? "" : ": ") + any_of(flag.words);
  if (flag.option->get_required()) return text + " (required)";
  if (flag.default_values.empty()) return text;
  std::string values;
  for (const std::string& value : flag.default_values)
    values += (values.empty() ? "" : " ") + value;
  return text + " [" + values + "]";
}

void add_flags(const std::vector<FlagInfo>& flags, std::string& out) {
  std::string group;
  for (const FlagInfo& flag : flags) {
    if (flag.option->get_group() != group) {
      group = flag.option->get_group();
      out += "\n" + (group == "Options" ? "Flags" : group) + ":\n";
    }
    const std::string name =
        flag.names.empty() ? positional_name(flag) : with_value(name_of(flag), flag);
    two_columns(name, description_of(flag), out);
  }
}

void add_commands(const CLI::App& app, std::string& out) {
  std::string group;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_group() != group) {
      group = command->get_group();
      out += "\n" + (group == "Subcommands" ? "Commands" : group) + ":\n";
    }
    two_columns(command->get_name(), command->get_description(), out);
  }
}

}  // namespace

std::string HelpFormatter::make_help(const CLI::App* app, std::string name,
                                     CLI::AppFormatMode /*mode*/) const {
  const std::vector<FlagInfo> flags = flags_of(*app);
  std::string out;
  wrap(app->get_description(), 0, 0, out);
  out += "\n";
  std::string usage = "Usage: " + name;
  wrap(usage + usage_of(*app, flags), 0, 8, out);
  add_commands(*app, out);
  add_flags(flags, out);
  if (!app->get_footer().empty()) {
    out += "\n";
    wrap(app->get_footer(), 0, 0, out);
  }
  return out;
}

}  // namespace cohort::cli
