// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/crc32c.h"

#include <algorithm>
#include <array>
#include <isa-l/crc.h>

namespace cohort::ps {

namespace {

// Polynomials over two elements modulo CRC-32C's, the coefficient of x^0 in the highest bit.
constexpr uint32_t kOne = uint32_t{1} << 31;

constexpr uint32_t times_x(uint32_t a) {
  return (a & 1) != 0 ? a >> 1 ^ 0x82f63b78 : a >> 1;
}

constexpr uint32_t product(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (uint32_t coefficient = kOne; coefficient != 0; coefficient >>= 1, b = times_x(b)) {
    if ((a & coefficient) != 0) sum ^= b;
  }
  return sum;
}

// x^8, and each the square of the one before: what a byte, two, four ... shift a checksum by.
constexpr std::array<uint32_t, 64> kShifts = [] {
  std::array<uint32_t, 64> shifts{kOne >> 8};
  for (size_t i = 1; i < shifts.size(); ++i) shifts[i] = product(shifts[i - 1], shifts[i - 1]);
  return shifts;
}();

}  // namespace

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc) {
  // isa-l counts in int and leaves the inversions of the standard to its caller.
  constexpr size_t kMost = size_t{1} << 30;
  uint32_t sum = ~crc;
  while (!bytes.empty()) {
    const auto part = bytes.first(std::min(bytes.size(), kMost));
    // Declared without const; it only reads.
    auto* data = reinterpret_cast<unsigned char*>(const_cast<std::byte*>(part.data()));
    sum = crc32_iscsi(data, static_cast<int>(part.size()), sum);
    bytes = bytes.subspan(part.size());
  }
  return ~sum;
}

uint32_t crc32c_joined(uint32_t first, uint32_t second, uint64_t second_bytes) {
  for (size_t i = 0; second_bytes != 0; ++i, second_bytes >>= 1) {
    if ((second_bytes & 1) != 0) first = product(kShifts[i], first);
  }
  return first ^ second;
}

}  // namespace cohort::ps
