// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/log_directory.h"

#include <cerrno>
#include <charconv>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <optional>
#include <stdlib.h>
#include <string_view>
#include <sys/file.h>
#include <system_error>
#include <unistd.h>
#include <vector>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/launch/environment.h"

namespace cohort::launch {
namespace {

// The rank that has the file called `name` among the logs of `folder`.
std::optional<int> rank_of(const std::string& folder, const std::string& name) {
  constexpr std::string_view kPrefix = "rank";
  if (!name.starts_with(kPrefix)) return {};
  int rank = 0;
  std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), rank);
  const std::string path = folder + "/" + name;
  for (const std::string& file :
       {log_file(folder, rank, "stdout"), log_file(folder, rank, "stderr"),
        error_file(folder, rank), trace_file(folder, rank), stack_file(folder, rank)}) {
    if (path == file) return rank;
  }
  return {};
}

}  // namespace

LogDirectory::LogDirectory(const std::string& requested, LogSharing sharing) {
  if (!requested.empty()) {
    std::error_code error, ignored;
    std::filesystem::create_directories(requested, error);
    if (!std::filesystem::is_directory(requested, ignored)) {
      throw ConfigError("--log-dir " + requested + ": expected a folder that can be made, got " +
                        (error ? error.message() : "a file"));
    }
    path_ = std::filesystem::canonical(requested, error).string();
    if (error) {
      throw ConfigError("--log-dir " + requested + ": expected a folder that can be reached, got " +
                        error.message());
    }
    lock(sharing);
    return;
  }
  std::string name = env_string("TMPDIR").value_or("/tmp") + "/cohort-XXXXXX";
  if (::mkdtemp(name.data()) == nullptr) {
    throw ConfigError(name + ": expected TMPDIR to be a folder that can be written, got " +
                      std::strerror(errno));
  }
  std::error_code error;
  path_ = std::filesystem::canonical(name, error).string();
  if (error) {
    ::rmdir(name.c_str());
    throw ConfigError(name + ": expected TMPDIR to be a folder that can be reached, got " +
                      error.message());
  }
  temporary_ = true;
}

LogDirectory::~LogDirectory() {
  std::error_code ignored;
  if (temporary_) std::filesystem::remove_all(path_, ignored);
}

void LogDirectory::remove_ranks_from(int rank) const {
  std::vector<std::filesystem::path> left_over;
  for (const auto& entry : std::filesystem::directory_iterator(path_)) {
    const auto of = rank_of(path_, entry.path().filename().string());
    if (of && *of >= rank && !entry.is_directory()) left_over.push_back(entry.path());
  }
  for (const auto& file : left_over) {
    std::error_code error;
    std::filesystem::remove(file, error);
    if (error)
      throw ConfigError(file.string() +
                        ": cannot remove an earlier job's file: " + error.message());
  }
}

// On the folder itself, so that no file of its own lies among the logs.
void LogDirectory::lock(LogSharing sharing) {
  lock_ = Fd(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const int kind = sharing == LogSharing::kOneLauncher ? LOCK_EX : LOCK_SH;
  if (::flock(lock_.get(), kind | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    throw ConfigError(
        "--log-dir " + path_ +
        ": expected a folder without a running job, got that of another `cohort run`; "
        "give each job a folder of its own");
  }
}

}  // namespace cohort::launch
