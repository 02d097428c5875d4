// SPDX-License-Identifier: Apache-2.0
#include "apps/completion.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <memory>
#include <sys/wait.h>

#include "cohort/base/error.h"

namespace cohort::cli {
namespace {

// Each script is a fixed engine and two tables: what may stand in a command, and what a flag of it
// takes. The engine walks the words before the cursor, so that it knows the command at hand and
// whether a flag still waits for values.

constexpr const char* kBash = R"(
_cohort() {
  local current=${COMP_WORDS[COMP_CWORD]} command='' left=0 kind='' words='' flags='' word i
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; ++i)); do
    word=${COMP_WORDS[i]}
    if [[ $word == -- ]]; then
      command=-- left=0
    elif [[ $command == -- ]]; then
      [[ $word == cohort || $word == */cohort ]] && command=''
    elif [[ $word == '=' ]]; then
      continue
    elif [[ $word == -* ]]; then
      left=0
      _cohort_flag "$command $word"
    elif ((left > 0)); then
      ((--left))
    else
      _cohort_command "$command"
      [[ " $words " == *" $word "* ]] && command=${command:+$command }$word
    fi
  done
  [[ $current == '=' ]] && current=''
  if [[ $command == -- ]]; then
    kind=file
  elif ((left == 0)) || [[ $current == -* ]]; then
    kind=words
    _cohort_command "$command"
    [[ $words == file && $current != -* ]] && kind=file
    [[ $words == file ]] && words=''
    [[ $current == -* ]] && words=$flags
  fi
  case $kind in
    file) mapfile -t COMPREPLY < <(compgen -f -- "$current") ;;
    folder) mapfile -t COMPREPLY < <(compgen -d -- "$current") ;;
    words) mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current") ;;
  esac
  [[ $kind == words ]] || compopt -o filenames 2>/dev/null
}
complete -F _cohort cohort
)";

constexpr const char* kZsh = R"(
_cohort() {
  local command='' kind='' word i left=0
  local -a words_here flags value_words
  for ((i = 2; i < CURRENT; ++i)); do
    word=${words[i]}
    if [[ $word == -- ]]; then
      command=-- left=0
    elif [[ $command == -- ]]; then
      [[ $word == cohort || $word == */cohort ]] && command=''
    elif [[ $word == -* ]]; then
      left=0
      _cohort_flag "$command $word"
    elif ((left > 0)); then
      ((--left))
    else
      _cohort_command "$command"
      (( ${words_here[(I)${word}:*]} )) && command=${command:+$command }$word
    fi
  done
  if [[ $command == -- ]]; then
    _normal
  elif ((left > 0)) && [[ ${words[CURRENT]} != -* ]]; then
    case $kind in
      file) _files ;;
      folder) _files -/ ;;
      words) compadd -- $value_words ;;
    esac
  else
    kind=words
    _cohort_command "$command"
    if [[ ${words[CURRENT]} == -* ]]; then
      _describe flag flags
    elif [[ $kind == file ]]; then
      _files
    else
      _describe command words_here
    fi
  fi
}
if [[ ${funcstack[1]} == _cohort ]]; then  # Autoloaded: this is the first time that it completes.
  _cohort "$@"
else
  compdef _cohort cohort
fi
)";

constexpr const char* kFish = R"(
function __cohort_command
    set -l command ''
    for word in (commandline -opc)[2..-1]
        if test "$word" = --
            set command program
        else if test "$command" = program
            string match -qr '(^|/)cohort$' -- $word; and set command ''
        else if not string match -q -- '-*' $word; and contains -- "$command $word" $__cohort_commands
            set command (string trim -- "$command $word")
        end
    end
    echo "$command"
end
function __cohort_at
    test (__cohort_command) = "$argv"
end
complete -c cohort -f
complete -c cohort -n '__cohort_at program' -F
)";

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
  return text;
}

// In single quotes, for any of the three shells.
std::string quoted(const std::string& text, const std::string& shell) {
  if (shell == "fish") return "'" + replaced(replaced(text, "\\", "\\\\"), "'", "\\'") + "'";
  return "'" + replaced(text, "'", "'\\''") + "'";
}

