// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/endpoint.h"

#include <arpa/inet.h>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "cohort/base/error.h"
#include "cohort/base/tcp.h"
#include "cohort/launch/to_int.h"

namespace cohort::launch {
namespace {

constexpr std::chrono::milliseconds kConnectTime{200};

void set_option(int fd, int level, int name, int value) {
  ::setsockopt(fd, level, name, &value, sizeof(value));
}

bool is_loopback(const addrinfo& address) {
  if (address.ai_family == AF_INET) {
    const auto* ipv4 = reinterpret_cast<const sockaddr_in*>(address.ai_addr);
    return (ntohl(ipv4->sin_addr.s_addr) >> 24) == 127;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address.ai_addr)->sin6_addr);
}

// Turns an address into that of all interfaces.
void widen(addrinfo& address) {
  if (address.ai_family == AF_INET) {
    reinterpret_cast<sockaddr_in*>(address.ai_addr)->sin_addr.s_addr = htonl(INADDR_ANY);
  } else {
    reinterpret_cast<sockaddr_in6*>(address.ai_addr)->sin6_addr = in6addr_any;
  }
}

}  // namespace

Endpoint parse_endpoint(const std::string& text) {
  const bool bracketed = text.starts_with("[");
  const size_t host_end = bracketed ? text.find(']') : std::min(text.rfind(':'), text.size());
  const size_t first = bracketed ? 1 : 0;
  Endpoint endpoint;
  bool good = host_end != std::string::npos && host_end > first;
  if (good) {
    endpoint.host = text.substr(first, host_end - first);
    const size_t colon = bracketed ? host_end + 1 : host_end;
    if (colon < text.size()) {
      endpoint.port = to_int(std::string_view(text).substr(colon + 1)).value_or(0);
      good = text[colon] == ':' && endpoint.port > 0 && endpoint.port <= 65535;
    }
  }
  if (!bracketed && endpoint.host.find(':') != std::string::npos)
    throw ConfigError("--rdzv-endpoint: expected [ADDRESS]:PORT for IPv6, got " + text);
  if (!good)
    throw ConfigError("--rdzv-endpoint: expected host:port with a port from 1 to 65535, got " +
                      text);
  return endpoint;
}

std::optional<Fd> listen_if_local(const Endpoint& endpoint) {
  int error = 0;
  const Addresses addresses = resolve(endpoint.host, endpoint.port, SOCK_STREAM, error);
  if (error != 0) {
    throw ConfigError("--rdzv-endpoint " + endpoint.text() +
                      ": expected a host that resolves, got " + ::gai_strerror(error));
  }
  for (addrinfo* address = addresses.get(); address; address = address->ai_next) {
    Fd fd(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) continue;
    set_option(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
    if (is_loopback(*address) && !cohort::is_loopback(endpoint.host)) widen(*address);
    if (::bind(fd.get(), address->ai_addr, address->ai_addrlen) == 0 &&
        ::listen(fd.get(), SOMAXCONN) == 0) {
      return fd;
    }
    if (errno == EACCES) {
      throw ConfigError("--rdzv-endpoint " + endpoint.text() + ": expected a port that can be " +
                        "listened on, got " + std::strerror(errno));
    }
  }
  return std::nullopt;
}

Fd try_to_connect(const Endpoint& endpoint, int& error) {
  int lookup_error = 0;
  const Addresses addresses = resolve(endpoint.host, endpoint.port, SOCK_STREAM, lookup_error);
  error = EHOSTUNREACH;
  for (const addrinfo* address = addresses.get(); address; address = address->ai_next) {
    Fd fd;
    error = connect_to(*address, std::chrono::steady_clock::now() + kConnectTime, fd);
    if (error != 0) continue;
    set_option(fd.get(), IPPROTO_TCP, TCP_NODELAY, 1);
    return fd;
  }
  return Fd();
}

}  // namespace cohort::launch
