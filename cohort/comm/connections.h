// SPDX-License-Identifier: Apache-2.0
// TCP connections of this process, found by where they lead, so that what waits on them can be
// ended from outside.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace cohort::comm {

/// IP address and port, "127.0.0.1:29500". An IPv4 address that is mapped to IPv6 is written as
/// IPv4.
using Endpoint = std::string;

/// Some of this process's TCP connections.
///
/// Gloo has no way to end a waiting operation before its timeout, and the client of c10d's store
/// has no limit where its host is silent: shutting their connections down does it, with an error.
/// Descriptors stay open and stay their owner's; one that was closed meanwhile, and perhaps given
/// to another socket, is left alone.
/// Threads: const functions from any thread.
class Connections {
 public:
  Connections() = default;
  /// Those with `belongs(own endpoint, peer's endpoint)`. Reads /proc/self/fd.
  static Connections where(
      const std::function<bool(const Endpoint& own, const Endpoint& peer)>& belongs);
  /// Those of this process to `port` of any host.
  static Connections to_port(int port);

  /// Leaves out those that `others` has, too.
  void remove(const Connections& others);
  /// Ends all that is said over these connections, in both directions.
  void shut_down() const;
  /// Bounds each wait for data.
  void limit_waiting(std::chrono::milliseconds limit) const;

 private:
  std::map<int, uint64_t> sockets_;  // descriptor -> inode
};

/// The endpoints at which this process accepts TCP connections, by descriptor.
std::map<int, Endpoint> listening_sockets();

}  // namespace cohort::comm
