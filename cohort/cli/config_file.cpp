// SPDX-License-Identifier: Apache-2.0
#include "cohort/cli/config_file.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <system_error>
#include <yaml-cpp/yaml.h>

#include "cohort/base/error.h"
#include "cohort/cli/flag_list.h"
#include "cohort/cli/parse.h"

namespace cohort::cli {
namespace {

constexpr const char* kConfig = "--config";
constexpr const char* kDumpConfig = "--dump-config";

struct Value {
  std::vector<std::string> texts;
  std::string location;
};
using Values = std::map<const CLI::Option*, Value>;

// The files that the command line names, in order, as CLI11 reads it.
std::vector<std::string> config_files(const std::vector<std::string>& arguments) {
  CLI::App app;
  app.set_help_flag();
  app.allow_extras();
  std::vector<std::string> files;
  app.add_option("-c,--config", files)->allow_extra_args(false);
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
  try {
    app.parse(std::move(reversed));
  } catch (const CLI::ParseError& error) {
    throw ConfigError(error.what());
  }
  return files;
}

bool is_flag(const CLI::Option& option) {
  return option.get_items_expected_max() == 0;
}

bool names(const std::string& argument, const CLI::Option& option) {
  if (argument.starts_with("--")) return option.check_name(argument.substr(0, argument.find('=')));
  return argument.size() > 1 && argument.front() == '-' && option.check_name(argument.substr(0, 2));
}

// The flags on the command line; of values only whether a flag without value is false.
Values given_values(const CLI::App& command, const std::vector<std::string>& arguments) {
  Values given;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& argument : arguments) {
      if (!names(argument, *option)) continue;
      const size_t equals = argument.find('=');
      bool on = true;
      if (is_flag(*option) && equals != std::string::npos)
        CLI::detail::lexical_cast(argument.substr(equals + 1), on);
      given[option] = {.texts = {on ? "true" : "false"}, .location = ""};
    }
  }
  return given;
}

bool has(const std::set<CLI::Option*>& options, const CLI::Option* option) {
  return std::ranges::find(options, option) != options.end();
}

// Removes from `earlier` what `later` leaves no place for.
void give_way(Values& earlier, const Values& later) {
  for (const auto& [option, value] : later) {
    const bool off = is_flag(*option) && value.texts[0] == "false";
    earlier.erase(option);
    std::erase_if(earlier, [off, &option = option](const auto& entry) {
      return has(off ? entry.first->get_needs() : entry.first->get_excludes(), option);
    });
  }
}

