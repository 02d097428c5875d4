// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/table/row_table.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/ps/id_hash.h"
#include "cohort/ps/table/hash_parts.h"
#include "cohort/ps/table/initial_weights.h"
#include "cohort/ps/table/least_keys.h"
#include "cohort/ps/table/row_slabs.h"
#include "cohort/ps/update_kernel.h"

namespace cohort::ps {
namespace {

constexpr int64_t kShare = 16;  // So much of a full table goes at once: a sixteenth.
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

bool always(uint64_t /*value*/) {
  return true;
}

// Lines at a time: a call of the library would cost as much as the copy of a row of 16.
void copy_floats(const float* from, size_t count, float* to) {
  constexpr size_t kLine = 16;
  for (; count >= kLine; count -= kLine, from += kLine, to += kLine)
    std::memcpy(to, from, kLine * sizeof(float));
  if (count > 0) std::memcpy(to, from, count * sizeof(float));
}

bool is_expired(const Eviction& eviction, uint32_t last_push, uint32_t pushes, uint32_t now) {
  const int64_t age = std::max<int64_t>(int64_t{now} - last_push, 0);
  if (eviction.time_to_live_s > 0 && age >= eviction.time_to_live_s) return true;
  if (eviction.minimum_score <= 0) return false;
  const double score = pushes * power(eviction.decay, age / 86400);
  return score < eviction.minimum_score;
}

}  // namespace

struct RowTable::Rows {
  Rows(const TableOptions& given, std::unique_ptr<SpillStore> spill_store)
      : options(given),
        width(static_cast<size_t>(given.width)),
        state_width(static_cast<size_t>(ps::state_width(given.rule.rule, given.width))),
        initial(given),
        slabs(static_cast<int64_t>(width + state_width)),
        spilled(std::move(spill_store)) {
    if (options.memory_cap_bytes == 0) return;
    const bool counted = options.entry.kind == EntryPolicy::Kind::kCount;
    const int64_t for_counts = counted ? options.memory_cap_bytes / 8 : 0;
    max_rows = (options.memory_cap_bytes - for_counts) / row_bytes(options);
    max_counts =
        static_cast<int64_t>(static_cast<double>(for_counts) / HashParts<8>::kMaxBytesPerValue);
  }

  int64_t size() const { return index.size(); }
  bool makes_room() const { return max_rows != kUnlimited && options.at_cap != AtCap::kRefuse; }

  RowView view(const Row& row) const {
    return {row.id,
            row.last_push,
            row.pushes,
            {row.floats(), width},
            {row.floats() + width, state_width}};
  }

  Row* find(uint64_t id, uint64_t hash) const {
    const uint64_t place = index.find(hash, [&](uint64_t value) { return at(value)->id == id; });
    return place != 0 ? at(place) : nullptr;
  }

  // The index holds a row's place plus 1.
  Row* at(uint64_t value) const { return slabs.at(static_cast<uint32_t>(value - 1)); }

  Row* make_row(uint64_t id, uint64_t hash) {
    const uint32_t place = slabs.allocate();
    index.insert(hash, uint64_t{place} + 1);
    Row* row = slabs.at(place);
    *row = {.id = id, .last_push = 0, .pushes = 0};
    return row;
  }

  void remove(uint32_t place) {
    const uint64_t value = uint64_t{place} + 1;
    index.erase(splitmix64_finalizer(slabs.at(place)->id),
                [&](uint64_t found) { return found == value; });
    slabs.free(place);
  }

  // Calls `work(i, hash, row or nullptr)` for each id in order. What the memory must fetch for it
  // is asked for before: its place in the index 2 x kAhead ids before, its row kAhead before. One id
  // at a time: what several ask for at once is more than the CPU has room for.
  template <class Work>
  void walk(std::span<const uint64_t> ids, const Work& work) const {
    constexpr size_t kAhead = 16;
    struct Asked {
      uint64_t hash;
      uint64_t value;
    };
    std::array<Asked, 2 * kAhead> asked{};
    const auto entry_of = [&](size_t i) -> Asked& { return asked[i % asked.size()]; };
    for (size_t i = 0; i < ids.size() + 2 * kAhead; ++i) {
      if (const size_t third = i - 2 * kAhead; third < ids.size()) {  // Not those before the first.
        const Asked& entry = entry_of(third);
        Row* row = entry.value != 0 ? at(entry.value) : nullptr;
        // `work` may have changed the table since.
        if (row == nullptr || row->id != ids[third] || row->pushes == 0)
          row = find(ids[third], entry.hash);
        work(third, entry.hash, row);
      }
      if (i < ids.size()) {
        Asked& entry = entry_of(i);
        entry.hash = splitmix64_finalizer(ids[i]);
        index.prefetch(entry.hash);
      }
      if (const size_t second = i - kAhead; second < ids.size()) {
        Asked& entry = entry_of(second);
        entry.value = index.find(entry.hash, always);  // Perhaps another id's.
        if (entry.value != 0) slabs.prefetch(static_cast<uint32_t>(entry.value - 1));
      }
    }
  }

