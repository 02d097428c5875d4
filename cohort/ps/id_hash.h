// SPDX-License-Identifier: Apache-2.0
// The hash of 64-bit ids, which spreads them over servers, slots and random streams.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cohort::ps {

/// The finalizer of SplitMix64: every bit of `value` affects all bits of the result; one to one.
///
/// Ids are often structured (a slot number in the high bits, counters in the low ones): id % n
/// would map them to few values.
/// Source: Stafford 2011, "Better bit mixing", variant 13, as in SplitMix64.
constexpr uint64_t splitmix64_finalizer(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

/// Returns the value whose splitmix64_finalizer() is `hash`.
constexpr uint64_t inverse_splitmix64_finalizer(uint64_t hash) {
  hash = (hash ^ (hash >> 31) ^ (hash >> 62)) * 0x319642b2d24d8ec3;
  hash = (hash ^ (hash >> 27) ^ (hash >> 54)) * 0x96de1b173f119089;
  return hash ^ (hash >> 30) ^ (hash >> 60);
}

/// The server, in [0, num_servers), that holds row `id` of every table: the high bits of the hash
/// times their number; tables find their slots by the low bits.
constexpr uint32_t server_of(uint64_t id, uint32_t num_servers) {
  return static_cast<uint32_t>(((splitmix64_finalizer(id) >> 32) * num_servers) >> 32);
}

/// For the standard library's hash tables of ids.
struct IdHash {
  size_t operator()(uint64_t id) const { return splitmix64_finalizer(id); }
};

}  // namespace cohort::ps
