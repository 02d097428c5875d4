// SPDX-License-Identifier: Apache-2.0
// The checksum of messages, log records and files of the parameter server.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace cohort::ps {

/// CRC-32C (Castagnoli) of `bytes`, continuing from `crc` of what came before; about 20 GB/s.
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc = 0);

/// Of some bytes with checksum `first` and `second_bytes` ones behind them with checksum `second`,
/// together. About a microsecond, however many they are.
uint32_t crc32c_joined(uint32_t first, uint32_t second, uint64_t second_bytes);

}  // namespace cohort::ps
