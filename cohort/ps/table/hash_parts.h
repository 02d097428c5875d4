// SPDX-License-Identifier: Apache-2.0
// A hash table of 8-byte places in many small parts, by mixed hashes (id_hash.h).
#pragma once
#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include "cohort/ps/table/pages.h"

namespace cohort::ps {

/// Maps hashes to values of `kValueBits` bits, never 0, beside which a place keeps as much of the
/// hash as fits: several values may seem to fit one hash, and the caller tells which is meant.
///
/// Open addressing in 256 parts by the hash's low 8 bits, each 0.64 to 0.8 full: 10 to 12.5 bytes a
/// value. A part grows alone, by a quarter: no push waits for all of them. Of a place's key the low
/// 32 bits say where it belongs: no row is read to move it.
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
    for (const Part& part : parts_) sum += static_cast<int64_t>(sizeof(uint64_t) * part.capacity);
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
    // A number: an empty part has no places, and another one may end before the last of these.
    const auto first = reinterpret_cast<uintptr_t>(part.places.get() + home(part, key_of(hash)));
    prefetch_line(reinterpret_cast<const void*>(first));
    prefetch_line(reinterpret_cast<const void*>(first + (kNear - 1) * sizeof(uint64_t)));
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
    if ((uint64_t{part.used} + 1) * 5 > uint64_t{part.capacity} * 4) grow(part);
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

  /// Removes the value that find() gives; it is there. Later places of the run move up: no marks of
  /// what was removed stay behind.
  template <class Predicate>
  void erase(uint64_t hash, const Predicate& is_meant) {
    Part& part = part_of(hash);
    uint64_t* places = part.places.get();
    uint32_t hole = static_cast<uint32_t>(find_place(part, key_of(hash), is_meant) - places);
    for (uint32_t next = after(part, hole); places[next] != 0; next = after(part, next)) {
      const uint32_t wanted = home(part, places[next] >> kValueBits);
      // Does `wanted` lie behind the hole, on the way round from it to `next`?
      const bool stays =
          hole < next ? (hole < wanted && wanted <= next) : (hole < wanted || wanted <= next);
      if (stays) continue;
      places[hole] = places[next];
      hole = next;
    }
    places[hole] = 0;
    --part.used;
    --size_;
  }

  /// Calls `visit(hash, value)` for each; of the hash the low 72 - kValueBits bits are right.
  template <class Visit>
  void for_each(const Visit& visit) const {
    for (uint64_t number = 0; number < kParts; ++number) {
      const Part& part = parts_[number];
      for (uint32_t i = 0; i < part.capacity; ++i) {
        const uint64_t place = part.places.get()[i];
        if (place != 0) visit((place >> kValueBits) << 8 | number, place & kMaxValue);
      }
    }
  }

 private:
  struct Part {
    std::shared_ptr<uint64_t> places;
    uint32_t capacity = 0;
    uint32_t used = 0;
  };

  static_assert(kValueBits >= 8 && kValueBits <= 32);
  static constexpr uint32_t kNear = 4;  // Places that are looked at together.
  static uint64_t key_of(uint64_t hash) { return (hash >> 8) & (~uint64_t{0} >> kValueBits); }
  const Part& part_of(uint64_t hash) const { return parts_[hash % kParts]; }
  Part& part_of(uint64_t hash) { return parts_[hash % kParts]; }
  static uint32_t home(const Part& part, uint64_t key) {
    return static_cast<uint32_t>((key & 0xffffffff) * part.capacity >> 32);
  }
  static uint32_t after(const Part& part, uint32_t i) { return i + 1 == part.capacity ? 0 : i + 1; }

  template <class Predicate>
  static const uint64_t* find_place(const Part& part, uint64_t key, const Predicate& is_meant) {
    if (part.capacity == 0) return nullptr;
    const uint64_t* places = part.places.get();
    uint32_t i = home(part, key);
    // Of a run, whose length the CPU cannot foresee, the first few without a branch. None behind a
    // free place has this key.
    if (i + kNear <= part.capacity) {
      const auto fits = [&](uint32_t j) {
        return static_cast<uint32_t>(places[i + j] >> kValueBits == key) << j;
      };
      const uint32_t fitting = fits(0) | fits(1) | fits(2) | fits(3);
      if (fitting != 0) {
        const uint64_t* place = places + i + std::countr_zero(fitting);
        if (*place != 0 && is_meant(*place & kMaxValue)) return place;
      }
    }
    for (; places[i] != 0; i = after(part, i)) {
      if (places[i] >> kValueBits == key && is_meant(places[i] & kMaxValue)) return places + i;
    }
    return nullptr;
  }

  static void put(Part& part, uint64_t place) {
    uint64_t* places = part.places.get();
    uint32_t i = home(part, place >> kValueBits);
    while (places[i] != 0) i = after(part, i);
    places[i] = place;
  }

  void grow(Part& part) {
    Part larger;
    larger.capacity = part.capacity + part.capacity / 4 + 8;
    larger.used = part.used;
    larger.places = allocate(static_cast<size_t>(&part - parts_.data()), larger.capacity);
    for (uint32_t i = 0; i < part.capacity; ++i) {
      if (const uint64_t place = part.places.get()[i]; place != 0) put(larger, place);
    }
    // Of a region that others of its parts still hold.
    if (const auto memory = memory_of(part); is_mapped(memory.size())) discard(memory);
    part = std::move(larger);
  }

  static std::span<std::byte> memory_of(const Part& part) {
    return {reinterpret_cast<std::byte*>(part.places.get()), sizeof(uint64_t) * part.capacity};
  }

  // Whether parts of `bytes` bytes fill huge pages: together, or each some of its own.
  static bool is_mapped(size_t bytes) { return bytes * kParts >= kHugePage; }

  // Zeros, in huge pages where they fill some: a large part's own, or those of all parts of one
  // capacity together, which are about equally full.
  std::shared_ptr<uint64_t> allocate(size_t number, uint32_t capacity) {
    const size_t bytes = sizeof(uint64_t) * capacity;
    if (!is_mapped(bytes)) {
      auto* const memory = static_cast<uint64_t*>(std::calloc(capacity, sizeof(uint64_t)));
      if (memory == nullptr) throw std::bad_alloc();
      return {memory, [](uint64_t* places) { std::free(places); }};
    }
    if (bytes >= kHugePage) {
      auto pages = std::make_shared<Pages>((bytes + 4095) / 4096 * 4096);
      auto* const places = reinterpret_cast<uint64_t*>(pages->data());
      return {std::move(pages), places};
    }
    auto region = regions_[capacity].lock();
    if (!region) {
      region = std::make_shared<Pages>((bytes * kParts + kHugePage - 1) / kHugePage * kHugePage);
      std::erase_if(regions_, [](const auto& entry) { return entry.second.expired(); });
      regions_[capacity] = region;
    }
    auto* const places = reinterpret_cast<uint64_t*>(region->data()) + number * capacity;
    return {std::move(region), places};
  }

  std::array<Part, kParts> parts_;
  std::map<uint32_t, std::weak_ptr<Pages>> regions_;  // By capacity.
  int64_t size_ = 0;
};

}  // namespace cohort::ps
