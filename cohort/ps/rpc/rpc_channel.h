// SPDX-License-Identifier: Apache-2.0
// A way to a server over gRPC.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "cohort/ps/rpc/security.h"
#include "cohort/ps/wire/request.h"

namespace cohort::ps {

struct RpcChannelOptions {
  std::string endpoint;  ///< "host:port" or "unix:/path".
  SecurityOptions security;
  int connections = 1;  ///< TCP connections; calls take turns. One carries about 1 GB/s.
};

/// Connects when something is sent, and again whenever the connection broke.
/// Errors: ConfigError that names a file of `security`: as read_pem_files (pem_files.h).
std::unique_ptr<Channel> make_rpc_channel(const RpcChannelOptions& options);

}  // namespace cohort::ps
