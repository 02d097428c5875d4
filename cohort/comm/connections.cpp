#include "cohort/comm/connections.h"

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <sys/socket.h>
#include <sys/stat.h>

namespace cohort::comm {
namespace {

std::optional<int> option_of(int fd, int option) {
  int value = 0;
  socklen_t length = sizeof value;
  if (getsockopt(fd, SOL_SOCKET, option, &value, &length) != 0) return std::nullopt;
  return value;
}

// Not one that listens: Gloo's thread ends the process when its accept fails.
bool is_connection(int fd) {
  const auto domain = option_of(fd, SO_DOMAIN);
  const bool ip = domain == AF_INET || domain == AF_INET6;
  return ip && option_of(fd, SO_TYPE) == SOCK_STREAM && option_of(fd, SO_ACCEPTCONN) == 0;
}

// Two sockets that follow each other under one number differ in it.
uint64_t inode_of(int fd) {
  struct stat status {};
  return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

std::map<int, uint64_t> open_sockets() {
  std::map<int, uint64_t> sockets;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    if (is_connection(fd)) sockets[fd] = inode_of(fd);
  }
  return sockets;
}

}  // namespace

Connections::Connections() : sockets_(open_sockets()) {}

void Connections::note_new() {
  auto now = open_sockets();
  for (const auto& [fd, inode] : sockets_) {
    const auto same = now.find(fd);
    if (same != now.end() && same->second == inode) now.erase(same);
  }
  sockets_ = std::move(now);
}

void Connections::shut_down() const {
  for (const auto& [fd, inode] : sockets_) {
    if (is_connection(fd) && inode_of(fd) == inode) ::shutdown(fd, SHUT_RDWR);
  }
}

void Connections::limit_waiting(std::chrono::milliseconds limit) const {
  const timeval value{.tv_sec = limit.count() / 1000, .tv_usec = limit.count() % 1000 * 1000};
  for (const auto& [fd, inode] : sockets_) {
    if (inode_of(fd) == inode) setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &value, sizeof value);
  }
}

}  // namespace cohort::comm