  template <class Visit>
  void for_each_place(const Visit& visit) const {
    for (uint32_t place = 0; place < slabs.end(); ++place) {
      if (Row* row = slabs.at(place); row->pushes != 0) visit(place, *row);
    }
  }

  void begin_with(uint64_t id, std::span<float> weights, Unknown unknown) const {
    if (unknown == Unknown::kZeros || options.entry.kind != EntryPolicy::Kind::kAll) {
      std::fill(weights.begin(), weights.end(), 0.0F);
    } else {
      initial.fill(id, weights);
    }
  }

  bool passes_entry_policy(uint64_t id, uint64_t hash, int64_t step) {
    const EntryPolicy& entry = options.entry;
    if (entry.kind == EntryPolicy::Kind::kAll) return true;
    if (entry.kind == EntryPolicy::Kind::kProbability) {
      return uniform_of(options.seed, id, static_cast<uint64_t>(step)) < entry.probability;
    }
    const uint64_t before = counts.find(hash, always);
    if (before + 1 >= entry.pushes) {
      if (before > 0) counts.erase(hash, always);
      return true;
    }
    if (before > 0) {
      counts.replace(hash, before + 1, always);
    } else {
      if (counts.size() >= max_counts) halve_counts();
      counts.insert(hash, 1);
    }
    return false;
  }

  void halve_counts() {
    while (counts.size() > max_counts / 2) {
      HashParts<8> halved;
      counts.for_each([&](uint64_t hash, uint64_t pushes) {
        if (pushes > 1) halved.insert(hash, pushes / 2);
      });
      counts = std::move(halved);
    }
  }

  // Lets `ids` have rows, those there are still missing.
  void make_room(std::span<const uint64_t> ids) {
    const auto wanted = static_cast<int64_t>(ids.size());
    if (!makes_room() || size() + wanted <= max_rows) return;
    int64_t missing = 0;
    walk(ids, [&](size_t, uint64_t, const Row* row) { missing += row == nullptr ? 1 : 0; });
    if (size() + missing <= max_rows) return;
    // As if all were missing: rows of `ids` may be among those that go.
    const int64_t count = std::min(size(), std::max(size() / kShare, size() + wanted - max_rows));
    const bool spills = options.at_cap == AtCap::kSpill;
    const auto key_of = [&](const Row& row) -> OrderKey {
      const uint64_t age = row.last_push;
      const uint64_t use = row.pushes;
      return {spills ? age << 32 | use : use << 32 | age, row.id};
    };
    const OrderKey last = nth_key(
        [&](const auto& visit) {
          for_each_place([&](uint32_t, const Row& row) { visit(key_of(row)); });
        },
        count);
    std::vector<uint32_t> going;
    std::vector<RowView> views;
    const auto go = [&] {
      if (spills) spilled->put(views);
      for (const uint32_t place : going) remove(place);
      (spills ? events.demoted : events.evicted) += static_cast<int64_t>(going.size());
      going.clear();
      views.clear();
    };
    for_each_place([&](uint32_t place, const Row& row) {
      if (key_of(row) > last) return;
      going.push_back(place);
      views.push_back(view(row));
      if (going.size() == 4096) go();
    });
    go();
  }

  // Brings those of `ids` that the spill store has to memory.
  void promote(std::span<const uint64_t> ids) {
    if (!spilled || spilled->rows() == 0) return;
    std::vector<uint64_t> missing;
    walk(ids, [&](size_t i, uint64_t, const Row* row) {
      if (row == nullptr) missing.push_back(ids[i]);
    });
    std::sort(missing.begin(), missing.end());
    missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
    std::vector<uint64_t> found;
    spilled->get(missing, [&](size_t, const RowView& row) {
      put(row);
      found.push_back(row.id);
    });
    spilled->erase(found);
    events.promoted += static_cast<int64_t>(found.size());
  }

