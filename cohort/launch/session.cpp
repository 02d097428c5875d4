// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/session.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <signal.h>
#include <unistd.h>

namespace cohort::launch {
namespace {

namespace fs = std::filesystem;

// /proc only says which numbers to ask the kernel for: where it shows another pid namespace, the
// answers are still about this one. A session led from outside of the namespace has number 0.
std::set<pid_t> groups_of(std::span<const pid_t> leaders) {
  std::set<pid_t> groups;
  for (const pid_t leader : leaders) {
    if (leader > 0) groups.insert(leader);
  }
  std::error_code ignored;
  for (fs::directory_iterator entry("/proc", ignored), end; entry != end;
       entry.increment(ignored)) {
    const pid_t pid = std::atoi(entry->path().filename().c_str());
    const pid_t session = pid > 0 ? ::getsid(pid) : 0;
    if (session <= 0 || std::find(leaders.begin(), leaders.end(), session) == leaders.end()) {
      continue;
    }
    if (const pid_t group = ::getpgid(pid); group > 0) groups.insert(group);
  }
  return groups;
}

}  // namespace

void signal_sessions(std::span<const pid_t> leaders, int signal) {
  for (const pid_t group : groups_of(leaders)) ::kill(-group, signal);
}

void kill_sessions(std::span<const pid_t> leaders) {
  std::set<pid_t> told;
  for (auto groups = groups_of(leaders);
       !std::includes(told.begin(), told.end(), groups.begin(), groups.end());
       groups = groups_of(leaders)) {
    for (const pid_t group : groups) ::kill(-group, SIGKILL);
    told.merge(groups);
  }
}

}  // namespace cohort::launch