struct Command {
  FlagLine line;
  std::vector<FlagLine> flags;
  std::vector<FlagLine> positionals;
  std::vector<FlagLine> commands;  // below this one
};

std::string last_word(const std::string& text) {
  return text.substr(text.rfind(' ') + 1);
}

std::string parent_of(const std::string& command) {
  const size_t space = command.rfind(' ');
  return space == std::string::npos ? "" : command.substr(0, space);
}

std::vector<Command> commands_of(const std::vector<FlagLine>& lines) {
  std::vector<Command> commands;
  const auto named = [&](const std::string& name) {
    return std::ranges::find_if(commands, [&](const Command& c) { return c.line.command == name; });
  };
  for (const FlagLine& line : lines) {
    if (line.kind == "command") {
      if (const auto parent = named(parent_of(line.command));
          !line.command.empty() && parent != commands.end())
        parent->commands.push_back(line);
      commands.push_back({.line = line});
    } else if (const auto owner = named(line.command); owner != commands.end()) {
      (line.kind == "flag" ? owner->flags : owner->positionals).push_back(line);
    }
  }
  return commands;
}

std::string kind_of(const FlagLine& line) {
  if (!line.words.empty()) return "words";
  return line.value == "FILE" ? "file" : line.value == "FOLDER" ? "folder" : "none";
}

// Whether files complete an argument: a folder is reached through the folders above it.
bool is_path(const FlagLine& positional) {
  const std::string kind = kind_of(positional);
  return kind == "file" || kind == "folder";
}

std::string bash_tables(const std::vector<Command>& commands) {
  std::string words = "_cohort_command() {\n  words='' flags=''\n  case $1 in\n";
  std::string values = "_cohort_flag() {\n  words=''\n  case $1 in\n";
  for (const Command& command : commands) {
    std::string below, flags;
    for (const FlagLine& line : command.commands) below += last_word(line.command) + " ";
    for (const FlagLine& line : command.positionals)
      below += is_path(line) ? "file" : replaced(line.words, ",", " ");
    for (const FlagLine& line : command.flags) {
      std::string names;
      for (const std::string& name : split(line.names, ',')) {
        flags += name + " ";
        names += (names.empty() ? "" : " | ") + quoted(command.line.command + " " + name, "bash");
      }
      if (line.max_values == 0) continue;
      values +=
          "    " + names + ") left=" + std::to_string(line.max_values) + " kind=" + kind_of(line);
      if (!line.words.empty()) values += " words=" + quoted(replaced(line.words, ",", " "), "bash");
      values += " ;;\n";
    }
    while (below.ends_with(' ')) below.pop_back();
    while (flags.ends_with(' ')) flags.pop_back();
    words += "    " + quoted(command.line.command, "bash") + ") words=" + quoted(below, "bash") +
             " flags=" + quoted(flags, "bash") + " ;;\n";
  }
  return words + "  esac\n}\n" + values + "  esac\n}\n";
}

// "name:description", as _describe reads it.
std::string described(const std::string& name, const std::string& description) {
  return quoted(replaced(name, ":", "\\:") + ":" + description, "zsh");
}

std::string zsh_tables(const std::vector<Command>& commands) {
  std::string words = "_cohort_command() {\n  words_here=() flags=()\n  case $1 in\n";
  std::string values = "_cohort_flag() {\n  value_words=()\n  case $1 in\n";
  for (const Command& command : commands) {
    words += "    " + quoted(command.line.command, "zsh") + ")\n      words_here=(";
    for (const FlagLine& line : command.commands)
      words += "\n        " + described(last_word(line.command), line.description);
    for (const FlagLine& line : command.positionals) {
      for (const std::string& word : split(line.words, ','))
        words += "\n        " + described(word, "");
    }
    words += ")\n      flags=(";
    for (const FlagLine& line : command.flags) {
      std::string names;
      for (const std::string& name : split(line.names, ',')) {
        words += "\n        " + described(name, line.description);
        names += (names.empty() ? "" : " | ") + quoted(command.line.command + " " + name, "zsh");
      }
      if (line.max_values == 0) continue;
      values += "    " + names + ") left=" + std::to_string(line.max_values) +
                " kind=" + kind_of(line) + " value_words=(" + replaced(line.words, ",", " ") +
                ") ;;\n";
    }
    words += ")\n";
    if (std::ranges::any_of(command.positionals, is_path)) words += "      kind=file\n";
    words += "      ;;\n";
  }
  return words + "  esac\n}\n" + values + "  esac\n}\n";
}

