// SPDX-License-Identifier: Apache-2.0
// One training at a time in a folder.
#pragma once
#include <string>

#include "cohort/base/fd.h"

namespace cohort::train {

/// Makes `folder` and keeps other trainings out until the descriptor is closed. (A file system
/// without flock does not.) Local, for the rank that writes there. `flag` is what errors call it.
/// Errors: ConfigError if it cannot be made, or another process holds it.
Fd hold_folder(const std::string& flag, const std::string& folder);

}  // namespace cohort::train
