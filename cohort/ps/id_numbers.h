// SPDX-License-Identifier: Apache-2.0
// Distinct ids, numbered in the order of their arrival.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cohort/ps/id_hash.h"

namespace cohort::ps {

/// A hash table with open addressing, for the ids of one batch or push.
///
/// Memory:  kept for the next use.
/// Threads: one.
class IdNumbers {
 public:
  /// Forgets all ids; about `expected` distinct ones follow.
  void reset(size_t expected) {
    ids_.clear();
    ids_.reserve(expected);
    places_.assign(std::bit_ceil(std::max<size_t>(16, 2 * expected)), 0);
  }

  /// The number of `id`: a new one is the number of ids before it. After reset().
  size_t number_of(uint64_t id) {
    const size_t place = place_of(id);
    if (places_[place] != 0) return places_[place] - 1;
    ids_.push_back(id);
    places_[place] = static_cast<uint32_t>(ids_.size());
    if (2 * ids_.size() > places_.size()) grow();
    return ids_.size() - 1;
  }

  std::span<const uint64_t> ids() const { return ids_; }  ///< Each once, by number.

 private:
  // Where `id` is, or is to be put.
  size_t place_of(uint64_t id) const {
    const size_t mask = places_.size() - 1;
    size_t place = splitmix64_finalizer(id) & mask;
    while (places_[place] != 0 && ids_[places_[place] - 1] != id) place = (place + 1) & mask;
    return place;
  }

  void grow() {
    places_.assign(2 * places_.size(), 0);
    for (size_t number = 0; number < ids_.size(); ++number)
      places_[place_of(ids_[number])] = static_cast<uint32_t>(number + 1);
  }

  std::vector<uint64_t> ids_;
  std::vector<uint32_t> places_;  // 1 + the id's number, or 0; a power of two of them.
};

}  // namespace cohort::ps
