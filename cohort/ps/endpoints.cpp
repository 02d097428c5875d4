#include "cohort/ps/endpoints.h"

#include <algorithm>
#include <arpa/inet.h>
#include <charconv>
#include <string_view>

#include "cohort/base/error.h"

namespace cohort::ps {
namespace {

bool is_port(std::string_view text, int least = 1) {
  int port = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, port);
  return error == std::errc() && stop == end && port >= least && port <= 65535;
}

bool is_endpoint(std::string_view text, int least_port = 1) {
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || !is_port(text.substr(colon + 1), least_port)) return false;
  const std::string_view host = text.substr(0, colon);
  if (host.starts_with("[")) return host.size() > 2 && host.ends_with("]");
  return !host.empty() && host.find_first_of(": \t") == std::string_view::npos;
}

}  // namespace

std::vector<std::string> parse_endpoints(const std::string& name, const std::string& text) {
  std::vector<std::string> endpoints;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string endpoint = text.substr(begin, end - begin);
    if (!is_endpoint(endpoint)) {
      throw ConfigError(name + ": expected host:port,host:port, got '" + endpoint + "'" +
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

void check_listening_endpoint(const std::string& name, const std::string& text) {
  if (text.starts_with("unix:") ? text.size() > 5 : is_endpoint(text, 0)) return;
  throw ConfigError(name + " " + text + ": expected host:port (port 0: any) or unix:PATH");
}

bool is_loopback(const std::string& endpoint) {
  const std::string host = endpoint.substr(0, endpoint.rfind(':'));
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
