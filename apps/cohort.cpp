// The dispatcher: `cohort run` is built in, `cohort NAME` executes `cohort-NAME` beside it.
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

#include "apps/run_command.h"

namespace {

namespace fs = std::filesystem;

fs::path own_folder() {
  return fs::read_symlink("/proc/self/exe").parent_path();
}

// The commands that exist: "run" and every cohort-NAME beside this program.
std::vector<std::string> known_commands() {
  const std::string prefix = "cohort-";
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(own_folder())) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(prefix) && ::access(entry.path().c_str(), X_OK) == 0) {
      names.push_back(name.substr(prefix.size()));
    }
  }
  std::sort(names.begin(), names.end());
  names.insert(names.begin(), "run");
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
    throw cohort::ConfigError("unknown command '" + command + "': expected one of " +
                              joined(known) + ", --help, --version");
  }
  const std::string path = (own_folder() / ("cohort-" + command)).string();
  ::execv(path.c_str(), argv);
  throw std::system_error(errno, std::generic_category(), path);
}

int print_help() {
  std::printf(
      "Usage: cohort COMMAND [ARGUMENTS]\n\n"
      "  cohort run --nproc-per-node N -- PROGRAM ...   starts a program on N ranks\n"
      "  cohort COMMAND --help                          says more\n\n"
      "Commands: %s\n",
      joined(known_commands()).c_str());
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
  return execute_beside(command, argv + 1);
}

}  // namespace

int main(int argc, char** argv) {
  const bool runs = argc > 1 && std::strcmp(argv[1], "run") == 0;
  return cohort::run_program(runs ? "cohort run" : "cohort", [&] { return dispatch(argc, argv); });
}
