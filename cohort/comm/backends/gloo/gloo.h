// SPDX-License-Identifier: Apache-2.0
// libtorch's Gloo backend, behind one function: no other file sees Gloo's headers.
#pragma once
#include <chrono>
#include <string>

#include "cohort/comm/backend.h"

namespace cohort::comm {

/// Connects the ranks of the request by Gloo over TCP, on its interface if it names one, else on
/// the one that owns its address.
///
/// Collective: every rank calls it; blocks until all are connected, at most the request's timeout,
///             which then bounds every operation of the backend too. A rank may drop the backend at
///             once.
/// Errors:     what c10d and Gloo throw; the caller maps it.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendRequest& request);

}  // namespace cohort::comm
