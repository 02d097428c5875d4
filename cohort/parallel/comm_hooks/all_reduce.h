// SPDX-License-Identifier: Apache-2.0
// The two plainest communication hooks: the backend's own all-reduce, and none at all.
#pragma once
#include "cohort/parallel/comm_hook.h"

namespace cohort::parallel {

/// Returns the hook that does what DistributedDataParallel does without one, bit by bit.
///
/// Collective: one all-reduce per bucket.
/// Numerics:   each rank multiplies by 1 / world size in the gradient's dtype, then ranks sum in
///             that dtype. A sparse bucket stays sparse.
/// Source:     the start of any hook of one's own.
CommHook all_reduce_hook();

/// Returns the hook that sends nothing: every rank keeps its own gradient, not divided.
/// For measuring what communication costs; training with it lets the ranks drift apart.
CommHook noop_hook();

}  // namespace cohort::parallel
