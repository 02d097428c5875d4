// SPDX-License-Identifier: Apache-2.0
// The store of a job's rendezvous: which process serves it, and connections to it.
#pragma once
#include <ATen/core/ivalue.h>
#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "cohort/comm/rank_info.h"
#include "cohort/comm/store_client.h"

namespace cohort::comm {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// "127.0.0.1:29500" or "/shared/rendezvous": the rendezvous address of `info`.
std::string rendezvous_point(const RankInfo& info);

/// A client of the store.
struct StoreConnection {
  StorePtr store;
  /// Ends the connection for good: what waits for the store throws. From any thread; nothing
  /// happens to a file.
  std::function<void()> cut;
  /// Ends `store->wait` where it waits, or where it is called next, as if its time were over. From
  /// any thread. Empty: no wait of this store can be ended.
  std::function<void()> interrupt{};
};

/// Connects to the store of `info`, of which every call ends after `timeout`; a store that starts
/// later is waited for. `silence`: StoreClient's. Nothing is written to stderr.
///
/// Rank 0 is its host, where no agent serves one: the first call serves it, on the launcher's
/// socket or one that is bound here, until the process ends. So groups can follow each other, and
/// the other ranks may still be busy with the last one. Both ends prove to each other that they
/// have COHORT_JOB_SECRET. Keys are those of `info.job` alone.
/// Errors: ConfigError for a port that is taken, a host that does not resolve, another secret,
///         something else than a store at the port, or a file that is none;
///         c10::DistNetworkError if there is no answer before `deadline`.
StoreConnection connect_store(const RankInfo& info, Deadline deadline,
                              std::chrono::milliseconds timeout,
                              std::chrono::milliseconds silence = kAnswerTime);

}  // namespace cohort::comm
