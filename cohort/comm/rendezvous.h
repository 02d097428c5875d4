// SPDX-License-Identifier: Apache-2.0
// How the ranks of a job find each other: one store, the members registered in it, and this
// machine's address for the backend.
#pragma once
#include <ATen/core/ivalue.h>
#include <chrono>
#include <sched.h>
#include <string>
#include <vector>

#include "cohort/comm/peer_process.h"
#include "cohort/comm/rank_info.h"
#include "cohort/comm/store_connection.h"

namespace cohort::comm {

struct RendezvousOptions {
  std::chrono::milliseconds timeout{300'000};  ///< Until every rank has come.
  std::string
      interface;  ///< Network interface for the backend; empty: the environment's, else by route.
  std::string terms;  ///< What all ranks must agree on, in words: "world size 4, backend gloo".
};

/// The result of a rendezvous.
struct Rendezvous {
  StorePtr store;                           ///< For the caller's thread.
  StoreConnection watch;                    ///< A second connection, for the watching thread.
  std::string address;                      ///< Of this host, reachable by the other ranks.
  std::string interface;                    ///< The interface asked for; empty: none.
  std::vector<std::string> hosts;           ///< By rank, as own_host().
  std::vector<std::string> memory_sharing;  ///< By rank, as memory_sharing().
  std::vector<PeerProcess> processes;       ///< By rank; those of other hosts are not watched.
  std::vector<cpu_set_t> cores;             ///< By rank: those that it may use. None: not known,
                                            ///< as of ranks of other hosts.
};

/// Returns the cores that a process of this host may use: none if the system does not say.
cpu_set_t cores_of(pid_t process);

/// Estimates whether some ranks of this host can have a core each, whatever all others do at the
/// time: whether no more ranks may use their cores than these are. `cores`: Rendezvous::cores.
bool has_core_each(const std::vector<cpu_set_t>& cores, const std::vector<int>& ranks);

/// Joins the rendezvous of the job of `info`, whose world size is above 1. Collective; blocks at
/// most `timeout`.
///
/// Each rank registers in the store: number, terms, host and process. So two processes with
/// one number, ranks that bring other terms, a rank that does not come, and a file left by an
/// earlier job are reported, on every rank that reaches the store. Address: of the interface
/// asked for; otherwise of the route to the store. Where that is the loopback although the ranks
/// are on several hosts (a host name that stands for 127.0.1.1), the first address that is not.
/// A rank waits for a store that starts later; nothing is written to stderr meanwhile.
/// Errors: ConfigError for numbers or terms that clash, a stale file, an interface or host that
///         does not exist, a port that is taken, or where something else than a store answers.
///         PeerError for ranks that did not come, and for a store that does not answer, at most a
///         second after `timeout`.
Rendezvous join_rendezvous(const RankInfo& info, const RendezvousOptions& options);

/// The host of this process: its name (COHORT_HOST_NAME, else the system's), "/" and what tells
/// apart machines, and network and process namespaces of one. Equal for processes of one host; with
/// different COHORT_HOST_NAME, ranks of one machine count as ranks of several hosts. Local.
/// Errors: ConfigError if COHORT_HOST_NAME has a space or a slash.
std::string own_host();

/// Gives `info` the local rank and world size that `hosts`, one for each rank, imply. Local.
void find_host(RankInfo& info, const std::vector<std::string>& hosts);

}  // namespace cohort::comm
