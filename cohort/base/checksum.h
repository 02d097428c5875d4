// SHA-256, to notice damaged files.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace cohort {

/// Computes the SHA-256 of bytes that arrive in pieces.
///
/// Source: FIPS 180-4, sections 4.1.2, 5.3.3 and 6.2.
class Sha256 {
 public:
  void update(std::span<const std::byte> bytes);
  void update(std::string_view text) { update(std::as_bytes(std::span(text))); }
  /// Returns 64 lower-case hexadecimal digits of what came so far; more may follow.
  std::string hex() const;

 private:
  void consume(const std::byte* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, 64> buffer_{};
  uint64_t num_bytes_ = 0;
};

/// Returns the SHA-256 of a whole file in hexadecimal.
/// Errors: ConfigError that names the file if it cannot be read.
std::string sha256_of_file(const std::string& path);

}  // namespace cohort
