// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/tcp.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

namespace cohort {

using Clock = std::chrono::steady_clock;

namespace {

// `host`: a number. Returns nothing, with errno set, if it cannot be bound.
Fd bind_to(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    errno = EINVAL;
    return Fd();
  }
  const Addresses address(found, &::freeaddrinfo);
  Fd fd(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return fd;
  // A port whose old connections linger may be taken; one that somebody listens on may not.
  const int yes = 1, no = 0;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (found->ai_family == AF_INET6)
    ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
  if (::bind(fd.get(), found->ai_addr, found->ai_addrlen) == 0 &&
      ::listen(fd.get(), SOMAXCONN) == 0)
    return fd;
  const int error = errno;
  fd.reset();
  errno = error;
  return fd;
}

}  // namespace

bool is_loopback(const std::string& host) {
  return host == "localhost" || host.starts_with("127.") || host == "::1" ||
         host.starts_with("::ffff:127.");
}

Fd listen_on(int port, const std::string& host, int& error) {
  const bool loopback = is_loopback(host);
  Fd fd = bind_to(!loopback ? "::" : host == "localhost" ? "127.0.0.1" : host, port);
  const bool no_ipv6 = !fd && (errno == EAFNOSUPPORT || errno == EADDRNOTAVAIL);
  if (no_ipv6 && !loopback) fd = bind_to("0.0.0.0", port);
  error = fd ? 0 : errno;
  return fd;
}

int port_of(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

Addresses resolve(const std::string& host, int port, int type, int& error) {
  addrinfo hints{};
  hints.ai_socktype = type;
  addrinfo* found = nullptr;
  error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  return {found, &::freeaddrinfo};
}

bool is_ready(const Fd& socket, short event, Clock::time_point deadline, const Fd* interrupt) {
  std::array<pollfd, 2> polls{
      {{socket.get(), event, 0}, {interrupt ? interrupt->get() : -1, POLLIN, 0}}};
  int count = 0;
  do {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    count = ::poll(polls.data(), polls.size(),
                   static_cast<int>(std::clamp<int64_t>(left, 0, 1'000'000'000)));
  } while (count < 0 && errno == EINTR);
  return polls[0].revents != 0;
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
