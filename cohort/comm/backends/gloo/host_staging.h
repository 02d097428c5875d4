// SPDX-License-Identifier: Apache-2.0
// Gloo for tensors of a device: through copies in the host's memory.
#pragma once
#include "cohort/comm/backend.h"

namespace cohort::comm {

/// Gloo for tensors of `device`. Slow: it is for what the device's own backend refuses, as NCCL
/// refuses two ranks on one card.
///
/// A collective waits for the device, copies its tensors to the host, and has ended, with its
/// results on their way back, when the call returns; nothing overlaps. A message does not wait for
/// its peer before `wait`.
/// Numerics: as Gloo's of the same tensors on the CPU.
/// Errors:   as make_gloo_backend; from the call where the operation fails.
BackendPlugin gloo_through_host(c10::DeviceType device);

}  // namespace cohort::comm
