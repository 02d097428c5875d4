// SPDX-License-Identifier: Apache-2.0
// The checksum of messages, log records and files of the parameter server.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace cohort::ps {

/// CRC-32C (Castagnoli) of `bytes`, continuing from `crc` of what came before; about 20 GB/s.
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc = 0);

}  // namespace cohort::ps
