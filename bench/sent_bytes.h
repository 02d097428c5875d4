// SPDX-License-Identifier: Apache-2.0
// What this process has sent over TCP.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

namespace cohort::bench {

/// `name`: getsockname or getpeername. 0 if the socket has no such name.
inline int port_of(int fd, int (*name)(int, sockaddr*, socklen_t*)) {
  sockaddr_in6 address{};  // IPv4 has its port in the same place
  socklen_t length = sizeof address;
  if (name(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  return ntohs(address.sin6_port);
}

/// Bytes of data, without headers, that were handed to the TCP connections which are open now: each
/// once, whether it has left yet, still waits for the peer's window, or had to be sent again. What
/// went over a connection that has been closed since, by either side, is not in it. Nor are those
/// from or to `except_port`: a group's rank_info().master_port leaves out its store's.
inline int64_t tcp_bytes_sent(int except_port = 0) {
  int64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::atoi(entry.path().filename().c_str());
    tcp_info info{};
    socklen_t length = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) continue;
    if (length < offsetof(tcp_info, tcpi_bytes_retrans) + sizeof info.tcpi_bytes_retrans) continue;
    if (except_port != 0 &&
        (port_of(fd, getsockname) == except_port || port_of(fd, getpeername) == except_port))
      continue;
    bytes += static_cast<int64_t>(info.tcpi_bytes_sent - info.tcpi_bytes_retrans) +
             info.tcpi_notsent_bytes;
  }
  return bytes;
}

}  // namespace cohort::bench
