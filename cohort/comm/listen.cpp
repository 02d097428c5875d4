// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/listen.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sstream>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/fd.h"

namespace cohort::comm {

using Clock = std::chrono::steady_clock;

namespace {

// Numeric text of an IPv4 or routable IPv6 address; empty for others.
std::string numeric(const sockaddr* address) {
  if (address == nullptr) return "";
  const bool v6 = address->sa_family == AF_INET6;
  if (!v6 && address->sa_family != AF_INET) return "";
  if (v6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr))
    return "";
  char text[NI_MAXHOST];
  const socklen_t length = v6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  return getnameinfo(address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0 ? text
                                                                                          : "";
}

[[noreturn]] void no_interface(const std::string& asked, const std::string& reason) {
  std::string list;
  for (const Interface& i : usable_interfaces())
    list += (list.empty() ? "" : ", ") + i.name + " (" + i.address + ")";
  throw ConfigError(asked + ": " + reason + "; interfaces with an address are " +
                    (list.empty() ? "none" : list));
}

// NCCL's rule: prefixes; "=" before the list asks for whole names, "^" for all that do not fit.
bool fits(const std::string& rule, const std::string& name) {
  const bool exact = rule.find('=') != std::string::npos && rule.find('=') <= 1;
  const bool excludes = rule.starts_with("^");
  std::istringstream items(rule.substr(rule.find_first_not_of("^=")));
  for (std::string item; std::getline(items, item, ',');) {
    if (exact ? name == item : name.starts_with(item)) return !excludes;
  }
  return excludes;
}

}  // namespace

int listen_on(int port, const std::string& host) {
  int error = 0;
  Fd fd = cohort::listen_on(port, host, error);
  if (error == EINVAL)
    throw ConfigError("MASTER_ADDR=" + host + ": expected an address or a host's name");
  if (!fd) {
    throw ConfigError("port " + std::to_string(port) +
                      " cannot be listened on: " + std::strerror(error));
  }
  return fd.release();
}

Addresses resolve_master(const std::string& host, int port, int type, Clock::time_point deadline) {
  while (true) {
    int error = 0;
    Addresses addresses = resolve(host, port, type, error);
    if (error == 0) return addresses;
    if (Clock::now() >= deadline)
      throw ConfigError("MASTER_ADDR=" + host + " does not resolve: " + gai_strerror(error));
    std::this_thread::sleep_until(
        std::min(deadline, Clock::now() + std::chrono::milliseconds(500)));
  }
}

std::string local_address_towards(const std::string& host, int port, Clock::time_point deadline) {
  const Addresses addresses = resolve_master(host, port, SOCK_DGRAM, deadline);
  std::string result;
  for (const addrinfo* a = addresses.get(); a != nullptr && result.empty(); a = a->ai_next) {
    const Fd fd(socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!fd) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    char text[NI_MAXHOST];
    if (connect(fd.get(), a->ai_addr, a->ai_addrlen) == 0 &&
        getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &length) == 0 &&
        getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text, sizeof text, nullptr, 0,
                    NI_NUMERICHOST) == 0) {
      result = text;
    }
  }
  if (result.empty()) throw ConfigError("MASTER_ADDR=" + host + ": no route leads there");
  return result;
}

std::vector<Interface> usable_interfaces() {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return {};
  std::vector<Interface> result;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* i = all; i != nullptr; i = i->ifa_next) {
      if ((i->ifa_flags & IFF_UP) == 0 || i->ifa_addr == nullptr ||
          i->ifa_addr->sa_family != family)
        continue;
      const std::string address = numeric(i->ifa_addr);
      const bool known = std::any_of(result.begin(), result.end(),
                                     [&](const auto& r) { return r.name == i->ifa_name; });
      if (!address.empty() && !known)
        result.push_back({i->ifa_name, address, (i->ifa_flags & IFF_LOOPBACK) != 0});
    }
  }
  freeifaddrs(all);
  return result;
}

Interface find_interface(const std::string& name, const std::string& asked_by) {
  for (Interface& interface : usable_interfaces()) {
    if (interface.name == name) return interface;
  }
  no_interface(asked_by + " " + name, if_nametoindex(name.c_str()) == 0
                                          ? "there is no such interface"
                                          : "the interface has no address or is down");
}

Interface interface_of_environment() {
  if (const auto name = env_string("GLOO_SOCKET_IFNAME"))
    return find_interface(*name, "GLOO_SOCKET_IFNAME");
  const auto rule = env_string("NCCL_SOCKET_IFNAME");
  if (!rule) return {};
  if (rule->find_first_not_of("^=") == std::string::npos)
    no_interface("NCCL_SOCKET_IFNAME=" + *rule, "expected a name");
  for (Interface& interface : usable_interfaces()) {
    if (fits(*rule, interface.name)) return interface;
  }
  no_interface("NCCL_SOCKET_IFNAME=" + *rule, "no interface fits");
}

std::string first_outside_address() {
  for (const Interface& interface : usable_interfaces()) {
    if (!interface.loopback) return interface.address;
  }
  no_interface("the ranks are on several hosts", "this host has no address that others can reach");
}

}  // namespace cohort::comm
