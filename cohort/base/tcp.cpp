#include "cohort/base/tcp.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <poll.h>
#include <sys/socket.h>

namespace cohort {

using Clock = std::chrono::steady_clock;

Addresses resolve(const std::string& host, int port, int type, int& error) {
  addrinfo hints{};
  hints.ai_socktype = type;
  addrinfo* found = nullptr;
  error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  return {found, &::freeaddrinfo};
}

bool is_ready(const Fd& socket, short event, Clock::time_point deadline) {
  pollfd wait{socket.get(), event, 0};
  int count = 0;
  do {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    count = ::poll(&wait, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 1'000'000'000)));
  } while (count < 0 && errno == EINTR);
  return count > 0;
}

bool would_block() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

int connect_to(const addrinfo& address, Clock::time_point deadline, Fd& connection) {
  connection = Fd(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!connection) return errno;
  if (::connect(connection.get(), address.ai_addr, address.ai_addrlen) != 0 &&
      errno != EINPROGRESS) {
    return errno;
  }
  if (!is_ready(connection, POLLOUT, deadline)) return ETIMEDOUT;
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(connection.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

}  // namespace cohort
