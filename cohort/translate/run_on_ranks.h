// SPDX-License-Identifier: Apache-2.0
// Work of some ranks, for which the others wait; all of them throw its errors.
#pragma once
#include <chrono>
#include <functional>
#include <string>

#include "cohort/comm/process_group.h"

namespace cohort::translate {

/// Runs `work` on the ranks where `is_mine`; returns on all when all of them are done.
///
/// Collective; blocks, for `limit` at most. `work` must not communicate but with others that do it.
/// Errors: on the rank that failed what `work` threw; on the others an error of the same kind
///         (ConfigError or c10::Error) with its text and the rank's number. PeerError if a rank is
///         lost, or `limit` is over: it names `name`.
void run_on_ranks(const comm::ProcessGroup& group, const std::string& name, bool is_mine,
                  std::chrono::milliseconds limit, const std::function<void()>& work);

}  // namespace cohort::translate
