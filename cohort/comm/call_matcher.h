// SPDX-License-Identifier: Apache-2.0
// Whether the ranks of a group call the same: when they compare their calls, the numbers that keep
// the data of different calls apart, and the splits of an all_to_all. Knows nothing of the network.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_set>

#include "cohort/comm/process_group.h"

namespace cohort::comm {

/// One rank's calls of one group.
///
/// Threads: one.
class CallMatcher {
 public:
  explicit CallMatcher(CheckCollectives check) : check_(check) {}

  bool is_on() const { return check_ != CheckCollectives::kOff; }
  /// Adds a call. `what` must be equal on all ranks.
  void add(const std::string& what);
  /// Whether the ranks must compare their calls before the data of the last one move. `always`:
  /// also if its kind is known, because no number protects its data.
  bool must_compare(bool always);

  /// Two numbers whose maxima over the ranks `agree` exactly if all ranks made the same calls.
  std::array<int64_t, 2> fingerprint() const;
  static bool agree(const std::array<int64_t, 2>& maxima) { return maxima[0] == ~maxima[1]; }

  /// Number of the next comparison, equal on ranks that have compared equally often.
  uint32_t next_comparison();
  /// Number of the last call's data: a hash of all calls so far. Never that of a comparison.
  uint32_t data_number() const;

 private:
  const CheckCollectives check_;
  uint64_t history_ = 0;  // a hash of all calls
  uint64_t kind_ = 0;     // a hash of the last one
  uint32_t num_comparisons_ = 0;
  std::unordered_set<uint64_t> known_;  // kinds that were compared
};

/// Compares what each rank sends to each in one all_to_all, in bytes, with what the receiver
/// expects.
/// `counts`: by rank, the world_size counts that it sends, then those that it expects.
/// Errors: CallMismatch, with the same text on every rank.
void check_split_bytes(std::span<const int64_t> counts, int world_size);

}  // namespace cohort::comm