std::string read(const std::string& path) {
  std::error_code error;
  errno = std::filesystem::is_directory(path, error) ? EISDIR : 0;
  std::ifstream file(path);
  if (!file || errno == EISDIR) {
    throw ConfigError("--config " + path + ": cannot be read: " +
                      std::generic_category().message(errno != 0 ? errno : EIO));
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

// A value's texts: one, or those of a list; of a flag without value "true" or "false".
std::vector<std::string> texts_of(const YAML::Node& node, const CLI::Option& option,
                                  const std::string& where) {
  const char* expected = is_flag(option)                        ? "true or false"
                         : option.get_items_expected_max() == 1 ? "one value"
                                                                : "a value or a list of values";
  std::vector<std::string> texts;
  if (node.IsScalar()) {
    texts.push_back(node.Scalar());
  } else if (node.IsSequence() && option.get_items_expected_max() > 1) {
    for (const YAML::Node& item : node) texts.push_back(item.IsScalar() ? item.Scalar() : "");
  }
  const auto is_empty = [](const std::string& text) { return text.empty(); };
  const bool good = !texts.empty() && std::ranges::none_of(texts, is_empty) &&
                    (!is_flag(option) || texts[0] == "true" || texts[0] == "false");
  if (!good) throw ConfigError(where + ": expected " + expected);
  return texts;
}

void read_values(const std::string& path, CLI::App& command, Values& values) {
  const auto line_of = [&path](const YAML::Mark& mark) {
    return path + ": line " + std::to_string(mark.line + 1);
  };
  std::vector<YAML::Node> documents;
  try {
    documents = YAML::LoadAll(read(path));
  } catch (const YAML::ParserException& error) {
    throw ConfigError(line_of(error.mark) + ": no YAML: " + error.msg);
  }
  if (documents.size() > 1)
    throw ConfigError(line_of(documents[1].Mark()) + ": expected one document, here is a second");
  if (documents.empty() || documents[0].IsNull()) return;
  const YAML::Node& root = documents[0];
  if (!root.IsMap()) throw ConfigError(path + ": expected lines such as mini-batch: 64");
  Values mine;
  for (const auto& entry : root) {
    const std::string location = line_of(entry.first.Mark());
    const std::string key = entry.first.IsScalar() ? entry.first.Scalar() : "";
    const CLI::Option* option = command.get_option_no_throw("--" + key);
    if (option == nullptr || !option->get_configurable()) {
      throw ConfigError(location + ": '" + key + "' is no flag of `" + command.get_name() +
                        " --help` that a file may set");
    }
    const Value value{texts_of(entry.second, *option, location + ": " + key), location};
    if (!mine.emplace(option, value).second)
      throw ConfigError(location + ": '" + key + "' is there twice");
  }
  give_way(values, mine);
  values.merge(mine);
}

std::string long_name(const CLI::Option& option) {
  return option.get_lnames().empty() ? option.get_name() : "--" + option.get_lnames().front();
}

// Values of an option: those given, else its defaults.
std::vector<std::string> values_of(const FlagInfo& flag) {
  const bool given = flag.option->count() > 0;
  if (is_flag(*flag.option)) return {given && !is_off(*flag.option) ? "true" : "false"};
  return given ? flag.option->reduced_results() : flag.default_values;
}

// Whether a flag that is given leaves no place for this one.
bool is_excluded(const CLI::Option& option) {
  const auto others = option.get_excludes();
  return std::ranges::any_of(
      others, [](const CLI::Option* other) { return other->count() > 0 && !is_off(*other); });
}

// The value of the option's file entry.
void emit(const FlagInfo& flag, const std::vector<std::string>& values, YAML::Emitter& out) {
  if (flag.max_values <= 1) {
    out << values.front();
    return;
  }
  out << YAML::Flow << YAML::BeginSeq;
  for (const std::string& value : values) out << value;
  out << YAML::EndSeq;
}

}  // namespace

void add_config_flags(CLI::App& command) {
  command
      .add_option(
          "-c,--config",
          "Read flags from this YAML file; the command line and later files take precedence")
      ->type_name(kFile)
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
      ->configurable(false)
      ->group(kOtherFlags);
  command.add_flag(kDumpConfig)
      ->description(
          "Print the given flags as a --config file, with the defaults of all others as comments, "
          "and exit")
      ->configurable(false)
      ->group(kOtherFlags);
}

std::vector<FlagOrigin> add_config_values(CLI::App& command, std::vector<std::string>& arguments) {
  if (command.get_option_no_throw(kConfig) == nullptr) return {};
  Values values;
  for (const std::string& path : config_files(arguments)) read_values(path, command, values);
  give_way(values, given_values(command, arguments));
  std::vector<FlagOrigin> origins;
  std::vector<std::string> words;
  // In the order in which the command knows its flags: independent of addresses.
  for (const CLI::Option* option : command.get_options()) {
    const auto found = values.find(option);
    if (found == values.end()) continue;
    const std::string name = long_name(*option);
    const auto& [texts, location] = found->second;
    origins.push_back({name, location});
    // To CLI11 a flag excludes others also when it is false.
    if (is_flag(*option) && texts[0] == "false" && !option->get_excludes().empty()) continue;
    if (texts.size() == 1) {
      words.push_back(name + "=" + texts[0]);
    } else {
      words.push_back(name);
      words.insert(words.end(), texts.begin(), texts.end());
    }
  }
  // Behind the command line's own: a flag of any number of values would swallow positionals.
  arguments.insert(std::ranges::find(arguments, "--"), words.begin(), words.end());
  return origins;
}

std::string dump_config(const CLI::App& command) {
  std::string text;
  std::string group;
  for (const FlagInfo& flag : flags_of(command)) {
    if (!flag.option->get_configurable() || flag.names.empty()) continue;
    if (flag.option->get_group() != group) {
      group = flag.option->get_group();
      text += (text.empty() ? "# " : "\n# ") + (group == "Options" ? "Flags" : group) + "\n";
    }
    const std::string key = long_name(*flag.option).substr(2);
    const auto values = is_excluded(*flag.option) ? std::vector<std::string>() : values_of(flag);
    if (values.empty()) {
      text += "# " + key + ":\n";
      continue;
    }
    if (flag.option->count() == 0) text += "# ";
    YAML::Emitter line;
    line << YAML::BeginMap << YAML::Key << key << YAML::Value;
    emit(flag, values, line);
    line << YAML::EndMap;
    text += std::string(line.c_str()) + "\n";
  }
  return text;
}

}  // namespace cohort::cli
