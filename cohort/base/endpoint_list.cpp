// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/endpoint_list.h"

#include <algorithm>
#include <charconv>
#include <system_error>

#include "cohort/base/error.h"

namespace cohort {
namespace {

constexpr std::string_view kUnixSocket = "unix:";

bool is_port(std::string_view text, int least) {
  int port = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, port);
  return error == std::errc() && stop == end && port >= least && port <= 65535;
}

template <class Accepts>
std::vector<std::string> parse_list(const std::string& name, const std::string& text,
                                    const std::string& expected, Accepts accepts) {
  std::vector<std::string> endpoints;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string endpoint = text.substr(begin, end - begin);
    if (!accepts(endpoint)) {
      throw ConfigError(name + ": expected " + expected + ", got '" + endpoint + "'" +
                        (endpoint == text ? "" : " in '" + text + "'"));
    }
    if (std::find(endpoints.begin(), endpoints.end(), endpoint) != endpoints.end()) {
      throw ConfigError(name + ": expected each endpoint once, got " + endpoint + " twice");
    }
    endpoints.push_back(endpoint);
    begin = end + 1;
  }
  return endpoints;
}

}  // namespace

bool is_endpoint(std::string_view text, int least_port) {
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || !is_port(text.substr(colon + 1), least_port)) return false;
  const std::string_view host = text.substr(0, colon);
  if (host.starts_with("[")) return host.size() > 2 && host.ends_with("]");
  return !host.empty() && host.find_first_of(": \t") == std::string_view::npos;
}

bool is_server_endpoint(std::string_view text) {
  return text.starts_with(kUnixSocket) ? text.size() > kUnixSocket.size() : is_endpoint(text);
}

std::vector<std::string> parse_endpoints(const std::string& name, const std::string& text) {
  return parse_list(name, text, "host:port,host:port",
                    [](const std::string& endpoint) { return is_endpoint(endpoint); });
}

std::vector<std::string> parse_server_endpoints(const std::string& name, const std::string& text) {
  return parse_list(name, text, "host:port,host:port (or unix:PATH)", is_server_endpoint);
}

}  // namespace cohort
