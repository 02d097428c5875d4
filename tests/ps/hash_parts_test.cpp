// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/table/hash_parts.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <map>
#include <random>
#include <vector>

#include "cohort/ps/id_hash.h"
#include "cohort/ps/table/initial_weights.h"
#include "cohort/ps/table/least_keys.h"

#include "tests/support/resident.h"

namespace cohort::ps {
namespace hash_parts_test {

bool always(uint64_t /*value*/) {
  return true;
}

TEST(IdHashTest, UnmixUndoesMix) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 1000; ++i) {
    const uint64_t value = i < 64 ? uint64_t{1} << i : random();
    EXPECT_EQ(inverse_splitmix64_finalizer(splitmix64_finalizer(value)), value);
    EXPECT_EQ(splitmix64_finalizer(inverse_splitmix64_finalizer(value)), value);
  }
}

// Hashes of two parts and their last lines, so that most values are in later lines, round the end.
template <class Parts>
void expect_what_a_map_holds() {
  std::mt19937_64 random(2);
  Parts parts;
  std::map<uint64_t, uint64_t> map;
  for (int i = 0; i < 200'000; ++i) {
    const uint64_t hash = ((56 + random() % 8) << 34 | random() % 128 << 8) | random() % 2;
    const auto found = map.find(hash);
    ASSERT_EQ(parts.find(hash, always), found == map.end() ? 0 : found->second);
    if (found == map.end()) {
      map[hash] = 1 + random() % 255;
      parts.insert(hash, map[hash]);
    } else if (random() % 3 == 0) {
      parts.replace(hash, found->second = 1 + random() % 255, always);
    } else {
      parts.erase(hash, always);
      map.erase(found);
    }
  }
  std::map<uint64_t, uint64_t> all;
  parts.for_each([&](uint64_t hash, uint64_t value) { all[hash] = value; });
  EXPECT_EQ(all, map);
  EXPECT_EQ(parts.size(), static_cast<int64_t>(map.size()));
}

TEST(HashPartsTest, HoldsWhatAMapWouldThroughRandomChanges) {
  expect_what_a_map_holds<HashParts<8>>();
  expect_what_a_map_holds<HashParts<32>>();
}

// Two parts of one region, of which one grows.
TEST(HashPartsTest, APartThatGrewKeepsNoOldMemory) {
  HashParts<32> parts;
  uint64_t value = 0;
  const auto insert = [&](uint64_t part) {
    const uint64_t hash = splitmix64_finalizer(++value);
    parts.insert(hash - hash % HashParts<32>::kParts + part, value);
  };
  while (parts.bytes() < 3 << 20) {
    insert(0);
    insert(1);
  }
  const int64_t bytes = parts.bytes();
  const auto memory = parts.huge_pages();
  ASSERT_EQ(memory.size(), 1);
  while (parts.bytes() == bytes) insert(0);
  // Part 0's half, which the other part keeps mapped, but for the page that they share.
  EXPECT_LE(test::resident_bytes(memory[0].first(memory[0].size() / 2)), 4096);
}

TEST(HashPartsTest, ValuesOfOneKeyAreToldApartByTheCaller) {
  HashParts<32> parts;
  const uint64_t hash = splitmix64_finalizer(5);
  const uint64_t same_key = hash ^ uint64_t { 1 } << 60;  // Beyond the 40 bits that places keep.
  parts.insert(hash, 1);
  parts.insert(same_key, 2);
  const auto is = [](uint64_t wanted) { return [=](uint64_t value) { return value == wanted; }; };
  EXPECT_EQ(parts.find(hash, is(2)), 2);
  parts.erase(hash, is(1));
  EXPECT_EQ(parts.find(hash, is(1)), 0);
  EXPECT_EQ(parts.find(hash, always), 2);
}

