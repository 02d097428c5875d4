// SPDX-License-Identifier: Apache-2.0
// A parameter server within a test's process.
#pragma once
#include <string>

#include "cohort/ps/rpc/rpc_server.h"
#include "cohort/ps/server/server.h"

namespace cohort::test {

/// One server on loopback, without a log.
class OneServer {
 public:
  std::string endpoint() const { return "127.0.0.1:" + std::to_string(rpc_.port()); }

 private:
  Log log_{LogOptions{.console = LogConsole::kNever}};
  ps::Server server_{ps::ServerOptions{.server = 0,
                                       .servers = 1,
                                       .durability = ps::Durability::kApplied,
                                       .snapshot_log_bytes = 0},
                     log_};
  ps::RpcServer rpc_{server_, ps::RpcServerOptions{}};
};

}  // namespace cohort::test
