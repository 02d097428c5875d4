#include "cohort/comm/listen.h"

#include <arpa/inet.h>
#include <cerrno>
#include <cstring>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cohort/base/error.h"

namespace cohort::comm {
namespace {

std::string errno_text() {
  return std::strerror(errno);
}

}  // namespace

int listen_on(int port) {
  const int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool v6 = fd >= 0;
  const int sock = v6 ? fd : socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (sock < 0) throw ConfigError("no TCP socket to listen on: " + errno_text());
  const int yes = 1;
  const int no = 0;
  setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in6 address6{};
  sockaddr_in address4{};
  const sockaddr* address = nullptr;
  socklen_t length = 0;
  if (v6) {
    setsockopt(sock, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
    address6.sin6_family = AF_INET6;
    address6.sin6_port = htons(static_cast<uint16_t>(port));
    address = reinterpret_cast<sockaddr*>(&address6);
    length = sizeof address6;
  } else {
    address4.sin_family = AF_INET;
    address4.sin_port = htons(static_cast<uint16_t>(port));
    address = reinterpret_cast<sockaddr*>(&address4);
    length = sizeof address4;
  }
  if (bind(sock, address, length) != 0 || listen(sock, 2048) != 0) {
    const std::string text = errno_text();
    ::close(sock);
    throw ConfigError("port " + std::to_string(port) + " cannot be listened on: " + text);
  }
  return sock;
}

int port_of(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw ConfigError("COHORT_STORE_FD=" + std::to_string(fd) +
                      ": expected a bound socket: " + errno_text());
  }
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

std::string local_address_towards(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    throw ConfigError("MASTER_ADDR=" + host + " does not resolve: " + gai_strerror(error));
  }
  std::string result;
  for (const addrinfo* a = found; a != nullptr && result.empty(); a = a->ai_next) {
    const int fd = socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    char text[NI_MAXHOST];
    if (connect(fd, a->ai_addr, a->ai_addrlen) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0 &&
        getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text, sizeof text, nullptr, 0,
                    NI_NUMERICHOST) == 0) {
      result = text;
    }
    ::close(fd);
  }
  freeaddrinfo(found);
  if (result.empty()) throw ConfigError("MASTER_ADDR=" + host + ": no route leads there");
  return result;
}

}  // namespace cohort::comm
