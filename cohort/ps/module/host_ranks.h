// SPDX-License-Identifier: Apache-2.0
// Ranks of a process group that train through parameter servers: --strategy ps-sync and ps-async.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "cohort/comm/process_group.h"
#include "cohort/ps/module/session.h"

namespace cohort::ps {

/// Of "ps-sync" and "ps-async"; nothing for the names of parallel::Strategy.
std::optional<Training> server_training(const std::string& strategy);

/// For a program whose `strategy` is none of these. Local.
/// Errors: ConfigError if a launcher started servers for it, which would be unused.
void refuse_servers(const std::string& strategy);

/// The ranks of `group` as one trainer: SessionOptions::host.
HostRanks host_ranks(const comm::ProcessGroup& group);

/// What a rank of a group needs to open a Session.
struct TrainerInfo {
  comm::ProcessGroup host;  ///< The ranks that are one trainer; empty: each is one.
  SessionOptions session;   ///< Number, endpoints, `host`; the caller sets the rule and the rest.
};

/// Reads the servers from Paddle's variables (ps/role.h), which `cohort run --servers` sets, and
/// checks them against this rank. Each `ranks_per_trainer` neighbouring ranks are one trainer:
/// their gradients are averaged first, and the first rank communicates with the servers, under
/// `security`.
///
/// Collective over `group`; blocks only if ranks_per_trainer > 1.
/// Errors: ConfigError: no servers in the environment, another number than the rank's, or
///         ranks_per_trainer does not divide the ranks; PeerError.
TrainerInfo trainer_info_from_environment(const comm::ProcessGroup& group, Training training,
                                          const SecurityOptions& security,
                                          int ranks_per_trainer = 1,
                                          CallSite site = CallSite::here());

}  // namespace cohort::ps
