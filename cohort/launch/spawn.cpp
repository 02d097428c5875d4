// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/spawn.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdlib.h>
#include <unistd.h>
#include <utility>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/launch/launcher.h"

namespace at {
// libtorch's function, for this thread and those that it starts; null in a program without libtorch.
[[gnu::weak]] void set_num_threads(int threads);
}  // namespace at

namespace cohort::launch {
namespace {

// Holds the pid of the launching process, so that it means nothing to grandchildren.
constexpr const char* kSpawnedVariable = "COHORT_SPAWNED_BY";

std::vector<std::string> own_command() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  if (words.empty()) throw ConfigError("spawn: expected /proc/self/cmdline to hold this program");
  words.front() = std::filesystem::read_symlink("/proc/self/exe").string();
  return words;
}

void require_single_thread() {
  const std::filesystem::directory_iterator threads("/proc/self/task");
  const auto count = std::distance(begin(threads), end(threads));
  if (count != 1) {
    throw ConfigError("spawn: expected to be called before the program starts threads, got " +
                      std::to_string(count) + " threads");
  }
}

// `function`: empty where workers execute the program again.
int start(RunOptions options, const WorkerFunction& function) {
  if (is_spawned()) {
    throw ConfigError("spawn: expected a process that is no worker, ask is_spawned() first");
  }
  if (!options.command.empty()) throw ConfigError("spawn: expected no command, got one");
  require_single_thread();
  options.command = own_command();
  options.program_name = std::filesystem::path(options.command.front()).filename().string();
  ::setenv(kSpawnedVariable, std::to_string(::getpid()).c_str(), 1);
  const bool chooses_threads = !env_string("OMP_NUM_THREADS");
  const WorkerFunction reported = [&](int local_rank) {
    return run_program(options.program_name, [&] {
      // OpenMP read the variable when this program began; the launcher has computed it since.
      if (chooses_threads && at::set_num_threads != nullptr)
        at::set_num_threads(static_cast<int>(env_int("OMP_NUM_THREADS").value_or(1)));
      return function(local_rank);
    });
  };
  const int code = run(options, function ? reported : WorkerFunction());
  ::unsetenv(kSpawnedVariable);
  return code;
}

}  // namespace

bool is_spawned() {
  return env_string(kSpawnedVariable) == std::to_string(::getppid());
}

int spawn(RunOptions options) {
  return start(std::move(options), {});
}

int spawn(const WorkerFunction& function, int nprocs, RunOptions options) {
  if (!function) throw ConfigError("spawn: expected a function, got an empty one");
  options.nproc_per_node = nprocs;
  return start(std::move(options), function);
}

}  // namespace cohort::launch
