// SPDX-License-Identifier: Apache-2.0
#include "cohort/cli/flag_list.h"

#include <algorithm>
#include <charconv>
#include <sstream>

namespace cohort::cli {
namespace {

constexpr size_t kNumFields = 7;

std::string join(const std::vector<std::string>& parts, char separator) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i)
    text += (i > 0 ? std::string(1, separator) : "") + parts[i];
  return text;
}

// torchrun's spelling of a flag is taken, not shown.
bool is_other_spelling(const std::string& name, const std::vector<std::string>& all) {
  std::string dashes = name;
  std::ranges::replace(dashes, '_', '-');
  return dashes != name && std::ranges::find(all, dashes) != all.end();
}

// The words of one_of and CLI::IsMember stand in braces.
std::vector<std::string> words_of(const std::string& type) {
  const size_t open = type.find('{');
  const size_t close = type.find('}', open);
  if (open == std::string::npos || close == std::string::npos) return {};
  return split(type.substr(open + 1, close - open - 1), ',');
}

// Behind the colon CLI11 names what checks the values.
std::string own_type(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  return type.substr(0, type.find(':'));
}

std::string value_of(const CLI::Option& option, bool has_words) {
  const std::string type = own_type(option);
  const std::string own = type.substr(0, type.find(' '));
  if (own == "INT" || own == "UINT") return "N";
  if (own == "FLOAT") return "X";
  if (own == "TEXT" || own.empty()) return has_words ? "WORD" : "TEXT";
  return own;
}

// CLI11 writes the defaults of an option of several values as [a,b].
std::vector<std::string> defaults_of(const CLI::Option& option) {
  const std::string text = option.get_default_str();
  if (text.empty()) return {};
  if (option.get_items_expected_max() > 1 && text.starts_with('[') && text.ends_with(']'))
    return split(text.substr(1, text.size() - 2), ',');
  return {text};
}

FlagInfo info_of(const CLI::Option& option) {
  FlagInfo info{.option = &option};
  for (const auto& name : option.get_snames()) info.names.push_back("-" + name);
  for (const auto& name : option.get_lnames()) {
    if (!is_other_spelling(name, option.get_lnames())) info.names.push_back("--" + name);
  }
  info.min_values = option.get_items_expected_min();
  info.max_values = option.get_items_expected_max();
  if (info.max_values > 0) {
    if (const std::string type = own_type(option); type.find(' ') != type.npos) info.usage = type;
    info.words = words_of(option.get_type_name());
    info.value = value_of(option, !info.words.empty());
    info.default_values = defaults_of(option);
  }
  return info;
}

std::string first_line(const std::string& text) {
  std::string line = text.substr(0, text.find('\n'));
  std::ranges::replace(line, '\t', ' ');
  return line;
}

void add_lines(const CLI::App& app, const std::string& command, std::vector<FlagLine>& lines) {
  lines.push_back(
      {.kind = "command", .command = command, .description = first_line(app.get_description())});
  for (const FlagInfo& flag : flags_of(app)) {
    const bool positional = flag.option->get_positional();
    const FlagLine line{.kind = "flag",
                        .command = command,
                        .names = join(flag.names, ','),
                        .max_values = std::min(flag.max_values, kManyValues),
                        .value = flag.value,
                        .words = join(flag.words, ','),
                        .description = first_line(flag.option->get_description())};
    if (!flag.names.empty()) lines.push_back(line);
    if (!positional) continue;
    lines.push_back(line);
    lines.back().kind = "positional";
  }
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; }))
    add_lines(*sub, (command.empty() ? "" : command + " ") + sub->get_name(), lines);
}

}  // namespace

std::vector<FlagInfo> flags_of(const CLI::App& command) {
  std::vector<FlagInfo> flags;
  for (const CLI::Option* option : command.get_options()) {
    if (!option->get_group().empty()) flags.push_back(info_of(*option));
  }
  // Groups in the order in which they are first named.
  std::vector<std::string> groups;
  for (const FlagInfo& flag : flags) {
    if (std::ranges::find(groups, flag.option->get_group()) == groups.end())
      groups.push_back(flag.option->get_group());
  }
  const auto position = [&groups](const FlagInfo& flag) {
    const std::string& group = flag.option->get_group();
    return group == kOtherFlags ? groups.end() : std::ranges::find(groups, group);
  };
  std::ranges::stable_sort(flags, {}, position);
  return flags;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  if (text.ends_with(separator)) parts.emplace_back();
  return parts;
}

bool is_off(const CLI::Option& option) {
  return option.get_items_expected_max() == 0 && option.count() > 0 && !option.as<bool>();
}

std::string any_of(const std::vector<std::string>& words) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i)
    text += (i == 0 ? "" : i + 1 == words.size() ? " or " : ", ") + words[i];
  return text;
}

std::vector<FlagLine> list_flags(const CLI::App& app) {
  std::vector<FlagLine> lines;
  const std::string& name = app.get_name();
  const std::string first = "cohort ";
  add_lines(app, name.starts_with(first) ? name.substr(first.size()) : name, lines);
  return lines;
}

std::string to_text(const FlagLine& line) {
  return join({line.kind, line.command, line.names, std::to_string(line.max_values), line.value,
               line.words, line.description},
              '\t');
}

std::optional<FlagLine> parse_flag_line(const std::string& text) {
  const std::vector<std::string> fields = split(text, '\t');
  if (fields.size() != kNumFields) return {};
  FlagLine line{fields[0], fields[1], fields[2], 0, fields[4], fields[5], fields[6]};
  const char* end = fields[3].data() + fields[3].size();
  if (std::from_chars(fields[3].data(), end, line.max_values).ptr != end) return {};
  return line;
}

}  // namespace cohort::cli
