// SPDX-License-Identifier: Apache-2.0
// Where servers listen: "host:port" and "unix:PATH" (lists of them: cohort/base/endpoint_list.h).
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace cohort::ps {

/// The path of "unix:PATH"; nothing of other endpoints.
std::optional<std::string> unix_path(const std::string& endpoint);

/// Checks where a server is to listen: "host:port", port 0 being any that is free, or "unix:PATH".
/// Errors: ConfigError that begins with `name`.
void check_listening_endpoint(const std::string& name, const std::string& text);

/// Listens there for a moment, so that what cannot be served is refused before anything is made.
/// Errors: ConfigError that begins with `name`: another process listens there, it is not of this
/// host, or the folder of a unix socket does not exist.
void check_can_listen(const std::string& name, const std::string& endpoint);

/// Whether `endpoint` names this host by number: 127.x.y.z or [::1], with a port or without. A name
/// that only begins so is none.
bool is_loopback(const std::string& endpoint);

/// Returns where `endpoint` stands in `endpoints`.
/// Errors: ConfigError that begins with `name` and lists them if it is none of them.
int index_of_endpoint(const std::string& name, const std::string& endpoint,
                      const std::vector<std::string>& endpoints);

/// Returns the endpoints with commas between, as parse_server_endpoints reads them.
std::string join_endpoints(const std::vector<std::string>& endpoints);

}  // namespace cohort::ps
