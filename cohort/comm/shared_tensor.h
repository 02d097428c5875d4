// SPDX-License-Identifier: Apache-2.0
// Tensors for collectives, in memory that a group's backend reads in place.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>

#include "cohort/comm/process_group.h"

namespace cohort::comm {

/// Returns `numel` elements of undefined content, of one dimension. CPU tensors of a group over shm
/// lie in memory that all its ranks see (over hierarchical, those of its host), which its
/// collectives then read in place (docs/comm.md); those of other groups, of other devices and
/// pinned ones are at::empty's. All ranks should allocate alike: where one's
/// tensor lies elsewhere, the call copies, with the same bits.
///
/// Local. Owner: the tensor, which may outlive the group; its memory is then kept for the group's
/// next ones. Not there in a child that only forks.
/// Errors: c10::OutOfMemoryError in one line if the system has not so much memory left.
at::Tensor empty_shared(const ProcessGroup& group, int64_t numel, const at::TensorOptions& options);

/// Whether empty_shared gives memory that ranks of the group's host see.
bool shares_tensors(const ProcessGroup& group);

}  // namespace cohort::comm
