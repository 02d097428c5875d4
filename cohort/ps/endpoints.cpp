// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/endpoints.h"

#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <netdb.h>
#include <string_view>
#include <sys/socket.h>
#include <sys/un.h>
#include <system_error>
#include <unistd.h>

#include "cohort/base/endpoint_list.h"
#include "cohort/base/error.h"
#include "cohort/base/fd.h"
#include "cohort/base/system_error.h"

namespace cohort::ps {
namespace {

constexpr std::string_view kUnix = "unix:";

[[noreturn]] void cannot_listen(const std::string& flag, int error) {
  throw ConfigError(flag + ": cannot listen there: " +
                    (error == EADDRINUSE      ? "another process does"
                     : error == EADDRNOTAVAIL ? "it is not of this host"
                                              : system_reason(error)));
}

void check_unix_socket(const std::string& flag, const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  std::error_code ignored;
  if (!folder.empty() && !std::filesystem::is_directory(folder, ignored))
    throw ConfigError(flag + ": the folder " + folder + " does not exist");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path))
    throw ConfigError(flag + ": expected a path of at most " +
                      std::to_string(sizeof(address.sun_path) - 1) + " bytes");
  path.copy(address.sun_path, path.size());
  // gRPC takes a socket's path away from the process that listens there.
  const Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (fd && ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0)
    cannot_listen(flag, EADDRINUSE);
  if (::access(folder.empty() ? "." : folder.c_str(), W_OK) != 0) cannot_listen(flag, errno);
}

int error_of_listening(const addrinfo& place) {
  const Fd fd(::socket(place.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  const bool listens =
      fd && ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
      ::bind(fd.get(), place.ai_addr, place.ai_addrlen) == 0 && ::listen(fd.get(), 1) == 0;
  return listens ? 0 : errno;
}

}  // namespace

std::optional<std::string> unix_path(const std::string& endpoint) {
  if (!endpoint.starts_with(kUnix)) return std::nullopt;
  return endpoint.substr(kUnix.size());
}

void check_can_listen(const std::string& name, const std::string& endpoint) {
  check_listening_endpoint(name, endpoint);
  const std::string flag = name + " " + endpoint;
  if (const auto path = unix_path(endpoint)) return check_unix_socket(flag, *path);
  const size_t colon = endpoint.rfind(':');
  std::string host = endpoint.substr(0, colon);
  if (host.starts_with("[")) host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int failure = ::getaddrinfo(host.c_str(), endpoint.c_str() + colon + 1, &hints, &found);
  if (failure != 0) throw ConfigError(flag + ": cannot listen there: " + ::gai_strerror(failure));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> places(found, ::freeaddrinfo);
  int error = 0;
  for (const addrinfo* place = found; place; place = place->ai_next) {
    error = error_of_listening(*place);
    if (error == 0) return;
  }
  cannot_listen(flag, error);
}

void check_listening_endpoint(const std::string& name, const std::string& text) {
  if (is_endpoint(text, 0) || is_server_endpoint(text)) return;
  throw ConfigError(name + " " + text + ": expected host:port (port 0: any) or unix:PATH");
}

bool is_loopback(const std::string& endpoint) {
  const std::string host = endpoint.starts_with('[') ? endpoint.substr(0, endpoint.find(']') + 1)
                                                     : endpoint.substr(0, endpoint.rfind(':'));
  in_addr address{};
  const bool is_number = ::inet_pton(AF_INET, host.c_str(), &address) == 1;
  return host == "[::1]" || (is_number && ntohl(address.s_addr) >> 24 == 127);
}

int index_of_endpoint(const std::string& name, const std::string& endpoint,
                      const std::vector<std::string>& endpoints) {
  const auto found = std::find(endpoints.begin(), endpoints.end(), endpoint);
  if (found == endpoints.end()) {
    throw ConfigError(name + ": expected one of " + join_endpoints(endpoints) + ", got '" +
                      endpoint + "'");
  }
  return static_cast<int>(found - endpoints.begin());
}

std::string join_endpoints(const std::vector<std::string>& endpoints) {
  std::string text;
  for (const std::string& endpoint : endpoints) text += (text.empty() ? "" : ",") + endpoint;
  return text;
}

}  // namespace cohort::ps
