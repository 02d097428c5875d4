// SPDX-License-Identifier: Apache-2.0
// The listening socket of the rendezvous store, bound by the launcher before any worker exists.
#pragma once
#include "cohort/base/fd.h"

namespace cohort::launch {

enum class Reach { kLoopback, kAllInterfaces };

/// A listening TCP socket (close-on-exec) and the port that it has.
struct StoreSocket {
  Fd fd;
  int port = 0;
};

/// Binds `port` (0: a free one) and listens.
///
/// kLoopback binds 127.0.0.1; kAllInterfaces binds [::] for both families, or 0.0.0.0 where the
/// host has no IPv6. Connections queue from now on, so no worker can come too early.
/// Errors: ConfigError that names the port if it is in use or not permitted.
StoreSocket listen_for_store(Reach reach, int port);

/// Like listen_for_store, for a later round of the same job: tries `last_port` first. If it
/// is in use by now, `wanted_port` decides: 0 gives a free one, else it is the error.
StoreSocket listen_again(Reach reach, int last_port, int wanted_port);

}  // namespace cohort::launch
