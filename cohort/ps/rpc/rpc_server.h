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
  /// Errors: ConfigError that names the endpoint: not an address of this host alone without TLS, in
  /// use, no place for a socket; or the file of a certificate: read_pem_files, check_server_name.
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
