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

/// Returns `own`, or without one nmt::best_precision(), once it is known that all ranks have the same: their processors may
/// differ.
///
/// Collective; blocks.
/// Errors: ConfigError on every rank, which names those that differ.
nmt::Precision agreed_precision(std::optional<nmt::Precision> own, const comm::ProcessGroup& group);

/// `precision` as one of `words`, of which "auto" is none.
TextValue precision_value(std::optional<nmt::Precision>& precision, std::vector<std::string> words);

}  // namespace cohort::translate
