// The dispatcher: `cohort run` is built in, `cohort NAME` executes `cohort-NAME` beside it.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <unistd.h>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/launch/launcher.h"

namespace {

namespace fs = std::filesystem;
using cohort::launch::RunOptions;
using cohort::launch::Tee;

// Flags end at the first word that is none, or at "--"; the rest is the program's.
int run_command(int argc, char** argv) {
  RunOptions options;
  double grace_seconds = 5;
  std::string tee = "rank0";
  CLI::App app("Starts one worker per rank, watches them, and leaves nothing behind.",
               "cohort run");
  app.footer("PROGRAM and its arguments follow: cohort run --nproc-per-node 4 -- ./train --lr 0.1");
  app.prefix_command();
  app.add_option("--nproc-per-node", options.nproc_per_node, "Workers on this node")
      ->capture_default_str();
  app.add_option("--nnodes", options.nnodes, "Nodes of the job")->capture_default_str();
  app.add_option("--node-rank", options.node_rank, "This node's number, from 0")
      ->capture_default_str();
  app.add_option("--master-addr", options.master_addr,
                 "Node 0's address (one node: 127.0.0.1; several: required)");
  app.add_option("--master-port", options.master_port,
                 "Port of the store on node 0 (one node: a free one; several: required)");
  app.add_option("--log-dir", options.log_dir,
                 "Folder of the workers' logs (default: a fresh one, kept only after a failure)");
  app.add_option("--tee", tee, "Whose output also goes to the terminal: rank0, all or none")
      ->capture_default_str()
      ->check(CLI::IsMember({"rank0", "all", "none"}).description(""));
  app.add_option("--grace", grace_seconds,
                 "Seconds that the other workers have to leave after one failed")
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    throw cohort::ConfigError(error.what());
  }
  options.command = app.remaining();
  if (!options.command.empty() && options.command.front() == "--") {
    options.command.erase(options.command.begin());
  } else if (!options.command.empty() && options.command.front().starts_with("-")) {
    throw cohort::ConfigError(options.command.front() + ": expected a flag of `cohort run --help`");
  }
  if (!(grace_seconds >= 0 && grace_seconds <= 86400)) {
    throw cohort::ConfigError("--grace: expected seconds from 0 to 86400, got " +
                              std::to_string(grace_seconds));
  }
  options.tee = tee == "all" ? Tee::kAll : tee == "none" ? Tee::kNone : Tee::kRank0;
  options.grace = std::chrono::milliseconds(std::llround(grace_seconds * 1000));
  return cohort::launch::run(options);
}

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
