// SPDX-License-Identifier: Apache-2.0
// A hash table of 8-byte places in many small parts, by mixed hashes (id_hash.h).
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <span>
#include <utility>
#include <vector>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "cohort/ps/table/pages.h"

namespace cohort::ps {

/// Maps hashes to values of `kValueBits` bits, never 0, beside which a place keeps as much of the
/// hash as fits: several values may seem to fit one hash, and the caller tells which is meant.
///
/// Open addressing in 256 parts by the hash's low 8 bits, each 0.64 to 0.8 full: 10 to 12.5 bytes a
/// value. A part grows alone, by a quarter: no push waits for all of them. A part is lines of 8 places,
/// as long as cache lines. Of a place's key the low 32 bits say in which line it belongs, so no row is
/// read to move it. A value whose line was full is in a later one; all lines between are full.
/// Threads: one at a time.
template <int kValueBits>
class HashParts {
 public:
  static constexpr int kParts = 256;
  /// What a value takes at most, where they are many.
  static constexpr double kMaxBytesPerValue = 12.5;
  static constexpr uint64_t kMaxValue = (uint64_t{1} << kValueBits) - 1;

  HashParts() = default;
  HashParts(HashParts&&) noexcept = default;
  HashParts& operator=(HashParts&&) noexcept = default;

  int64_t size() const { return size_; }

  /// Of memory.
  int64_t bytes() const {
    int64_t sum = sizeof(*this);
    for (const Part& part : parts_) sum += static_cast<int64_t>(kLineBytes * part.lines);
    return sum;
  }

  /// The memory that is in huge pages, where the system has them.
  std::vector<std::span<std::byte>> huge_pages() const {
    std::vector<std::span<std::byte>> all;
    for (const Part& part : parts_) {
      const auto memory = memory_of(part);
      if (!is_mapped(memory.size())) continue;
      if (!all.empty() && all.back().data() + all.back().size() == memory.data()) {
        all.back() = {all.back().data(), all.back().size() + memory.size()};
      } else {
        all.push_back(memory);
      }
    }
    return all;
  }

  [[gnu::always_inline]] void prefetch(uint64_t hash) const {
    const Part& part = part_of(hash);
    prefetch_line(line_at(part, home(part, key_of(hash))));
  }

  /// Returns the first value of this hash's key for which `is_meant(value)`, or 0.
  template <class Predicate>
  uint64_t find(uint64_t hash, const Predicate& is_meant) const {
    const Part& part = part_of(hash);
    const uint64_t* place = find_place(part, key_of(hash), is_meant);
    return place != nullptr ? *place & kMaxValue : 0;
  }

  /// Adds a value in [1, kMaxValue].
  /// Errors: std::bad_alloc.
  void insert(uint64_t hash, uint64_t value) {
    Part& part = part_of(hash);
    if ((uint64_t{part.used} + 1) * 5 > uint64_t{part.lines} * kLinePlaces * 4) grow(part);
    put(part, key_of(hash) << kValueBits | value);
    ++part.used;
    ++size_;
  }

  /// Changes the value that find() gives; it is there.
  template <class Predicate>
  void replace(uint64_t hash, uint64_t value, const Predicate& is_meant) {
    Part& part = part_of(hash);
    auto* place = const_cast<uint64_t*>(find_place(part, key_of(hash), is_meant));
    *place = key_of(hash) << kValueBits | value;
  }

  /// Removes the value that find() gives; it is there. Values of later lines move up: no marks of what
  /// was removed stay behind.
  template <class Predicate>
  void erase(uint64_t hash, const Predicate& is_meant) {
    Part& part = part_of(hash);
    auto* hole = const_cast<uint64_t*>(find_place(part, key_of(hash), is_meant));
    while (hole != nullptr) {
      const auto line = static_cast<uint32_t>((hole - part.places.get()) / kLinePlaces);
      uint64_t* const places = line_at(part, line);
      const bool was_full = is_full(places);
      uint64_t* const last = std::find(places, places + kLinePlaces, 0) - 1;
      *hole = *last;
      *last = 0;
      hole = was_full ? place_beyond(part, line) : nullptr;
      if (hole != nullptr) *last = *hole;
    }
    --part.used;
    --size_;
  }

