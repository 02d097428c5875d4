// SPDX-License-Identifier: Apache-2.0
// The precision that the ranks of a job compute in.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/option.h"
#include "cohort/comm/process_group.h"
#include "cohort/nmt/options.h"

namespace cohort::translate {

/// Returns `own` once it is known that all ranks have the same. If none of them has any: nmt::best_precision() of the group's
/// device, where processors may differ: float32 if it is that of any rank.
///
/// Collective; blocks.
/// Errors: ConfigError on every rank, which names those that differ.
nmt::Precision agreed_precision(std::optional<nmt::Precision> own, const comm::ProcessGroup& group);

/// The same, of what the ranks' processors suit.
/// Precondition: not empty.
nmt::Precision common_precision(const std::vector<nmt::Precision>& best_of_ranks);

/// `precision` as one of `words`, of which "auto" is none.
TextValue precision_value(std::optional<nmt::Precision>& precision, std::vector<std::string> words);

}  // namespace cohort::translate
