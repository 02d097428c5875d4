#include "cohort/launch/store_socket.h"

#include <cerrno>
#include <cstring>
#include <netinet/in.h>
#include <string>
#include <sys/socket.h>

#include "cohort/base/error.h"

namespace cohort::launch {
namespace {

void set_option(int fd, int level, int name, int value) {
  ::setsockopt(fd, level, name, &value, sizeof(value));
}

// Returns nothing, with errno set, if the address cannot be bound.
Fd bind_to(const sockaddr* address, socklen_t length) {
  Fd fd(::socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return fd;
  // A port whose old connections linger may be taken; one that somebody listens on may not.
  set_option(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (address->sa_family == AF_INET6) set_option(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (::bind(fd.get(), address, length) == 0 && ::listen(fd.get(), SOMAXCONN) == 0) return fd;
  const int error = errno;
  fd.reset();
  errno = error;
  return fd;
}

Fd bind_ipv6(int port) {
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_port = htons(static_cast<uint16_t>(port));
  address.sin6_addr = in6addr_any;
  return bind_to(reinterpret_cast<const sockaddr*>(&address), sizeof(address));
}

Fd bind_ipv4(Reach reach, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(reach == Reach::kLoopback ? INADDR_LOOPBACK : INADDR_ANY);
  return bind_to(reinterpret_cast<const sockaddr*>(&address), sizeof(address));
}

int port_of(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  const bool ipv6 = address.ss_family == AF_INET6;
  return ntohs(ipv6 ? reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port
                    : reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

}  // namespace

StoreSocket listen_for_store(Reach reach, int port) {
  Fd fd;
  if (reach == Reach::kAllInterfaces) {
    fd = bind_ipv6(port);
    const bool no_ipv6 = !fd && (errno == EAFNOSUPPORT || errno == EADDRNOTAVAIL);
    if (no_ipv6) fd = bind_ipv4(reach, port);
  } else {
    fd = bind_ipv4(reach, port);
  }
  if (!fd) {
    throw ConfigError("--master-port " + std::to_string(port) +
                      ": expected a port that can be listened on, got " + std::strerror(errno));
  }
  const int bound = port_of(fd.get());
  return {std::move(fd), bound};
}

StoreSocket listen_again(Reach reach, int last_port, int wanted_port) {
  try {
    return listen_for_store(reach, last_port);
  } catch (const ConfigError&) {
    return listen_for_store(reach, wanted_port);
  }
}

}  // namespace cohort::launch