// Where a part begins to be filled with what another visits, all of its lines get some.
TEST(HashPartsTest, ValuesAreVisitedAllOverAPart) {
  HashParts<32> parts;
  std::mt19937_64 random(4);
  for (uint64_t i = 1; i <= 100'000; ++i) parts.insert(random(), i);
  std::vector<uint64_t> quarters;  // Of one part's lines, where its values belong.
  parts.for_each([&](uint64_t hash, uint64_t) {
    if (hash % HashParts<32>::kParts == 7) quarters.push_back((hash >> 8 & 0xffffffff) >> 30);
  });
  const auto begun = static_cast<ptrdiff_t>(quarters.size() / 8);
  for (const uint64_t quarter : {0, 1, 2, 3})
    EXPECT_GT(std::count(quarters.begin(), quarters.begin() + begun, quarter), begun / 16);
}

TEST(HashPartsTest, AValueTakes10To13Bytes) {
  HashParts<32> parts;
  std::mt19937_64 random(3);
  for (uint64_t i = 1; i <= 400'000; ++i) {
    parts.insert(random(), i);
    if (i >= 100'000 && i % 10'000 == 0) {
      const double bytes = static_cast<double>(parts.bytes()) / static_cast<double>(i);
      EXPECT_GE(bytes, 10);
      EXPECT_LE(bytes, HashParts<32>::kMaxBytesPerValue + 0.5);
    }
  }
}

// From the allocator, from what parts share, in huge pages of its own: all that a part grows
// through.
TEST(HashPartsTest, EveryValueIsFoundWhileSomePartsAreMuchLarger) {
  HashParts<32> parts;
  const auto hash_of = [](uint64_t i) {
    const uint64_t part = i % 8 != 0 ? 3 : i % HashParts<32>::kParts;
    return splitmix64_finalizer(i) >> 8 << 8 | part;
  };
  const uint64_t values = 200'000;
  for (uint64_t i = 1; i <= values; ++i) parts.insert(hash_of(i), i);
  HashParts<32> moved = std::move(parts);
  for (uint64_t i = 1; i <= values; ++i) {
    ASSERT_EQ(moved.find(hash_of(i), [&](uint64_t value) { return value == i; }), i);
  }
  EXPECT_EQ(moved.size(), static_cast<int64_t>(values));
}

TEST(LeastKeysTest, FindsTheNthOfKeysThatShareManyDigits) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 30; ++round) {
    std::vector<OrderKey> keys;
    const uint64_t uses = 1 + random() % 3;
    const uint64_t seconds = uint64_t{1} << random() % 20;
    for (uint64_t id = 0; id < 3000; ++id) {
      keys.push_back({(1 + random() % uses) << 32 | (1'700'000'000 + random() % seconds),
                      splitmix64_finalizer(id)});
    }
    const size_t parts = 1 + random() % 5;
    const auto run = [&](const auto& work) {
      for (size_t part = 0; part < parts; ++part) work(part);
    };
    const auto scan = [&](size_t part, const auto& visit) {
      for (size_t i = part; i < keys.size(); i += parts) visit(keys[i]);
    };
    auto sorted = keys;
    std::sort(sorted.begin(), sorted.end());
    for (const int64_t count : {1, 2, 187, 1500, 3000}) {
      EXPECT_EQ(nth_key(parts, run, scan, count, 8), sorted[static_cast<size_t>(count - 1)]);
      EXPECT_EQ(nth_key(parts, run, scan, count), sorted[static_cast<size_t>(count - 1)]);
    }
  }
}

std::vector<float> weights_of(Initializer::Kind kind, uint64_t id, size_t width,
                              const std::string& table = "t", uint64_t seed = 1) {
  std::vector<float> weights(width);
  InitialWeights({.name = table, .seed = seed, .initializer = {.kind = kind, .scale = 0.5F}})
      .fill(id, weights);
  return weights;
}

TEST(InitialWeightsTest, TheirBitsAreTheseEverywhere) {
  EXPECT_EQ(weights_of(Initializer::Kind::kUniform, 1, 3),
            (std::vector<float>{0x1.7af688p-3F, 0x1.756b8p-3F, 0x1.1b672p-3F}));
  EXPECT_EQ(weights_of(Initializer::Kind::kNormal, 1, 3),
            (std::vector<float>{0x1.ed67bep-3F, 0x1.e59df8p-3F, 0x1.6aa1c8p-3F}));
  EXPECT_EQ(uniform_of(1, 2, 3), 0x1.5c62f5b090176p-1);
}

TEST(InitialWeightsTest, HangOnSeedTableAndIdAndNotOnTheWidth) {
  using Kind = Initializer::Kind;
  const auto weights = weights_of(Kind::kUniform, 9, 8);
  EXPECT_NE(weights, weights_of(Kind::kUniform, 10, 8));
  EXPECT_NE(weights, weights_of(Kind::kUniform, 9, 8, "u"));
  EXPECT_NE(weights, weights_of(Kind::kUniform, 9, 8, "t", 2));
  auto wide = weights_of(Kind::kUniform, 9, 13);
  wide.resize(8);
  EXPECT_EQ(weights, wide);
}

TEST(InitialWeightsTest, FollowTheirDistribution) {
  std::vector<double> uniform;
  std::vector<double> normal;
  for (uint64_t id = 0; id < 20'000; ++id) {
    for (const float x : weights_of(Initializer::Kind::kUniform, id, 10)) uniform.push_back(x);
    for (const float x : weights_of(Initializer::Kind::kNormal, id, 10)) normal.push_back(x);
  }
  std::sort(uniform.begin(), uniform.end());
  std::sort(normal.begin(), normal.end());
  const auto count = static_cast<double>(uniform.size());
  double most_uniform = 0;
  double most_normal = 0;
  for (size_t i = 0; i < uniform.size(); ++i) {
    const double rank = (static_cast<double>(i) + 0.5) / count;
    most_uniform = std::max(most_uniform, std::abs(rank - (uniform[i] + 0.5)));
    most_normal =
        std::max(most_normal, std::abs(rank - 0.5 * std::erfc(-normal[i] / 0.5 / std::sqrt(2.0))));
  }
  // Kolmogorov and Smirnov: above 1.95 / sqrt(n) once in a thousand. The numbers are fixed.
  EXPECT_LT(most_uniform, 1.95 / std::sqrt(count));
  EXPECT_LT(most_normal, 1.95 / std::sqrt(count));
  EXPECT_GE(uniform.front(), -0.5);
  EXPECT_LT(uniform.back(), 0.5);
}

}  // namespace hash_parts_test
}  // namespace cohort::ps
