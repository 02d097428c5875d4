// SPDX-License-Identifier: Apache-2.0
// The rendezvous endpoint: parses "host:port", listens and connects there.
#pragma once
#include <optional>
#include <string>

#include "cohort/base/fd.h"

namespace cohort::launch {

inline constexpr int kDefaultRendezvousPort = 29400;

struct Endpoint {
  std::string host;
  int port = kDefaultRendezvousPort;

  std::string text() const { return host + ":" + std::to_string(port); }
};

/// Reads "host", "host:port" or "[ipv6]:port".
/// Errors: ConfigError that names --rdzv-endpoint.
Endpoint parse_endpoint(const std::string& text);

/// Listens at `endpoint` if its host is this machine and the port is free; else nothing.
///
/// A host name that resolves to a loopback address, as a machine's own name often does, is
/// listened for on all interfaces; "localhost" and 127.x stay on the loopback.
/// Errors: ConfigError that names --rdzv-endpoint if the host does not resolve, or the port is not
/// permitted.
std::optional<Fd> listen_if_local(const Endpoint& endpoint);

/// Returns a connection, or nothing if there is none within a fifth of a second; then `error` is
/// errno's number of the last address that was tried. Blocks for the name service, too.
Fd try_to_connect(const Endpoint& endpoint, int& error);

}  // namespace cohort::launch
