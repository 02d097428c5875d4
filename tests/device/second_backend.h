// SPDX-License-Identifier: Apache-2.0
// Collectives of the second device's tensors.
#pragma once

namespace cohort::test {

/// Registers the backend "second": a group that names it computes on second_device().
///
/// Gloo carries its collectives, on the device's own memory; each has ended when it returns. None
/// counts as a copy or as a synchronisation. Lists of lists of tensors (allgather of c10d; Cohort
/// gathers into one tensor) are not served. Call it once in a process.
void register_second_backend();

}  // namespace cohort::test
