// SPDX-License-Identifier: Apache-2.0
// Lists of "host:port" and "unix:PATH", as flags and environments spell them.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace cohort {

/// Whether `text` is "host:port" ("[ipv6]:port" likewise) with a port from `least_port` to 65535.
bool is_endpoint(std::string_view text, int least_port = 1);

/// Whether `text` is that or "unix:PATH".
bool is_server_endpoint(std::string_view text);

/// Reads "host:port,host:port", keeping the order.
///
/// Errors: ConfigError that begins with `name` (a flag or variable): an entry of another form, a
///         port out of 1 to 65535, an entry given twice, or none.
std::vector<std::string> parse_endpoints(const std::string& name, const std::string& text);

/// The same for servers, which may also be "unix:PATH" (a path without commas).
std::vector<std::string> parse_server_endpoints(const std::string& name, const std::string& text);

}  // namespace cohort
