// Addresses and connections, as the launcher and the rendezvous of ranks need them.
#pragma once
#include <chrono>
#include <memory>
#include <netdb.h>
#include <string>

#include "cohort/base/fd.h"

namespace cohort {

/// A list of addresses, walked by ai_next.
using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

/// Looks up `host`:`port` for sockets of `type` (SOCK_STREAM, SOCK_DGRAM). `error` receives
/// getaddrinfo's code, 0 if there are addresses. Blocks for the name service.
Addresses resolve(const std::string& host, int port, int type, int& error);

/// Waits until poll's `event` has come to `socket`, at most until `deadline`; returns whether it
/// has.
bool is_ready(const Fd& socket, short event, std::chrono::steady_clock::time_point deadline);

/// Whether errno says that a call on a non-blocking socket is to be made again, later or at once.
bool would_block();

/// Connects a new, non-blocking socket to `address`, and waits for that at most until `deadline`.
/// Returns 0 and the socket in `connection`, or errno's number for why there is none.
int connect_to(const addrinfo& address, std::chrono::steady_clock::time_point deadline,
               Fd& connection);

}  // namespace cohort