  void put(const RowView& from) {
    Row* row = make_row(from.id, splitmix64_finalizer(from.id));
    row->last_push = from.last_push;
    row->pushes = from.pushes;
    std::copy(from.weights.begin(), from.weights.end(), row->floats());
    std::copy(from.state.begin(), from.state.end(), row->floats() + width);
  }

  // What push() does with as many ids as there is room for at once.
  void push_some(std::span<const uint64_t> ids, const float* gradients,
                 const RuleConstants& constants, int64_t step, uint32_t now) {
    make_room(ids);
    promote(ids);
    const UpdateKernel update = *supported_update_kernels();
    walk(ids, [&](size_t i, uint64_t hash, Row* row) {
      if (row == nullptr) {
        if (size() >= max_rows || !passes_entry_policy(ids[i], hash, step)) {
          ++events.refused;
          return;
        }
        row = make_row(ids[i], hash);
        initial.fill(ids[i], {row->floats(), width});
        initialise_state(options.rule, {row->floats() + width, state_width});
        ++events.created;
      }
      update(constants, options.width, row->floats(), row->floats() + width, gradients + i * width);
      row->last_push = now;
      if (row->pushes != std::numeric_limits<uint32_t>::max()) ++row->pushes;
    });
  }

  // How many ids are handled at once: so few that room can be made for all.
  size_t portion(size_t all) const {
    return makes_room() ? static_cast<size_t>(std::max<int64_t>(1, max_rows / kShare)) : all;
  }

  void insert_some(std::span<const RowView> rows) {
    std::vector<uint64_t> ids;
    for (const RowView& row : rows) ids.push_back(row.id);
    make_room(ids);
    if (spilled) {
      spilled->get(ids, [&](size_t, const RowView& row) { refuse(row.id, "is there already"); });
    }
    walk(ids, [&](size_t i, uint64_t, const Row* there) {
      const RowView& row = rows[i];
      if (there != nullptr) refuse(row.id, "is there already");
      if (row.weights.size() != width || row.state.size() != state_width || row.pushes == 0) {
        refuse(row.id, "expected " + std::to_string(width) + " weights, " +
                           std::to_string(state_width) + " floats of state and 1 push, found " +
                           std::to_string(row.weights.size()) + ", " +
                           std::to_string(row.state.size()) + " and " + std::to_string(row.pushes));
      }
      if (size() >= max_rows) {
        refuse(row.id, "no room: " + std::to_string(size()) + " rows fill memory_cap_bytes, " +
                           std::to_string(options.memory_cap_bytes));
      }
      put(row);
    });
  }

  [[noreturn]] void refuse(uint64_t id, const std::string& why) const {
    TORCH_CHECK_VALUE(false, "table \"", options.name, "\": row ", id, ": ", why);
  }

