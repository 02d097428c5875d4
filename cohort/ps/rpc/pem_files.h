// SPDX-License-Identifier: Apache-2.0
// Certificates and keys from files, checked before anybody is shown them.
#pragma once
#include <string>

#include "cohort/ps/rpc/security.h"

namespace cohort::ps {

/// What the files hold.
struct PemFiles {
  std::string authority;
  std::string certificate;
  std::string key;
};

/// Reads the three files of `security`.
/// Errors: ConfigError that names the flags that are missing, or the file: not in PEM form, a
/// certificate of one's own that has expired or is not valid yet, a key of another certificate.
PemFiles read_pem_files(const SecurityOptions& security);

/// Errors: ConfigError that names the file of a server's own certificate if it bears none of the
/// names that clients expect of servers.
void check_server_name(const SecurityOptions& security, const PemFiles& files);

}  // namespace cohort::ps
