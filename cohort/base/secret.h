// SPDX-License-Identifier: Apache-2.0
// A secret that two processes share, and how one proves to the other that it has it.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

namespace cohort {

/// Returns `bytes` random bytes of the system as lower-case hexadecimal digits.
/// Errors: std::system_error if the system gives none.
std::string random_hex(size_t bytes);

/// Returns HMAC-SHA256 (RFC 2104) of `text` as 64 lower-case hexadecimal digits.
/// `key`: of any length; an empty one proves nothing.
std::string hmac_sha256(std::string_view key, std::string_view text);

/// Compares in a time that does not depend on where the texts differ.
bool equal_secrets(std::string_view a, std::string_view b);

/// Reads the secret that a file holds, without the line end at its end.
/// Errors: ConfigError that names `flag` and the file: it cannot be read, is empty or over 4096
/// bytes.
std::string read_secret(const std::string& flag, const std::string& path);

}  // namespace cohort