  /// Calls `visit(hash, value)` for each; of the hash the low 72 - kValueBits bits are right.
  ///
  /// Lines are not visited in their order, but far apart: values in that order would crowd into the
  /// first lines of another part that grows while it is filled with them.
  template <class Visit>
  void for_each(const Visit& visit) const {
    for (uint64_t number = 0; number < kParts; ++number) {
      const Part& part = parts_[number];
      auto stride = static_cast<uint64_t>(0.618 * part.lines);
      while (std::gcd(stride, uint64_t{part.lines}) > 1) ++stride;
      for (uint64_t i = 0, line = 0; i < part.lines; ++i, line = (line + stride) % part.lines) {
        const uint64_t* const places = line_at(part, static_cast<uint32_t>(line));
        for (uint32_t k = 0; k < kLinePlaces && places[k] != 0; ++k)
          visit((places[k] >> kValueBits) << 8 | number, places[k] & kMaxValue);
      }
    }
  }

 private:
  struct Part {
    std::shared_ptr<uint64_t> places;
    uint32_t lines = 0;
    uint32_t used = 0;
  };

  static_assert(kValueBits >= 8 && kValueBits <= 32);
  static constexpr uint32_t kLinePlaces = 8;
  static constexpr size_t kLineBytes = kLinePlaces * sizeof(uint64_t);
  static uint64_t key_of(uint64_t hash) { return (hash >> 8) & (~uint64_t{0} >> kValueBits); }
  const Part& part_of(uint64_t hash) const { return parts_[hash % kParts]; }
  Part& part_of(uint64_t hash) { return parts_[hash % kParts]; }
  static uint32_t home(const Part& part, uint64_t key) {
    return static_cast<uint32_t>((key & 0xffffffff) * part.lines >> 32);
  }
  static uint32_t after(const Part& part, uint32_t i) { return i + 1 == part.lines ? 0 : i + 1; }
  static uint64_t* line_at(const Part& part, uint32_t line) {
    return part.places.get() + size_t{line} * kLinePlaces;
  }
  static std::span<const uint64_t> places_of(const Part& part) {
    return {part.places.get(), size_t{part.lines} * kLinePlaces};
  }
  // The free places of a line are its last ones.
  static bool is_full(const uint64_t* line) { return line[kLinePlaces - 1] != 0; }

