// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/store_connection.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <unistd.h>
#include <utility>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/comm/agent_store.h"
#include "cohort/comm/listen.h"
#include "cohort/comm/store_server.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;

std::string job_secret() {
  return env_string("COHORT_JOB_SECRET").value_or("");
}

// Bound here or by the launcher: no port is ever raced for.
Fd listening_socket(const RankInfo& info) {
  if (!info.store_fd) return Fd(listen_on(info.master_port, info.master_addr));
  const int fd = *info.store_fd;
  if (::fcntl(fd, F_GETFD) < 0) {
    throw ConfigError(
        "COHORT_STORE_FD=" + std::to_string(fd) +
        ": expected the launcher's socket, got a closed descriptor: a program between "
        "the launcher and this one has closed it. Let it pass it on (in Python: "
        "pass_fds), or start this one without it");
  }
  if (port_of(fd) != info.master_port) {
    throw ConfigError(
        "COHORT_STORE_FD=" + std::to_string(fd) + ": expected a socket bound to MASTER_PORT=" +
        std::to_string(info.master_port) + ", its port is " + std::to_string(port_of(fd)));
  }
  return Fd(fd);
}

void serve_store(const RankInfo& info) {
  static std::mutex mutex;
  // By port; never destroyed, for other threads may still use them when the process ends.
  static auto& served = *new std::map<int, StoreServer>;
  const std::lock_guard lock(mutex);
  if (served.contains(info.master_port)) return;
  served.try_emplace(info.master_port, listening_socket(info),
                     StoreServerOptions{.secret = job_secret()});
}

// How the store's host reaches itself: a network may not lead to its name from within.
std::string own_address(const RankInfo& info) {
  return is_loopback(info.master_addr) ? info.master_addr : "localhost";
}

StoreConnection connect_tcp(const RankInfo& info, Deadline deadline, milliseconds timeout,
                            milliseconds silence) {
  if (info.agent_store) return connect_agent_store(info, deadline, timeout);
  if (info.rank == 0) serve_store(info);
  const auto client = c10::make_intrusive<StoreClient>(
      StoreAddress{.host = info.rank == 0 ? own_address(info) : info.master_addr,
                   .port = info.master_port,
                   .secret = job_secret()},
      deadline, timeout, silence);
  return {client, [client] { client->shut_down(); }, [client] { client->interrupt(); }};
}

// Keeps the file until this process ends. Between two groups that follow each other no rank may
// have it open: the last rank of the first group would remove it while those of the second one
// join.
void keep_file(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, c10::intrusive_ptr<c10d::FileStore>> kept;
  const std::lock_guard lock(mutex);
  auto& store = kept[path];
  if (!store || !std::filesystem::exists(path))
    store = c10::make_intrusive<c10d::FileStore>(path, 0);
}

// A file of the store's making begins with the length of its first key.
void check_file(const std::string& path) {
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0)
    throw ConfigError("--dist-url file://" + path + " cannot be opened: " + std::strerror(errno));
  uint32_t length = 1;
  const ssize_t count = read(fd, &length, sizeof length);
  ::close(fd);
  if (count != 0 && (count != sizeof length || length == 0 || length > 4096)) {
    throw ConfigError("--dist-url file://" + path +
                      ": the file holds something else; expected none, or an empty one");
  }
}

StoreConnection connect_file(const RankInfo& info) {
  check_file(info.store_file);
  // With no number of connections to expect, the last one to close removes the file; with a number
  // two that close at once may each take the other for the last.
  keep_file(info.store_file);
  return {c10::make_intrusive<c10d::FileStore>(info.store_file, 0), [] {}};
}

}  // namespace

std::string rendezvous_point(const RankInfo& info) {
  return info.store_file.empty() ? info.master_addr + ":" + std::to_string(info.master_port)
                                 : info.store_file;
}

StoreConnection connect_store(const RankInfo& info, Deadline deadline, milliseconds timeout,
                              milliseconds silence) {
  StoreConnection made =
      info.store_file.empty() ? connect_tcp(info, deadline, timeout, silence) : connect_file(info);
  const std::string prefix = info.job.empty() ? "cohort" : "cohort/" + info.job;
  made.store = c10::make_intrusive<c10d::PrefixStore>(prefix, made.store);
  made.store->setTimeout(timeout);
  return made;
}

}  // namespace cohort::comm
