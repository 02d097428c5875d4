// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/call_matcher.h"

#include "cohort/comm/numbered_backend.h"

namespace cohort::comm {
namespace {

constexpr uint32_t kDataNumbers = 1U << 31;  // numbers of comparisons are below

uint64_t fnv1a(uint64_t hash, const std::string& text) {
  for (const char* byte = text.c_str(); byte <= text.c_str() + text.size(); ++byte)
    hash = (hash ^ static_cast<unsigned char>(*byte)) * 0x100000001b3ULL;
  return hash;
}

}  // namespace

void CallMatcher::add(const std::string& what) {
  history_ = fnv1a(history_, what);
  kind_ = fnv1a(0, what);
}

bool CallMatcher::must_compare(bool always) {
  const bool is_new = known_.insert(kind_).second;
  return is_on() && (is_new || always || check_ == CheckCollectives::kAlways);
}

// The greatest history and the greatest complement of one, which is the complement of the least.
std::array<int64_t, 2> CallMatcher::fingerprint() const {
  const auto history = static_cast<int64_t>(history_);
  return {history, ~history};
}

uint32_t CallMatcher::next_comparison() {
  return num_comparisons_++ % kDataNumbers;
}

uint32_t CallMatcher::data_number() const {
  return kDataNumbers | static_cast<uint32_t>(history_ ^ (history_ >> 32));
}

void check_split_bytes(std::span<const int64_t> counts, int world_size) {
  const auto ranks = static_cast<size_t>(world_size);
  for (size_t from = 0; from < ranks; ++from) {
    for (size_t to = 0; to < ranks; ++to) {
      const int64_t sent = counts[2 * ranks * from + to];
      const int64_t expected = counts[2 * ranks * to + ranks + from];
      if (sent == expected) continue;
      throw CallMismatch({__func__, __FILE__, __LINE__},
                         "rank " + std::to_string(to) + " expects " + std::to_string(expected) +
                             " bytes of rank " + std::to_string(from) + ", which sends " +
                             std::to_string(sent));
    }
  }
}

}  // namespace cohort::comm
