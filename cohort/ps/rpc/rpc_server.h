// SPDX-License-Identifier: Apache-2.0
// Serves a parameter server over gRPC.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "cohort/ps/rpc/security.h"
#include "cohort/ps/server/server.h"

namespace cohort::ps {

struct RpcServerOptions {
  std::string endpoint = "127.0.0.1:0";  ///< "host:port" (0: a free one) or "unix:/path".
  SecurityOptions security;
  int64_t max_message_bytes = int64_t{1} << 30;
};

/// Looks at all that a server is refused for, before there is one.
/// Errors: as RpcServer's constructor.
void check_rpc_server(const RpcServerOptions& options);

/// Listens, and hands what comes to a Server.
/// Threads: any.
class RpcServer {
 public:
  /// Owner: `server` must outlive this.
  /// Errors: ConfigError that names the endpoint: without TLS it is not a loopback address or a unix
  /// socket, it is in use, or its folder does not exist. ConfigError that names the file of a
  /// certificate: pem_files.h has the list.
  RpcServer(Server& server, const RpcServerOptions& options);
  /// Ends all connections.
  ~RpcServer();

  int port() const { return port_; }  ///< 0 for unix sockets.

 private:
  struct Service;
  int port_ = 0;
  std::unique_ptr<Service> service_;
};

}  // namespace cohort::ps