  TableOptions options;
  size_t width;
  size_t state_width;
  InitialWeights initial;
  RowSlabs slabs;
  HashParts<32> index;  // Place in `slabs`, plus 1.
  HashParts<8> counts;  // Pushes of ids that have no row yet.
  std::unique_ptr<SpillStore> spilled;
  int64_t max_rows = kUnlimited;
  int64_t max_counts = kUnlimited;
  TableStatistics events;  // The counts of events alone.
};

RowTable::RowTable(const TableOptions& options, std::unique_ptr<SpillStore> spill_store) {
  validate(options);
  const bool spills = options.at_cap == AtCap::kSpill && options.memory_cap_bytes > 0;
  if (spills != (spill_store != nullptr)) {
    throw ConfigError("table \"" + options.name +
                      (spills
                           ? "\": at_cap spill: expected a spill store, found none"
                           : "\": expected no spill store without a memory cap and at_cap spill"));
  }
  rows_ = std::make_unique<Rows>(options, std::move(spill_store));
}
RowTable::~RowTable() = default;
RowTable::RowTable(RowTable&&) noexcept = default;

const TableOptions& RowTable::options() const {
  return rows_->options;
}

void RowTable::pull(std::span<const uint64_t> ids, std::span<float> weights,
                    Unknown unknown) const {
  const Rows& rows = *rows_;
  const size_t width = rows.width;
  std::vector<uint64_t> spilled_ids;
  std::vector<size_t> spilled_positions;
  const bool has_spilled_rows = rows.spilled && rows.spilled->rows() > 0;
  rows.walk(ids, [&](size_t i, uint64_t, const Row* row) {
    float* to = weights.data() + i * width;
    if (row != nullptr) {
      copy_floats(row->floats(), width, to);
      return;
    }
    rows.begin_with(ids[i], {to, width}, unknown);
    if (!has_spilled_rows) return;
    spilled_ids.push_back(ids[i]);
    spilled_positions.push_back(i);
  });
  if (spilled_ids.empty()) return;
  rows.spilled->get(spilled_ids, [&](size_t i, const RowView& row) {
    std::copy(row.weights.begin(), row.weights.end(),
              weights.begin() + static_cast<std::ptrdiff_t>(spilled_positions[i] * width));
  });
}

void RowTable::push(std::span<const uint64_t> ids, std::span<const float> gradients, int64_t step,
                    uint32_t now) {
  Rows& rows = *rows_;
  const RuleConstants constants = constants_of(rows.options.rule, step);
  const size_t portion = rows.portion(ids.size());
  for (size_t begin = 0; begin < ids.size(); begin += portion) {
    rows.push_some(ids.subspan(begin, std::min(portion, ids.size() - begin)),
                   gradients.data() + begin * rows.width, constants, step, now);
  }
}

void RowTable::evict(uint32_t now) {
  Rows& rows = *rows_;
  const Eviction& eviction = rows.options.eviction;
  if (eviction.time_to_live_s <= 0 && eviction.minimum_score <= 0) return;
  rows.for_each_place([&](uint32_t place, const Row& row) {
    if (!is_expired(eviction, row.last_push, row.pushes, now)) return;
    rows.remove(place);
    ++rows.events.evicted;
  });
  if (!rows.spilled) return;
  std::vector<uint64_t> expired;
  rows.spilled->for_each([&](const RowView& row) {
    if (is_expired(eviction, row.last_push, row.pushes, now)) expired.push_back(row.id);
  });
  rows.spilled->erase(expired);
  rows.events.evicted += static_cast<int64_t>(expired.size());
}

void RowTable::for_each(const std::function<void(const RowView&)>& visit) const {
  for_each_in_memory(visit);
  if (rows_->spilled) rows_->spilled->for_each(visit);
}

void RowTable::for_each_in_memory(const std::function<void(const RowView&)>& visit) const {
  rows_->for_each_place([&](uint32_t, const Row& row) { visit(rows_->view(row)); });
}

void RowTable::for_each_count(const std::function<void(uint64_t, uint32_t)>& visit) const {
  rows_->counts.for_each([&](uint64_t hash, uint64_t pushes) {
    visit(inverse_splitmix64_finalizer(hash), static_cast<uint32_t>(pushes));
  });
}

void RowTable::insert(std::span<const RowView> rows) {
  const size_t portion = rows_->portion(rows.size());
  for (size_t begin = 0; begin < rows.size(); begin += portion) {
    rows_->insert_some(rows.subspan(begin, std::min(portion, rows.size() - begin)));
  }
}

void RowTable::insert_count(uint64_t id, uint32_t pushes) {
  Rows& rows = *rows_;
  const EntryPolicy& entry = rows.options.entry;
  if (entry.kind != EntryPolicy::Kind::kCount || entry.pushes == 1 || pushes == 0) return;
  const uint64_t hash = splitmix64_finalizer(id);
  TORCH_CHECK_VALUE(rows.counts.find(hash, always) == 0, "table \"", rows.options.name,
                    "\": the count of id ", id, " is there already");
  if (rows.counts.size() >= rows.max_counts) rows.halve_counts();
  rows.counts.insert(hash, std::min(pushes, entry.pushes - 1));
}

TableStatistics RowTable::statistics() const {
  TableStatistics result = rows_->events;
  result.rows = rows_->size();
  result.spilled_rows = rows_->spilled ? rows_->spilled->rows() : 0;
  result.counted_ids = rows_->counts.size();
  result.bytes = rows_->slabs.bytes() + rows_->index.bytes() + rows_->counts.bytes();
  return result;
}

SpillStore* RowTable::spill_store() {
  return rows_->spilled.get();
}

}  // namespace cohort::ps
