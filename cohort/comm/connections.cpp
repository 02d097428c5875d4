// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/connections.h"

#include <array>
#include <cstdlib>
#include <filesystem>
#include <netdb.h>
#include <netinet/in.h>
#include <optional>
#include <sys/socket.h>
#include <sys/stat.h>

namespace cohort::comm {
namespace {

using NameFunction = int(int, sockaddr*, socklen_t*);

std::optional<int> option_of(int fd, int option) {
  int value = 0;
  socklen_t length = sizeof value;
  if (getsockopt(fd, SOL_SOCKET, option, &value, &length) != 0) return std::nullopt;
  return value;
}

bool is_tcp(int fd) {
  const auto domain = option_of(fd, SO_DOMAIN);
  return (domain == AF_INET || domain == AF_INET6) && option_of(fd, SO_TYPE) == SOCK_STREAM;
}

// Gloo's thread ends the process when its accept fails: one that listens is no connection.
bool listens(int fd) {
  return option_of(fd, SO_ACCEPTCONN) != 0;
}

// Two sockets that follow each other under one number differ in it.
uint64_t inode_of(int fd) {
  struct stat status {};
  return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

// `name`: getsockname or getpeername. Empty if the socket has none.
Endpoint endpoint_of(int fd, NameFunction* name) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (name(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&address), length, host.data(), host.size(),
                  port.data(), port.size(), NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return {};
  std::string text = host.data();
  if (const std::string mapped = "::ffff:"; text.starts_with(mapped) && text.find('.') != text.npos)
    text.erase(0, mapped.size());
  return text + ":" + port.data();
}

template <class Use>
void for_each_tcp_socket(const Use& use) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    if (is_tcp(fd)) use(fd);
  }
}

}  // namespace

Connections Connections::where(
    const std::function<bool(const Endpoint& own, const Endpoint& peer)>& belongs) {
  Connections found;
  for_each_tcp_socket([&](int fd) {
    // Another thread may close the descriptor meanwhile and open another socket with it.
    const uint64_t inode = inode_of(fd);
    if (!listens(fd) && belongs(endpoint_of(fd, ::getsockname), endpoint_of(fd, ::getpeername)) &&
        inode_of(fd) == inode)
      found.sockets_[fd] = inode;
  });
  return found;
}

Connections Connections::to_port(int port) {
  const std::string end = ":" + std::to_string(port);
  return where([&](const Endpoint&, const Endpoint& peer) { return peer.ends_with(end); });
}

void Connections::remove(const Connections& others) {
  std::erase_if(sockets_, [&](const auto& socket) {
    const auto same = others.sockets_.find(socket.first);
    return same != others.sockets_.end() && same->second == socket.second;
  });
}

void Connections::shut_down() const {
  for (const auto& [fd, inode] : sockets_) {
    if (is_tcp(fd) && !listens(fd) && inode_of(fd) == inode) ::shutdown(fd, SHUT_RDWR);
  }
}

void Connections::limit_waiting(std::chrono::milliseconds limit) const {
  const timeval value{.tv_sec = limit.count() / 1000, .tv_usec = limit.count() % 1000 * 1000};
  for (const auto& [fd, inode] : sockets_) {
    if (inode_of(fd) == inode) setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &value, sizeof value);
  }
}

std::map<int, Endpoint> listening_sockets() {
  std::map<int, Endpoint> found;
  for_each_tcp_socket([&](int fd) {
    if (listens(fd)) found[fd] = endpoint_of(fd, ::getsockname);
  });
  return found;
}

}  // namespace cohort::comm
