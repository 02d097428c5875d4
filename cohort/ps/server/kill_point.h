// SPDX-License-Identifier: Apache-2.0
// Points at which tests kill a server: between two steps that must stay consistent.
#pragma once

namespace cohort::ps {

/// Kills this process (SIGKILL) if COHORT_PS_KILL_POINT is "<name>:<n>" and this is the n-th call
/// with `name`; else costs one comparison.
void kill_point(const char* name);

}  // namespace cohort::ps
