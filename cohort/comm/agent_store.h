// SPDX-License-Identifier: Apache-2.0
// The store of torchrun's agent, which c10d serves and c10d's client asks.
#pragma once
#include <chrono>
#include <string>

#include "cohort/base/fd.h"
#include "cohort/comm/rank_info.h"
#include "cohort/comm/store_connection.h"

namespace cohort::comm {

/// Waits until the agent's store answers; returns a connection for `ping`. Nothing is written to
/// stderr, where c10d's client would write a page for each try.
/// Errors: ConfigError if the host does not resolve, or if something else than a store answers;
/// c10::DistNetworkError if there is no answer before `deadline`.
Fd await_agent_store(const RankInfo& info, Deadline deadline);

/// Asks the store at the other end of `connection` for a sign of life. Returns why none came;
/// nothing if one did.
/// Errors: ConfigError if it is no store.
std::string ping(const Fd& connection, const RankInfo& info, Deadline deadline);

/// Connects to the agent's store, which answers already. A wait for it ends after `timeout`.
StoreConnection connect_agent_store(const RankInfo& info, Deadline deadline,
                                    std::chrono::milliseconds timeout);

}  // namespace cohort::comm
