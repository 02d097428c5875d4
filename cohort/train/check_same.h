// SPDX-License-Identifier: Apache-2.0
// What each rank has read for itself, and must be the same.
#pragma once
#include <string>

#include "cohort/comm/process_group.h"

namespace cohort::train {

/// Checks that `checksum` is the same on all ranks. `what` names where it comes from, such as a
/// flag, and `noun` what it is of: "--valid-sets", "text".
/// Collective; blocks.
/// Errors: ConfigError on all ranks with both, and the first rank that differs from rank 0.
void check_same_on_ranks(const comm::ProcessGroup& group, const std::string& what,
                         const std::string& noun, const std::string& checksum);

}  // namespace cohort::train
