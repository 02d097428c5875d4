// The two socket questions of a rendezvous: the port that rank 0 listens on, and this machine's
// address.
#pragma once
#include <cstdint>
#include <string>

namespace cohort::comm {

/// Returns a listening TCP socket on `port` (0: a free one) of all interfaces; the caller owns it.
/// Errors: ConfigError that names the port, for one that is taken or forbidden.
int listen_on(int port);

/// Returns the port that the listening socket `fd` is bound to.
/// Errors: ConfigError if `fd` is not a bound socket.
int port_of(int fd);

/// Returns the IP address of the interface through which packets to `host`:`port` leave.
/// Nothing is sent. Errors: ConfigError if `host` does not resolve or no route leads to it.
std::string local_address_towards(const std::string& host, int port);

}  // namespace cohort::comm
