// SPDX-License-Identifier: Apache-2.0
// The flags by which trainers, and other clients of servers, show and check certificates.
#pragma once
#include <CLI/CLI.hpp>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/secret.h"
#include "cohort/cli/flag_list.h"
#include "cohort/cli/parse.h"
#include "cohort/ps/rpc/security.h"

namespace cohort::cli {

/// --tls-authority, --tls-certificate, --tls-key and --tls-server-names: mutual TLS with parameter
/// servers, of which the first three are needed together. --job-secret-file: read at once.
inline void add_client_security_flags(CLI::App& app, ps::SecurityOptions& security) {
  app.add_option("--tls-authority", security.authority,
                 "Certificate of the certificate authority (PEM)")
      ->type_name(kFile)
      ->group(kSecurity);
  app.add_option("--tls-certificate", security.certificate, "Certificate of this process (PEM)")
      ->type_name(kFile)
      ->group(kSecurity);
  app.add_option("--tls-key", security.key, "Private key of this process (PEM)")
      ->type_name(kFile)
      ->group(kSecurity);
  app.add_option("--tls-server-names", security.server_names,
                 "Names that a server's certificate may have")
      ->needs("--tls-authority")
      ->capture_default_str()
      ->group(kSecurity);
  app.add_option_function<std::string>(
         "--job-secret-file",
         [&security](const std::string& path) {
           security.job_secret = read_secret("--job-secret-file", path);
         },
         "File with the job's secret; a server with a secret rejects clients without it (default: "
         "COHORT_JOB_SECRET)")
      ->type_name(kFile)
      ->group(kSecurity);
}

/// Refuses certificates and a secret where there is no server to check them; `expected` says what
/// was left out.
/// Errors: ConfigError.
inline void refuse_security(const ps::SecurityOptions& security, const std::string& expected) {
  if (security.tls()) {
    throw ConfigError(
        "--tls-authority, --tls-certificate, --tls-key: are for parameter servers, expected " +
        expected);
  }
  if (!security.job_secret.empty()) {
    throw ConfigError("--job-secret-file: is for parameter servers, expected " + expected +
                      "; the ranks' own secret is COHORT_JOB_SECRET");
  }
}

}  // namespace cohort::cli
