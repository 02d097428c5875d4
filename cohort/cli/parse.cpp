// SPDX-License-Identifier: Apache-2.0
#include "cohort/cli/parse.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <memory>

#include "cohort/cli/config_file.h"
#include "cohort/cli/flag_list.h"
#include "cohort/cli/help.h"

namespace cohort::cli {
namespace {

void set_formatter(CLI::App& app, const std::shared_ptr<CLI::FormatterBase>& formatter) {
  app.formatter(formatter);
  if (CLI::Option* help = app.get_help_ptr())
    help->description("Print this help and exit")->group(kOtherFlags);
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; }))
    set_formatter(*command, formatter);
}

// The command that the first of `arguments` name, and the number of words that it takes.
std::pair<CLI::App*, size_t> named_command(CLI::App& app,
                                           const std::vector<std::string>& arguments) {
  CLI::App* command = &app;
  size_t used = 0;
  for (; used < arguments.size(); ++used) {
    const auto named = command->get_subcommands(
        [&](const CLI::App* sub) { return sub->check_name(arguments[used]); });
    if (named.empty()) break;
    command = named.front();
  }
  return {command, used};
}

// Whether `text` speaks of the flag `name`.
bool names(const std::string& text, const std::string& name) {
  for (size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + 1)) {
    const size_t end = at + name.size();
    const char next = end < text.size() ? text[end] : ' ';
    if (std::isalnum(static_cast<unsigned char>(next)) == 0 && next != '-') return true;
  }
  return false;
}

std::string with_origin(const std::string& text, const std::vector<FlagOrigin>& origins) {
  for (const FlagOrigin& origin : origins) {
    if (names(text, origin.name)) return origin.location + ": " + text;
  }
  return text;
}

// CLI11's text of an error in the form "--flag value: expected ...".
std::string text_of(const CLI::ParseError& error, const CLI::App& command) {
  std::string text = error.what();
  if (const size_t colon = text.find(": "); text.starts_with("-") && colon != std::string::npos &&
                                            text.find(": expected ", colon + 2) != text.npos)
    return text.erase(colon, 1);
  const std::string value = ": Value ";
  const std::string range = " not in range ";
  if (const size_t at = text.find(value), limits = text.find(range);
      at != text.npos && limits != text.npos) {
    text.replace(limits, range.size(), ": expected ");
    return text.replace(at, value.size(), " ");
  }
  const std::string twice = ": At Most 1 required but received ";
  if (const size_t at = text.find(twice); at != text.npos)
    return text.substr(0, at) + ": expected once, got " + text.substr(at + twice.size()) + " times";
  if (const size_t at = text.find(": 1 required "); at != text.npos && text.ends_with(" missing"))
    return text.substr(0, at) + ": expected a value";
  const std::string conversion = "Could not convert: ";
  const size_t equals = text.find(" = ");
  if (!text.starts_with(conversion) || equals == std::string::npos) return text;
  const std::string name = text.substr(conversion.size(), equals - conversion.size());
  const CLI::Option* option = command.get_option_no_throw(name);
  const std::string type = option == nullptr ? "" : option->get_type_name();
  const std::array<std::string, 5> counts = {"INT", "UINT", kTokens, kUpdates, kEpochs};
  const bool whole = std::ranges::find(counts, type.substr(0, type.find(':'))) != counts.end();
  const std::string given = text.substr(equals + 3);
  const bool too_large =
      !given.empty() && given.find_first_not_of("0123456789") == std::string::npos;
  return name + " " + given + ": expected " +
         (whole && too_large  ? "a smaller number"
          : whole             ? "a whole number"
          : type == "BOOLEAN" ? "true or false"
                              : "a number");
}

// CLI11 takes the next word for a value, whatever it is.
void check_values(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    if (option->get_items_expected_max() == 0) continue;
    if (option->get_name() == "--server-arg") continue;  // Flags of another program.
    for (const std::string& value : option->results()) {
      if (!value.starts_with("--")) continue;
      const std::string known = value.substr(0, value.find('='));
      if (command.get_option_no_throw(known) != nullptr)
        throw ConfigError(option->get_name() + ": expected a value, got the flag " + value);
    }
  }
}

