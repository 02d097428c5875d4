// SPDX-License-Identifier: Apache-2.0
// What a server does, for Prometheus.
#pragma once
#include <memory>
#include <string>

#include "cohort/ps/server/server.h"

namespace cohort::cli {

/// Errors: as MetricsEndpoint's constructor, before there is a server.
void check_metrics(const std::string& endpoint);

/// Serves GET /metrics at `endpoint` ("127.0.0.1:9100"): what `cohort ps status` shows, at
/// the time of each request.
class MetricsEndpoint {
 public:
  /// `server` must outlive this.
  /// Errors: ConfigError that names the endpoint: not an address of this host alone (there is no
  ///         TLS here), or in use.
  MetricsEndpoint(ps::Server& server, const std::string& endpoint);
  ~MetricsEndpoint();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace cohort::cli
