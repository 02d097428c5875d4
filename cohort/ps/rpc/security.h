// SPDX-License-Identifier: Apache-2.0
// Authentication of clients and servers.
#pragma once
#include <string>
#include <vector>

namespace cohort::ps {

/// Mutual TLS: both sides present a certificate of one authority, and check the name in the
/// other's. Paths of PEM files; all empty: no TLS, and then servers listen on this host alone.
///
/// In addition a job can have a secret: a server that has one rejects calls without it.
struct SecurityOptions {
  std::string authority;    ///< The authority's certificate.
  std::string certificate;  ///< One's own.
  std::string key;          ///< One's own.
  /// Names (common name or subject alternative name) of certificates: roles rather than hosts. A
  /// server accepts clients with a name of either list, and has one of `server_names` itself; a
  /// client expects the first of `server_names`.
  std::vector<std::string> server_names{"cohort-server"};
  std::vector<std::string> trainer_names{"cohort-trainer"};

  /// Sent with every call; empty: COHORT_JOB_SECRET's value, which `cohort run --servers` sets.
  std::string job_secret;

  bool tls() const { return !authority.empty() || !certificate.empty() || !key.empty(); }
};

/// The job's secret; empty if there is none.
std::string job_secret_of(const SecurityOptions& security);

}  // namespace cohort::ps
