// SPDX-License-Identifier: Apache-2.0
// Tensors for collectives, in memory that a group's backend reads in place.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>

#include "cohort/comm/process_group.h"

namespace cohort::comm {

/// Returns `numel` elements of undefined content, of one dimension. CPU tensors of a group over shm
/// lie in memory that all its ranks see, over hierarchical that those of its host see, and
/// collectives read them in place (docs/backends.md). Those of other groups and devices, and pinned
/// ones, are at::empty's. Ranks need not allocate alike: where one's tensor lies elsewhere, a call
/// copies, with the same bits. The tensors of a call that has failed may still change: a rank that
/// does not know yet reads and writes them.
///
/// Local.
/// Owner:  the tensor, which may outlive the group. A child that only forks does not have it.
/// Memory: kept for the group's next tensors when this one goes.
/// Errors: c10::ValueError if `numel` is negative; c10::OutOfMemoryError in one line if the system
///         refuses so much memory. One that overcommits refuses little.
at::Tensor empty_shared(const ProcessGroup& group, int64_t numel, const at::TensorOptions& options);

/// Whether empty_shared gives memory that ranks of the group's host see.
/// The ranks of a group may differ in it: one that is alone on its host shares with nobody.
bool shares_tensors(const ProcessGroup& group);

/// Whether the backend of CPU tensors has c10d's AVG, without a pass of its own for the division: shm
/// and hierarchical. The same on all ranks.
bool averages_while_summing(const ProcessGroup& group);

}  // namespace cohort::comm