// CLI11 takes a flag that is false for given.
void check_needs(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    if (option->count() == 0 || is_off(*option)) continue;
    for (const CLI::Option* needed : option->get_needs())
      if (is_off(*needed)) throw CLI::RequiresError(option->get_name(), needed->get_name());
  }
}

// Of what the command line holds and no flag or command takes.
std::string unknown_of(const CLI::App& app) {
  const std::vector<std::string> unknown = app.remaining(/*recurse=*/true);
  const auto flag = std::ranges::find_if(unknown, [](const auto& u) { return u.starts_with("-"); });
  const std::string word = flag == unknown.end() ? unknown.front() : *flag;
  if (word == "--device" || word.starts_with("--device="))
    return word + ": this command computes on the CPU: leave it out";
  return word + ": there is no such flag or command";
}

// A flag that `command` needs, or one of its commands.
std::string missing_of(const CLI::App& command, const CLI::RequiredError& error) {
  std::vector<std::string> words;
  for (const CLI::App* sub : command.get_subcommands([](const CLI::App*) { return true; }))
    if (!sub->get_group().empty()) words.push_back(sub->get_name());
  return words.empty() ? error.what() : "no command: expected " + any_of(words);
}

// `hint` of the program, about one of its commands: "cohort nmt train --help lists flags".
std::string advice_of(const std::string& hint, const std::vector<std::string>& command) {
  const size_t help = hint.find(" --help");
  if (command.empty() || help == std::string::npos) return hint;
  std::string advice = hint.substr(0, help);
  for (const std::string& word : command) advice += " " + word;
  return advice + " --help lists flags";
}

}  // namespace

CLI::Validator one_of(const std::vector<std::string>& words) {
  std::string list;
  for (const std::string& word : words) list += (list.empty() ? "" : ",") + word;
  return CLI::Validator(
      [words](const std::string& text) -> std::string {
        const bool good = std::find(words.begin(), words.end(), text) != words.end();
        return good ? "" : text + ": expected " + any_of(words);
      },
      "{" + list + "}");
}

std::optional<int> parse(CLI::App& app, std::vector<std::string> arguments,
                         const std::string& hint) {
  set_formatter(app, std::make_shared<HelpFormatter>());
  if (arguments == std::vector<std::string>{kListFlags}) {
    for (const FlagLine& line : list_flags(app)) std::printf("%s\n", to_text(line).c_str());
    return 0;
  }
  const auto [command, used] = named_command(app, arguments);
  const std::string advice = in_brackets(
      advice_of(hint, {arguments.begin(), arguments.begin() + static_cast<std::ptrdiff_t>(used)}));
  std::vector<std::string> values(arguments.begin() + static_cast<std::ptrdiff_t>(used),
                                  arguments.end());
  const std::vector<FlagOrigin> origins = add_config_values(*command, values);
  arguments.resize(used);
  arguments.insert(arguments.end(), values.begin(), values.end());
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
    check_values(*command);
    check_needs(*command);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::RequiredError& error) {
    // What was written wrongly explains more than what is therefore missing.
    const bool has_unknown = !app.remaining(/*recurse=*/true).empty();
    throw ConfigError((has_unknown ? unknown_of(app) : missing_of(*command, error)) + advice);
  } catch (const CLI::ExtrasError&) {
    throw ConfigError(unknown_of(app) + advice);
  } catch (const CLI::ParseError& error) {
    throw ConfigError(with_origin(text_of(error, *command), origins) + advice);
  }
  const CLI::Option* dump = command->get_option_no_throw("--dump-config");
  if (dump == nullptr || dump->count() == 0) return {};
  std::printf("%s", dump_config(*command).c_str());
  return 0;
}

std::optional<int> parse(CLI::App& app, int argc, char** argv, const std::string& hint) {
  if (app.get_name().empty()) app.name(argv[0]);
  return parse(app, std::vector<std::string>(argv + 1, argv + argc), hint);
}

}  // namespace cohort::cli
