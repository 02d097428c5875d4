// SPDX-License-Identifier: Apache-2.0
// The socket questions of a rendezvous: the port that rank 0 listens on, this machine's addresses
// and interfaces.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "cohort/base/tcp.h"

namespace cohort::comm {

/// The same as cohort::listen_on; the caller owns the socket.
/// Errors: ConfigError that names the port, for one that is taken or forbidden.
int listen_on(int port, const std::string& host = "");

/// Returns the addresses of rank 0's host for sockets of `type`; at least one. Looks again until
/// `deadline`: a pod's name resolves once the pod has an address.
/// Errors: ConfigError that names MASTER_ADDR if it does not resolve.
Addresses resolve_master(const std::string& host, int port, int type,
                         std::chrono::steady_clock::time_point deadline);

/// Returns the IP address of the interface through which packets to `host`:`port` leave. Nothing is
/// sent.
/// Errors: ConfigError if `host` does not resolve until `deadline`, or no route leads to it.
std::string local_address_towards(const std::string& host, int port,
                                  std::chrono::steady_clock::time_point deadline);

/// A network interface and its first address; IPv4 before IPv6.
struct Interface {
  std::string name;     ///< "eth0".
  std::string address;  ///< "10.0.0.7".
  bool loopback = false;
};

/// Returns the interfaces that are up and have an address, in the kernel's order. Link-local IPv6
/// addresses do not count.
std::vector<Interface> usable_interfaces();

/// Returns the interface called `name`. `asked_by` names the flag or variable in the error.
/// Errors: ConfigError if it does not exist or has no address; lists those that have one.
Interface find_interface(const std::string& name, const std::string& asked_by);

/// Returns the interface that the environment asks for: GLOO_SOCKET_IFNAME is a name,
/// NCCL_SOCKET_IFNAME NCCL's list of prefixes ("eth,ib", "^docker" excludes, "=eth0" is exact). An
/// interface without a name if neither is set.
/// Errors: ConfigError if no usable interface fits; lists them.
Interface interface_of_environment();

/// Returns an address at which other hosts can reach this one: of the first interface that is no
/// loopback.
/// Errors: ConfigError if there is none.
std::string first_outside_address();

}  // namespace cohort::comm
