// SPDX-License-Identifier: Apache-2.0
// Addresses and connections, as the launcher and the rendezvous of ranks need them.
#pragma once
#include <chrono>
#include <memory>
#include <netdb.h>
#include <string>

#include "cohort/base/fd.h"

namespace cohort {

/// Whether `host` is this machine by its own words: "localhost", "127.0.0.1", "::1". A host name
/// may stand for 127.0.1.1 here and for another address elsewhere: it is none.
bool is_loopback(const std::string& host);

/// Returns a listening TCP socket (close-on-exec) on `port` (0: a free one): of the loopback alone
/// where `host`, by which others find it, is that, else of all interfaces, of both families where
/// the machine has IPv6. Without a socket `error` receives errno's number, EINVAL for a loopback
/// host that is no address.
Fd listen_on(int port, const std::string& host, int& error);

/// Returns the port that a socket is bound to; 0 for what is no bound socket.
int port_of(int fd);

/// A list of addresses, walked by ai_next.
using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

/// Looks up `host`:`port` for sockets of `type` (SOCK_STREAM, SOCK_DGRAM). `error` receives
/// getaddrinfo's code, 0 if there are addresses. Blocks for the name service.
Addresses resolve(const std::string& host, int port, int type, int& error);

/// Waits until poll's `event` has come to `socket`, at most until `deadline`, or until `interrupt`
/// is readable; returns whether it has come.
bool is_ready(const Fd& socket, short event, std::chrono::steady_clock::time_point deadline,
              const Fd* interrupt = nullptr);

/// Whether errno says that a call on a non-blocking socket is to be made again, later or at once.
bool would_block();

/// Connects a new, non-blocking socket to `address`, and waits for that at most until `deadline`.
/// Returns 0 and the socket in `connection`, or errno's number for why there is none.
int connect_to(const addrinfo& address, std::chrono::steady_clock::time_point deadline,
               Fd& connection);

}  // namespace cohort