std::string fish_tables(const std::vector<Command>& commands) {
  const auto at = [](const std::string& command) {
    return "complete -c cohort -n " + quoted("__cohort_at " + command, "fish");
  };
  const auto about = [](const std::string& text) {
    return text.empty() ? "" : " -d " + quoted(text, "fish");
  };
  std::string text = "set -g __cohort_commands";
  for (const Command& command : commands)
    text +=
        " " +
        quoted((parent_of(command.line.command).empty() ? " " : "") + command.line.command, "fish");
  text += "\n";
  for (const Command& command : commands) {
    const std::string here = at(command.line.command);
    for (const FlagLine& line : command.commands)
      text += here + " -a " + last_word(line.command) + about(line.description) + "\n";
    for (const FlagLine& line : command.positionals) {
      text += here +
              (is_path(line) ? " -F" : " -a " + quoted(replaced(line.words, ",", " "), "fish")) +
              "\n";
    }
    for (const FlagLine& line : command.flags) {
      text += here;
      for (const std::string& name : split(line.names, ','))
        text += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      const std::string kind = kind_of(line);
      if (line.max_values > 0) {
        text += kind == "file"     ? " -r -F"
                : kind == "folder" ? " -x -a '(__fish_complete_directories)'"
                                   : " -x";
        if (kind == "words") text += " -a " + quoted(replaced(line.words, ",", " "), "fish");
      }
      text += about(line.description) + "\n";
    }
  }
  return text;
}

}  // namespace

std::string completion_script(const std::string& shell, const std::vector<FlagLine>& lines) {
  const std::vector<Command> commands = commands_of(lines);
  const std::string title =
      "# Completes cohort's command line. Made by `cohort completion " + shell + "`.\n";
  if (shell == "bash") return title + bash_tables(commands) + kBash;
  if (shell == "zsh") return "#compdef cohort\n" + title + zsh_tables(commands) + kZsh;
  if (shell == "fish") return title + kFish + fish_tables(commands);
  throw ConfigError("cohort completion " + shell + ": expected bash, zsh or fish");
}

std::vector<FlagLine> flags_of_program(const std::filesystem::path& program) {
  const std::string command =
      "exec " + quoted(program.string(), "sh") + " " + kListFlags + " </dev/null 2>/dev/null";
  // The parent process may have left it ignored: then the program's exit code is lost.
  std::signal(SIGCHLD, SIG_DFL);
  std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(command.c_str(), "r"), ::pclose);
  std::string text;
  std::array<char, 4096> buffer{};
  while (pipe != nullptr) {
    const size_t count = std::fread(buffer.data(), 1, buffer.size(), pipe.get());
    if (count == 0) break;
    text.append(buffer.data(), count);
  }
  // 126 and 127 are the shell's and the loader's codes, not those of a program that knows no such
  // word.
  const int status = pipe == nullptr ? -1 : ::pclose(pipe.release());
  if (!WIFEXITED(status) || WEXITSTATUS(status) == 126 || WEXITSTATUS(status) == 127)
    throw ConfigError(
        program.string() +
        ": expected a program that starts and tells its flags; run it to see why not");
  std::vector<FlagLine> lines;
  for (const std::string& line : split(text, '\n')) {
    if (const auto parsed = parse_flag_line(line)) lines.push_back(*parsed);
  }
  return lines;
}

}  // namespace cohort::cli