  // The places of a line that have `key`, as bits; a free one has 0. Without a branch for each place:
  // the CPU cannot foresee which it is.
  static uint32_t fitting_places(const uint64_t* line, uint64_t key) {
#ifdef __SSE2__
    if constexpr (kValueBits == 32) {  // The keys are the high halves: four at a time.
      const auto* const pairs = reinterpret_cast<const __m128i*>(line);
      const __m128i wanted = _mm_set1_epi32(static_cast<int>(key));
      const auto four = [&](int i) {
        const __m128 low = _mm_castsi128_ps(_mm_loadu_si128(pairs + i));
        const __m128 high = _mm_castsi128_ps(_mm_loadu_si128(pairs + i + 1));
        const __m128 keys = _mm_shuffle_ps(low, high, _MM_SHUFFLE(3, 1, 3, 1));
        return _mm_cmpeq_epi32(_mm_castps_si128(keys), wanted);
      };
      const __m128i words = _mm_packs_epi32(four(0), four(2));
      return static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(words, _mm_setzero_si128())));
    }
#endif
    uint32_t fitting = 0;
    for (uint32_t i = 0; i < kLinePlaces; ++i)
      fitting |= static_cast<uint32_t>(line[i] >> kValueBits == key) << i;
    return fitting;
  }

  template <class Predicate>
  static const uint64_t* find_place(const Part& part, uint64_t key, const Predicate& is_meant) {
    if (part.lines == 0) return nullptr;
    for (uint32_t i = home(part, key);; i = after(part, i)) {
      const uint64_t* const line = line_at(part, i);
      for (uint32_t left = fitting_places(line, key); left != 0; left &= left - 1) {
        const uint64_t* const place = line + std::countr_zero(left);
        if (*place != 0 && is_meant(*place & kMaxValue)) return place;
      }
      if (!is_full(line)) return nullptr;
    }
  }

  // The first place behind `line` whose key belongs in it or before it; nullptr: there is none.
  static uint64_t* place_beyond(const Part& part, uint32_t line) {
    for (uint32_t i = after(part, line), distance = 1;; i = after(part, i), ++distance) {
      uint64_t* const places = line_at(part, i);
      for (uint32_t k = 0; k < kLinePlaces && places[k] != 0; ++k) {
        const uint32_t wanted = home(part, places[k] >> kValueBits);
        if ((i >= wanted ? i : i + part.lines) - wanted >= distance) return places + k;
      }
      if (!is_full(places)) return nullptr;
    }
  }

  static void put(Part& part, uint64_t place) {
    uint32_t i = home(part, place >> kValueBits);
    while (is_full(line_at(part, i))) i = after(part, i);
    uint64_t* const line = line_at(part, i);
    *std::find(line, line + kLinePlaces, 0) = place;
  }

  void grow(Part& part) {
    Part larger;
    larger.lines = part.lines + part.lines / 4 + 1;
    larger.used = part.used;
    larger.places = allocate(static_cast<size_t>(&part - parts_.data()), larger.lines);
    for (const uint64_t place : places_of(part)) {
      if (place != 0) put(larger, place);
    }
    // Of a region that others of its parts still hold.
    if (const auto memory = memory_of(part); is_mapped(memory.size())) discard(memory);
    part = std::move(larger);
  }

  static std::span<std::byte> memory_of(const Part& part) {
    return {reinterpret_cast<std::byte*>(part.places.get()), kLineBytes * part.lines};
  }

  // Whether parts of `bytes` bytes fill huge pages: together, or each some of its own.
  static bool is_mapped(size_t bytes) {
    return bytes * kParts >= kHugePage;
  }

  // Zeros, in huge pages where they fill some: a large part's own, or those of all parts of one
  // size together, which are about equally full.
  std::shared_ptr<uint64_t> allocate(size_t number, uint32_t lines) {
    const size_t bytes = kLineBytes * lines;
    if (!is_mapped(bytes)) {
      auto* const memory = static_cast<uint64_t*>(std::aligned_alloc(kLineBytes, bytes));
      if (memory == nullptr) throw std::bad_alloc();
      std::memset(memory, 0, bytes);
      return {memory, [](uint64_t* places) { std::free(places); }};
    }
    if (bytes >= kHugePage) {
      auto pages = std::make_shared<Pages>((bytes + 4095) / 4096 * 4096);
      auto* const places = reinterpret_cast<uint64_t*>(pages->data());
      return {std::move(pages), places};
    }
    auto region = regions_[lines].lock();
    if (!region) {
      region = std::make_shared<Pages>((bytes * kParts + kHugePage - 1) / kHugePage * kHugePage);
      std::erase_if(regions_, [](const auto& entry) { return entry.second.expired(); });
      regions_[lines] = region;
    }
    auto* const places = reinterpret_cast<uint64_t*>(region->data()) + number * lines * kLinePlaces;
    return {std::move(region), places};
  }

  std::array<Part, kParts> parts_;
  std::map<uint32_t, std::weak_ptr<Pages>> regions_;  // By lines of a part.
  int64_t size_ = 0;
};

}  // namespace cohort::ps
