// How the ranks of a job find each other: one store, a roster in it, and this machine's address for
// the engine.
#pragma once
#include <ATen/core/ivalue.h>
#include <chrono>
#include <string>
#include <vector>

#include "cohort/comm/place.h"
#include "cohort/comm/store_connection.h"

namespace cohort::comm {

struct RendezvousOptions {
  std::chrono::milliseconds timeout{300'000};  ///< Until every rank has come.
  std::string
      interface;  ///< Network interface for the engine; empty: the environment's, else by route.
  std::string terms;  ///< What all ranks must agree on, in words: "world size 4, backend gloo".
};

/// What this rank knows once all have met.
struct Meeting {
  StorePtr store;                  ///< For the caller's thread.
  StoreConnection watch;           ///< A second connection, for the watching thread.
  std::string address;             ///< Of this host, reachable by the other ranks.
  std::string interface;           ///< The interface asked for; empty: none.
  std::vector<std::string> hosts;  ///< By rank: equal for those of one host (and namespace).
};

/// Meets the other ranks of `place`, which has a world size above 1. Collective; blocks at most
/// `timeout`.
///
/// Each rank signs a roster in the store: number, terms, host and process. So two processes with
/// one number, ranks that bring other terms, a rank that does not come, and a file left by an
/// earlier job are found and named, on every rank that reaches the store. Address: of the interface
/// asked for; otherwise of the route to the store. Where that is the loopback although the ranks
/// are on several hosts (a host name that stands for 127.0.1.1), the first address that is not.
/// A rank waits for a store that starts later; nothing is written to stderr meanwhile.
/// Errors: ConfigError for numbers or terms that clash, a stale file, an interface or host that
///         does not exist, a port that is taken, or where something else than a store answers.
///         PeerError for ranks that did not come, and for a store that does not answer, at most a
///         second after `timeout`.
Meeting meet(const Place& place, const RendezvousOptions& options);

/// Gives `place` the local rank and world size that `hosts`, one for each rank, imply. Local.
void find_host(Place& place, const std::vector<std::string>& hosts);

}  // namespace cohort::comm
