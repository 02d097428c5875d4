// SPDX-License-Identifier: Apache-2.0
// Tables to compare, and pushes to fill them with.
#pragma once
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "cohort/ps/table/row_table.h"

namespace cohort::ps {

/// A row without spans.
struct OwnedRow {
  uint32_t last_push = 0;
  uint32_t pushes = 0;
  std::vector<float> weights{};
  std::vector<float> state{};
  bool operator==(const OwnedRow&) const = default;
};

inline std::map<uint64_t, OwnedRow> rows_of(const RowTable& table) {
  std::map<uint64_t, OwnedRow> rows;
  table.for_each([&](const RowView& row) {
    const bool is_new = rows.emplace(row.id, OwnedRow{row.last_push,
                                                      row.pushes,
                                                      {row.weights.begin(), row.weights.end()},
                                                      {row.state.begin(), row.state.end()}})
                            .second;
    if (!is_new) throw std::runtime_error("a row is shown twice");
  });
  return rows;
}

inline std::map<uint64_t, uint32_t> counts_of(const RowTable& table) {
  std::map<uint64_t, uint32_t> counts;
  table.for_each_count([&](uint64_t id, uint32_t pushes) { counts[id] = pushes; });
  return counts;
}

/// One push of a stream that hangs on its seed alone.
struct Push {
  std::vector<uint64_t> ids{};
  std::vector<float> gradients{};
  int64_t step = 0;
  uint32_t now = 0;
};

/// Distinct ids below `num_ids`, the lower ones more often; a push every ten minutes.
inline std::vector<Push> some_pushes(int64_t count, uint64_t num_ids, int64_t width,
                                     size_t batch = 50) {
  std::mt19937_64 random(11);
  std::normal_distribution<float> normal;
  std::vector<Push> pushes;
  for (int64_t step = 1; step <= count; ++step) {
    Push push{.step = step, .now = 1'700'000'000 + static_cast<uint32_t>(step) * 600};
    std::set<uint64_t> seen;
    while (push.ids.size() < batch) {
      const uint64_t limit = random() % num_ids + 1;
      const uint64_t id = random() % limit;
      if (seen.insert(id).second) push.ids.push_back(id * 0x10001);
    }
    push.gradients.resize(batch * static_cast<size_t>(width));
    for (float& gradient : push.gradients) gradient = normal(random);
    pushes.push_back(push);
  }
  return pushes;
}

inline void apply(RowTable& table, const Push& push) {
  table.push(push.ids, push.gradients, push.step, push.now);
}

}  // namespace cohort::ps
