// SPDX-License-Identifier: Apache-2.0
// SHA-256, to notice damaged files.
#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

struct evp_md_ctx_st;

namespace cohort {

/// Computes the SHA-256 of bytes that arrive in pieces (OpenSSL's, which knows the CPU's
/// instructions for it).
class Sha256 {
 public:
  Sha256();
  void update(std::span<const std::byte> bytes);
  void update(std::string_view text) { update(std::as_bytes(std::span(text))); }
  /// Returns 64 lower-case hexadecimal digits of what came so far; more may follow.
  std::string hex() const;

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

/// Returns the SHA-256 of a whole file in hexadecimal.
/// Errors: ConfigError that names the file if it cannot be read.
std::string sha256_of_file(const std::string& path);

}  // namespace cohort
