// SPDX-License-Identifier: Apache-2.0
// The dispatcher: `cohort run` and `cohort completion` are built in, `cohort NAME` executes
// `cohort-NAME` beside it.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <unistd.h>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/cli/parse.h"

#include "apps/completion.h"
#include "apps/run_command.h"

namespace {

namespace fs = std::filesystem;

// The programs that a whole build makes beside this one.
struct Command {
  const char *name, *arguments, *text;
};
constexpr Command kCommands[] = {
    {"nmt", " COMMAND ...", "trains a translator and translates with it"},
    {"ps", " COMMAND ...", "runs and queries parameter servers"},
    {"checkpoint", " COMMAND ...", "inspects, verifies and merges checkpoints"},
    {"doctor", "", "reports the hardware and what a model needs"},
    {"bench", " COMMAND ...", "measures this machine and network"}};

fs::path own_folder() {
  return fs::read_symlink("/proc/self/exe").parent_path();
}

// Every cohort-NAME beside this program.
std::vector<std::string> commands_beside() {
  const std::string prefix = "cohort-";
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(own_folder())) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(prefix) && ::access(entry.path().c_str(), X_OK) == 0) {
      names.push_back(name.substr(prefix.size()));
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

// The commands that exist.
std::vector<std::string> known_commands() {
  std::vector<std::string> names = commands_beside();
  names.insert(names.begin(), "run");
  names.push_back("completion");
  return names;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

int execute_beside(const std::string& command, char** argv) {
  const auto known = known_commands();
  if (std::find(known.begin(), known.end(), command) == known.end()) {
    for (const Command& other : kCommands) {
      if (command == other.name)
        throw cohort::ConfigError("cohort " + command + ": expected " +
                                  (own_folder() / ("cohort-" + command)).string() +
                                  ", got no such program; build it with scripts/build");
    }
    throw cohort::ConfigError(
        (command.empty() ? "no command" : "unknown command '" + command + "'") +
        ": expected one of " + joined(known) + ", --help, --version");
  }
  const std::string path = (own_folder() / ("cohort-" + command)).string();
  ::execv(path.c_str(), argv);
  throw std::system_error(errno, std::generic_category(), path);
}

int print_help() {
  std::printf(
      "Distributed training for libtorch.\n\n"
      "Usage: cohort COMMAND [FLAGS]\n\n"
      "Commands:\n"
      "  cohort run --nproc-per-node N -- PROGRAM ...   starts a program on N ranks\n");
  const auto known = commands_beside();
  for (const Command& command : kCommands) {
    if (std::find(known.begin(), known.end(), command.name) == known.end()) continue;
    const std::string usage = std::string("cohort ") + command.name + command.arguments;
    std::printf("  %-45s  %s\n", usage.c_str(), command.text);
  }
  std::printf(
      "  cohort completion bash                         prints a shell completion script\n\n"
      "  cohort COMMAND --help                          prints a command's help\n"
      "  cohort --version                               prints the version\n");
  return cohort::kExitOk;
}

int print_completion(int argc, char** argv) {
  std::string shell;
  CLI::App app("Prints a shell script that completes cohort's commands, flags and their values",
               "cohort completion");
  app.add_option("shell", shell, "Your shell")
      ->required()
      ->check(cohort::cli::one_of({"bash", "zsh", "fish"}));
  app.footer(
      "bash: add `source <(cohort completion bash)` to ~/.bashrc; zsh: the same with zsh to "
      "~/.zshrc, behind compinit; fish: cohort completion fish > "
      "~/.config/fish/completions/cohort.fish");
  if (const auto ended = cohort::cli::parse(app, argc, argv)) return *ended;
  std::vector<cohort::cli::FlagLine> lines{{.kind = "command"}};
  const auto add = [&lines](const std::vector<cohort::cli::FlagLine>& more) {
    lines.insert(lines.end(), more.begin(), more.end());
  };
  add(flags_of_run());
  lines.push_back({.kind = "positional", .command = "run", .value = cohort::kFile});
  for (const std::string& name : commands_beside())
    add(cohort::cli::flags_of_program(own_folder() / ("cohort-" + name)));
  add(cohort::cli::list_flags(app));
  std::printf("%s", cohort::cli::completion_script(shell, lines).c_str());
  return cohort::kExitOk;
}

int dispatch(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  if (command == "--help" || command == "-h" || command == "help") return print_help();
  if (command == "--version") {
    std::printf("cohort %s\n", COHORT_VERSION);
    return cohort::kExitOk;
  }
  if (command == "run") return run_command(argc - 1, argv + 1);
  if (command == "completion") return print_completion(argc - 1, argv + 1);
  return execute_beside(command, argv + 1);
}

}  // namespace

int main(int argc, char** argv) {
  const bool runs = argc > 1 && std::strcmp(argv[1], "run") == 0;
  return cohort::run_program(runs ? "cohort run" : "cohort", [&] { return dispatch(argc, argv); });
}
