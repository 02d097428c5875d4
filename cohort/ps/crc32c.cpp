// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/crc32c.h"

#include <algorithm>
#include <isa-l/crc.h>

namespace cohort::ps {

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

}  // namespace cohort::ps
