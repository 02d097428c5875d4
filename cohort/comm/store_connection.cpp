#include "cohort/comm/store_connection.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <map>
#include <mutex>
#include <poll.h>
#include <random>
#include <sys/socket.h>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStoreBackend.hpp>
#include <unistd.h>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/tcp.h"
#include "cohort/comm/listen.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// What c10d's client sends first, and what its store answers with the number.
struct [[gnu::packed]] Validation {
  c10d::detail::QueryType query = c10d::detail::QueryType::VALIDATE;
  uint32_t magic = c10d::detail::validationMagicNumber;
};
struct [[gnu::packed]] Ping {
  c10d::detail::QueryType query = c10d::detail::QueryType::PING;
  uint32_t number = std::random_device()();
};

// Held while a connection to a store is made: another thread that looks for its own by the port
// must not take this one.
std::mutex& connecting() {
  static std::mutex mutex;
  return mutex;
}

std::string text_of(int error) {
  return std::strerror(error);
}

}  // namespace

std::string meeting_point(const Place& place) {
  return place.store_file.empty() ? place.master_addr + ":" + std::to_string(place.master_port)
                                  : place.store_file;
}

std::string ping(const Fd& connection, const Place& place, Deadline deadline) {
  const Ping question;
  uint32_t answer = 0;
  if (send(connection.get(), &question, sizeof question, MSG_NOSIGNAL) < 0) return text_of(errno);
  if (!is_ready(connection, POLLIN, deadline)) return "the port is open, but silent";
  const ssize_t count = recv(connection.get(), &answer, sizeof answer, 0);
  if (count < 0) return text_of(errno);
  if (count == 0) return "the connection was closed";
  if (count == sizeof answer && answer == question.number) return "";
  throw ConfigError("MASTER_ADDR and MASTER_PORT: what answers at " + meeting_point(place) +
                    " is no store");
}

namespace {

// Connects to the store of `place` at one of its addresses. Returns why none answers there; nothing
// if one does.
std::string try_address(const addrinfo& address, const Place& place, Deadline deadline,
                        Fd& connection) {
  // Another address, or another try, may do better than a host that drops what it gets.
  const auto limit = std::min(deadline, Clock::now() + std::chrono::seconds(3));
  const int error = [&] {
    const std::lock_guard lock(connecting());
    return connect_to(address, limit, connection);
  }();
  if (error != 0) return text_of(error);
  const Validation validation;
  if (send(connection.get(), &validation, sizeof validation, MSG_NOSIGNAL | MSG_MORE) < 0)
    return text_of(errno);
  // A launcher listens long before rank 0 does: silence is no reason to leave.
  return ping(connection, place, deadline);
}

bool is_host(const Place& place) {
  return place.rank == 0 && !place.agent_store;
}

}  // namespace

// c10d's client would wait, too, but up to three times as long as it is told, with a page on stderr
// for every try.
Fd await_store(const Place& place, Deadline deadline) {
  if (is_host(place) || !place.store_file.empty()) return {};
  const Addresses addresses = resolve_master(place.master_addr, place.master_port, SOCK_STREAM);
  Fd connection;
  std::string reason;
  for (milliseconds pause{10};; pause = std::min(pause * 2, milliseconds(500))) {
    for (const addrinfo* address = addresses.get(); address != nullptr;
         address = address->ai_next) {
      reason = try_address(*address, place, deadline, connection);
      if (reason.empty()) return connection;
    }
    if (Clock::now() >= deadline)
      C10_THROW_ERROR(DistNetworkError, "nobody answers there: " + reason);
    std::this_thread::sleep_until(std::min(deadline, Clock::now() + pause));
  }
}

namespace {

// Bound here or by the launcher: no port is ever raced for. Programs that this one starts do not
// inherit it, so that the port is free once this process has ended.
int listening_socket(const Place& place) {
  if (!place.store_fd) return listen_on(place.master_port, place.master_addr);
  const int fd = *place.store_fd;
  if (port_of(fd) != place.master_port) {
    throw ConfigError("COHORT_STORE_FD listens on port " + std::to_string(port_of(fd)) +
                      ": expected MASTER_PORT=" + std::to_string(place.master_port));
  }
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  return fd;
}

// How the store's host reaches itself: a network may not lead to its name from within.
std::string own_address(const Place& place) {
  return is_loopback(place.master_addr) ? place.master_addr : "localhost";
}

c10d::TCPStoreOptions store_options(const Place& place, Deadline deadline) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(place.master_port);
  options.timeout = std::max(std::chrono::ceil<milliseconds>(deadline - Clock::now()), kAnswerTime);
  options.waitWorkers = false;
  options.numWorkers = static_cast<size_t>(place.world_size);
  return options;
}

void serve_store(const Place& place, Deadline deadline) {
  static std::mutex mutex;
  // By port; never destroyed, for other threads may still use them when the process ends.
  static auto& served = *new std::map<int, StorePtr>;
  const std::lock_guard lock(mutex);
  if (served.contains(place.master_port)) return;
  c10d::TCPStoreOptions options = store_options(place, deadline);
  options.isServer = true;
  options.masterListenFd = listening_socket(place);
  served[place.master_port] = c10::make_intrusive<c10d::TCPStore>(own_address(place), options);
}

StorePtr connect_tcp(const Place& place, Deadline deadline) {
  StorePtr store = c10::make_intrusive<c10d::TCPStore>(
      is_host(place) ? own_address(place) : place.master_addr, store_options(place, deadline));
  if (!place.agent_store) return store;
  // torchrun's agents keep one store over all restarts.
  const auto attempt = env_int("TORCHELASTIC_RESTART_COUNT", 0).value_or(0);
  return c10::make_intrusive<c10d::PrefixStore>("/worker/attempt_" + std::to_string(attempt),
                                                store);
}

// Keeps the file until this process ends. Between two groups that follow each other nobody may have
// it open on any rank: the last rank of the first group would remove it while the second one meets.
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

StoreConnection connect(const Place& place, Deadline deadline) {
  if (place.store_file.empty()) {
    if (is_host(place)) serve_store(place, deadline);
    const std::lock_guard lock(connecting());
    const Connections before = Connections::to_port(place.master_port);
    StoreConnection made{connect_tcp(place, deadline), {}};
    made.sockets = Connections::to_port(place.master_port);
    made.sockets.remove(before);
    return made;
  }
  check_file(place.store_file);
  // With no number of connections to expect, the last one to close removes the file; with a number
  // two that close at once may each take the other for the last.
  keep_file(place.store_file);
  return {c10::make_intrusive<c10d::FileStore>(place.store_file, 0), {}};
}

}  // namespace

StoreConnection connect_store(const Place& place, Deadline deadline) {
  StoreConnection made = connect(place, deadline);
  const std::string prefix = place.job.empty() ? "cohort" : "cohort/" + place.job;
  made.store = c10::make_intrusive<c10d::PrefixStore>(prefix, made.store);
  return made;
}

}  // namespace cohort::comm
