// SPDX-License-Identifier: Apache-2.0
// The two plainest communication hooks: the backend's own all-reduce, and none at all.
#pragma once
#include <functional>

#include "cohort/parallel/comm_hook.h"

namespace cohort::parallel {

/// Returns the hook that does what DistributedDataParallel does without one, bit by bit.
///
/// Collective: one all-reduce per bucket.
/// Numerics:   in the gradient's dtype, each rank multiplies by 1 / world size, then ranks sum.
///             Over shm and hierarchical, types of 4 bytes and more are summed first and then
///             divided, which costs no pass over memory. A sparse bucket stays sparse.
/// Source:     the start of any hook of one's own.
///
/// `divisor`: what to divide by in place of the world size; the same on all ranks in each call.
CommHook all_reduce_hook(std::function<int()> divisor = {});

/// Returns the hook that sends nothing: every rank keeps its own gradient, not divided.
/// For measuring what communication costs; training with it lets the ranks drift apart.
CommHook noop_hook();

}  // namespace cohort::parallel
