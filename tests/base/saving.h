// SPDX-License-Identifier: Apache-2.0
// A checkpoint of small numbers, saved by ranks that are a loop.
#pragma once
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "cohort/base/stored_checkpoint.h"

namespace cohort {

inline std::vector<int32_t> numbers(int32_t first) {
  std::vector<int32_t> values(24);
  std::iota(values.begin(), values.end(), first);
  return values;
}

// Two parts of one tensor [4, 6], whose columns are sharded among `world_size` ranks.
class Saving {
 public:
  Saving(int64_t update, int world_size, int32_t first)
      : update_(update), world_size_(world_size), values_(numbers(first)) {}

  Manifest share(const std::string& folder, int rank) const {
    Manifest share{.update = update_};
    for (const char* part : {"a", "b"}) {
      std::vector<StoredShard> shards;
      for (int64_t row = 0; row < 4; ++row) {
        const int64_t begin = row * 6 + 6 * rank / world_size_;
        const int64_t end = row * 6 + 6 * (rank + 1) / world_size_;
        const auto elements = std::span(values_).subspan(static_cast<size_t>(begin),
                                                         static_cast<size_t>(end - begin));
        shards.push_back({"w", DType::kI32, {4, 6}, {begin, end}, std::as_bytes(elements)});
      }
      share.add(write_share(folder, part, shards, {update_, rank, world_size_}), folder);
    }
    return share;
  }

  void save(const std::string& folder) const {
    Manifest manifest{.update = update_};
    for (int rank = 0; rank < world_size_; ++rank) manifest.add(share(folder, rank), folder);
    commit_manifest(folder, manifest);
  }

 private:
  int64_t update_;
  int world_size_;
  std::vector<int32_t> values_;
};

inline std::vector<int32_t> read(StoredCheckpoint& checkpoint, const std::string& part,
                                 ElementRange range) {
  std::vector<int32_t> values;
  for (const auto bytes : checkpoint.elements(part, "w", range)) {
    const auto* first = reinterpret_cast<const int32_t*>(bytes.data());
    values.insert(values.end(), first, first + bytes.size() / sizeof(int32_t));
  }
  return values;
}

}  // namespace cohort
