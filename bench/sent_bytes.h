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

/// Bytes of data, without headers, that have left over the TCP connections which are open now.
inline int64_t tcp_bytes_sent() {
  int64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::atoi(entry.path().filename().c_str());
    tcp_info info{};
    socklen_t length = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) continue;
    if (length < offsetof(tcp_info, tcpi_bytes_sent) + sizeof info.tcpi_bytes_sent) continue;
    bytes += static_cast<int64_t>(info.tcpi_bytes_sent);
  }
  return bytes;
}

}  // namespace cohort::bench
