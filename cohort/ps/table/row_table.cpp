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
#include "cohort/ps/table/table_threads.h"
#include "cohort/ps/update_kernel.h"
#include "cohort/ps/wire/bfloat16.h"

namespace cohort::ps {
namespace {

constexpr int64_t kShare = 16;  // So much of a full table goes at once: a sixteenth.
// For each thread: the calling thread handles fewer alone.
constexpr size_t kFewIds = 1024;          // of a pull or a push
constexpr size_t kFewRowBytes = 1 << 16;  // of rows that are loaded
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

bool always(uint64_t /*value*/) {
  return true;
}

// Lines at a time: a call of the library would cost as much as the copy of a row of 16.
void put_weights(const float* from, size_t count, float* to) {
  constexpr size_t kLine = 16;
  for (; count >= kLine; count -= kLine, from += kLine, to += kLine)
    std::memcpy(to, from, kLine * sizeof(float));
  if (count > 0) std::memcpy(to, from, count * sizeof(float));
}

void put_weights(const float* from, size_t count, uint16_t* to) {
  round_to_bfloat16({from, count}, {to, count});
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
  // What one thread has: the rows and counts of its parts of the hashes. In lines of its own.
  struct alignas(64) Group {
    explicit Group(int64_t floats) : slabs(floats) {}

    // Its index holds a row's place plus 1.
    Row* at(uint64_t value) const { return slabs.at(static_cast<uint32_t>(value - 1)); }

    uint64_t find_value(uint64_t id, uint64_t hash) const {
      return index.find(hash, [&](uint64_t value) { return at(value)->id == id; });
    }
    Row* find(uint64_t id, uint64_t hash) const {
      const uint64_t value = find_value(id, hash);
      return value != 0 ? at(value) : nullptr;
    }

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

    template <class Visit>
    void for_each_place(const Visit& visit) const {
      for (uint32_t place = 0; place < slabs.end(); ++place) {
        if (Row* row = slabs.at(place); row->pushes != 0) visit(place, *row);
      }
    }

    RowSlabs slabs;
    HashParts<32> index;     // Place in `slabs`, plus 1.
    HashParts<8> counts;     // Pushes of ids that have no row yet.
    TableStatistics events;  // The counts of events alone.
  };

  Rows(const TableOptions& given, std::unique_ptr<SpillStore> spill_store,
       std::shared_ptr<TableThreads> table_threads)
      : options(given),
        width(static_cast<size_t>(given.width)),
        state_width(static_cast<size_t>(ps::state_width(given.rule.rule, given.width))),
        initial(given),
        spilled(std::move(spill_store)),
        threads(std::move(table_threads)) {
    for (size_t number = 0; number < (threads ? threads->count() : 1); ++number)
      groups.push_back(std::make_unique<Group>(static_cast<int64_t>(width + state_width)));
    if (options.memory_cap_bytes == 0) return;
    const bool counted = options.entry.kind == EntryPolicy::Kind::kCount;
    const int64_t for_counts = counted ? options.memory_cap_bytes / 8 : 0;
    max_rows = (options.memory_cap_bytes - for_counts) / row_bytes(options);
    max_counts =
        static_cast<int64_t>(static_cast<double>(for_counts) / HashParts<8>::kMaxBytesPerValue);
  }

  int64_t size() const {
    int64_t rows = 0;
    for (const auto& group : groups) rows += group->index.size();
    return rows;
  }
  int64_t counted_ids() const {
    int64_t ids = 0;
    for (const auto& group : groups) ids += group->counts.size();
    return ids;
  }
  bool is_full() const { return max_rows != kUnlimited && size() >= max_rows; }
  bool makes_room() const { return max_rows != kUnlimited && options.at_cap != AtCap::kRefuse; }

  RowView view(const Row& row) const {
    return {row.id,
            row.last_push,
            row.pushes,
            {row.floats(), width},
            {row.floats() + width, state_width}};
  }

  // The group that has a hash's part. One after the other: their indexes fill whole pages.
  size_t number_of(uint64_t hash) const {
    constexpr uint64_t kParts = HashParts<32>::kParts;
    return hash % kParts * groups.size() / kParts;
  }

  // Calls `work(number)` for each group, at the same time.
  template <class Work>
  void run(const Work& work) const {
    if (groups.size() == 1) return work(0);
    threads->run(work);
  }

  // Whether `ids` are few: to wake threads would take longer than they save.
  bool are_few(size_t ids) const { return groups.size() == 1 || ids < kFewIds * groups.size(); }
  // A file of wide rows is loaded in blocks of few rows, of which each takes long.
  bool are_few_rows(size_t count) const {
    const size_t bytes = count * (width + state_width) * sizeof(float);
    return groups.size() == 1 || bytes < kFewRowBytes * groups.size();
  }

  // Calls `work(i, hash, row or nullptr, group)` for each i in [0, count) in order. What the memory
  // must fetch for it is asked for before: its place in the index 2 x kAhead ids before, its row
  // kAhead before. A block's requests follow each other, so that pages that the CPU does not know
  // are looked up together: an AMD CPU begins little behind a prefetch that waits for its page. For
  // the requests of more ids at once a CPU has no room.
  // The functions are copies, and have copies of what they read: `work` writes memory that the
  // compiler cannot tell from what is reached through a reference.
  template <class IdAt, class GroupOf, class Work>
  static void walk(size_t count, IdAt id_at, GroupOf group_of, Work work) {
    constexpr size_t kAhead = 16, kBlock = 8;
    struct Asked {
      uint64_t hash;
      uint64_t value;
    };
    std::array<Asked, 2 * kAhead> asked{};
    const auto entry_of = [&](size_t i) -> Asked& { return asked[i % asked.size()]; };
    for (size_t begin = 0; begin < count + 2 * kAhead; begin += kBlock) {
      // Numbers before the first id wrap around, to far beyond the last.
      for (size_t k = 0; k < kBlock; ++k) {
        const size_t third = begin + k - 2 * kAhead;
        if (third >= count) continue;
        const Asked& entry = entry_of(third);
        Group& group = group_of(entry.hash);
        Row* row = entry.value != 0 ? group.at(entry.value) : nullptr;
        // `work` may have changed the table since.
        if (row == nullptr || row->id != id_at(third) || row->pushes == 0)
          row = group.find(id_at(third), entry.hash);
        work(third, entry.hash, row, group);
      }
      for (size_t k = 0; k < kBlock && begin + k < count; ++k) {
        Asked& entry = entry_of(begin + k);
        entry.hash = splitmix64_finalizer(id_at(begin + k));
        group_of(entry.hash).index.prefetch(entry.hash);
      }
      for (size_t k = 0; k < kBlock; ++k) {
        const size_t second = begin + k - kAhead;
        if (second >= count) continue;
        Asked& entry = entry_of(second);
        entry.value = group_of(entry.hash).index.find(entry.hash, always);  // Perhaps another id's.
      }
      for (size_t k = 0; k < kBlock; ++k) {
        const size_t second = begin + k - kAhead;
        if (second >= count || entry_of(second).value == 0) continue;
        const Asked& entry = entry_of(second);
        group_of(entry.hash).slabs.prefetch(static_cast<uint32_t>(entry.value - 1));
      }
    }
  }

  // All ids, by the calling thread.
  template <class Work>
  void walk_all(std::span<const uint64_t> ids, const Work& work) const {
    const auto id_at = [ids](size_t i) { return ids[i]; };
    if (groups.size() == 1) {
      Group* const all = groups.front().get();
      return walk(
          ids.size(), id_at, [all](uint64_t) -> Group& { return *all; }, work);
    }
    walk(
        ids.size(), id_at, [this](uint64_t hash) -> Group& { return *groups[number_of(hash)]; },
        work);
  }

  // Those of `ids` that are one group's.
  template <class Work>
  void walk_own(size_t number, std::span<const uint64_t> ids, const Work& work) const {
    Group* const group = groups[number].get();
    std::array<uint32_t, 4096> own{};
    for (size_t begin = 0; begin < ids.size(); begin += own.size()) {
      const auto some = ids.subspan(begin, std::min(own.size(), ids.size() - begin));
      size_t count = 0;
      // Without a branch: nobody foresees whose an id is.
      for (uint32_t i = 0; i < some.size(); ++i) {
        own[count] = i;
        count += number_of(splitmix64_finalizer(some[i])) == number ? 1 : 0;
      }
      walk(
          count, [some, &own](size_t i) { return some[own[i]]; },
          [group](uint64_t) -> Group& { return *group; },
          [begin, &own, &work](size_t i, uint64_t hash, Row* row, Group& its) {
            work(begin + own[i], hash, row, its);
          });
    }
  }

  // Calls `work(i, hash, row or nullptr, group)` for each id; of one group in order. `divided`: each
  // thread its own group's.
  template <class Work>
  void write(std::span<const uint64_t> ids, bool divided, const Work& work) const {
    if (!divided) return walk_all(ids, work);
    run([&](size_t number) { walk_own(number, ids, work); });
  }

  // Calls `work(part, i, hash, row or nullptr)` for each id. Nothing is written to the table: each
  // thread takes a part of the ids as they lie, part 0 the first ones.
  template <class Work>
  void read(std::span<const uint64_t> ids, const Work& work) const {
    const auto read_part = [&](size_t part, size_t begin, size_t end) {
      walk_all(ids.subspan(begin, end - begin),
               [=](size_t i, uint64_t hash, const Row* row, const Group&) {
                 work(part, begin + i, hash, row);
               });
    };
    if (are_few(ids.size())) return read_part(0, 0, ids.size());
    const size_t parts = groups.size();
    run([&](size_t part) {
      read_part(part, ids.size() * part / parts, ids.size() * (part + 1) / parts);
    });
  }

  void begin_with(uint64_t id, float* weights, Unknown unknown) const {
    if (unknown == Unknown::kZeros || options.entry.kind != EntryPolicy::Kind::kAll) {
      std::fill_n(weights, width, 0.0F);
    } else {
      initial.fill(id, {weights, width});
    }
  }
  void begin_with(uint64_t id, uint16_t* bfloat16s, Unknown unknown) const {
    std::vector<float> weights(width);
    begin_with(id, weights.data(), unknown);
    put_weights(weights.data(), width, bfloat16s);
  }

  // `to`: ids.size() x width values, float32 or bfloat16.
  template <class Value>
  void pull(std::span<const uint64_t> ids, Value* to, Unknown unknown) const {
    const bool has_spilled_rows = spilled && spilled->rows() > 0;
    std::vector<std::vector<size_t>> missing(has_spilled_rows ? groups.size() : 0);
    read(ids,
         [=, this, row_width = width, &missing](size_t part, size_t i, uint64_t, const Row* row) {
           Value* const its = to + i * row_width;
           if (row != nullptr) {
             put_weights(row->floats(), row_width, its);
             return;
           }
           begin_with(ids[i], its, unknown);
           if (has_spilled_rows) missing[part].push_back(i);
         });
    std::vector<uint64_t> spilled_ids;
    std::vector<size_t> spilled_positions;
    for (const auto& positions : missing) {
      for (const size_t i : positions) {
        spilled_ids.push_back(ids[i]);
        spilled_positions.push_back(i);
      }
    }
    if (spilled_ids.empty()) return;
    spilled->get(spilled_ids, [&](size_t i, const RowView& row) {
      put_weights(row.weights.data(), width, to + spilled_positions[i] * width);
    });
  }

  // `divided`: there is room for the counts of all ids.
  bool passes_entry_policy(Group& group, uint64_t id, uint64_t hash, int64_t step, bool divided) {
    const EntryPolicy& entry = options.entry;
    if (entry.kind == EntryPolicy::Kind::kAll) return true;
    if (entry.kind == EntryPolicy::Kind::kProbability) {
      return uniform_of(options.seed, id, static_cast<uint64_t>(step)) < entry.probability;
    }
    HashParts<8>& counts = group.counts;
    const uint64_t before = counts.find(hash, always);
    if (before + 1 >= entry.pushes) {
      if (before > 0) counts.erase(hash, always);
      return true;
    }
    if (before > 0) {
      counts.replace(hash, before + 1, always);
    } else {
      if (!divided) make_room_for_count();
      counts.insert(hash, 1);
    }
    return false;
  }

  void make_room_for_count() {
    if (max_counts == kUnlimited || counted_ids() < max_counts) return;
    while (counted_ids() > max_counts / 2) {
      for (const auto& group : groups) {
        HashParts<8> halved;
        group->counts.for_each([&](uint64_t hash, uint64_t pushes) {
          if (pushes > 1) halved.insert(hash, pushes / 2);
        });
        group->counts = std::move(halved);
      }
    }
  }

  // Whether rows for all of `ids` fit beside those that are there.
  bool has_room(std::span<const uint64_t> ids) const {
    if (max_rows == kUnlimited) return true;
    const int64_t rows = size();
    if (rows + static_cast<int64_t>(ids.size()) <= max_rows) return true;
    struct alignas(64) Missing {
      int64_t ids = 0;
    };
    std::vector<Missing> missing(groups.size());
    read(ids, [&](size_t part, size_t, uint64_t, const Row* row) {
      missing[part].ids += row == nullptr ? 1 : 0;
    });
    int64_t all = 0;
    for (const Missing& its : missing) all += its.ids;
    return rows + all <= max_rows;
  }

  // Whether a push of `ids` gives the same table if each thread takes those of its group. Not where
  // the table, or its counts, may get full on the way: then it matters whose turn is first.
  bool can_divide_push(std::span<const uint64_t> ids) const {
    if (are_few(ids.size())) return false;
    const auto count = static_cast<int64_t>(ids.size());
    if (options.entry.kind == EntryPolicy::Kind::kCount && max_counts != kUnlimited &&
        counted_ids() + count > max_counts)
      return false;
    return makes_room() || is_full() || has_room(ids);  // make_room() made it; nothing goes in.
  }

  // Lets `ids` have rows, those there are still missing.
  void make_room(std::span<const uint64_t> ids) {
    if (!makes_room() || has_room(ids)) return;
    // As if all were missing: rows of `ids` may be among those that go.
    const auto wanted = static_cast<int64_t>(ids.size());
    const int64_t count = std::min(size(), std::max(size() / kShare, size() + wanted - max_rows));
    const bool spills = options.at_cap == AtCap::kSpill;
    const auto key_of = [&](const Row& row) -> OrderKey {
      const uint64_t age = row.last_push;
      const uint64_t use = row.pushes;
      return {spills ? age << 32 | use : use << 32 | age, row.id};
    };
    const OrderKey last = nth_key(
        groups.size(), [&](const auto& work) { run(work); },
        [&](size_t number, const auto& visit) {
          groups[number]->for_each_place([&](uint32_t, const Row& row) { visit(key_of(row)); });
        },
        count);
    if (spills) {
      for (const auto& group : groups)
        spill(*group, [&](const Row& row) { return key_of(row) <= last; });
      return;
    }
    run([&](size_t number) {
      Group& group = *groups[number];
      group.for_each_place([&](uint32_t place, const Row& row) {
        if (key_of(row) > last) return;
        group.remove(place);
        ++group.events.evicted;
      });
    });
  }

  // Moves rows to the spill store, which is the calling thread's alone.
  template <class Predicate>
  void spill(Group& group, const Predicate& goes_out) {
    std::vector<uint32_t> going;
    std::vector<RowView> views;
    const auto go = [&] {
      spilled->put(views);
      for (const uint32_t place : going) group.remove(place);
      group.events.demoted += static_cast<int64_t>(going.size());
      going.clear();
      views.clear();
    };
    group.for_each_place([&](uint32_t place, const Row& row) {
      if (!goes_out(row)) return;
      going.push_back(place);
      views.push_back(view(row));
      if (going.size() == 4096) go();
    });
    go();
  }

  // Brings those of `ids` that the spill store has to memory.
  void promote(std::span<const uint64_t> ids) {
    if (!spilled || spilled->rows() == 0) return;
    std::vector<std::vector<uint64_t>> missing_of_parts(groups.size());
    read(ids, [&](size_t part, size_t i, uint64_t, const Row* row) {
      if (row == nullptr) missing_of_parts[part].push_back(ids[i]);
    });
    std::vector<uint64_t> missing;
    for (const auto& its : missing_of_parts) missing.insert(missing.end(), its.begin(), its.end());
    std::sort(missing.begin(), missing.end());
    missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
    std::vector<uint64_t> found;
    spilled->get(missing, [&](size_t, const RowView& row) {
      const uint64_t hash = splitmix64_finalizer(row.id);
      put(*groups[number_of(hash)], hash, row);
      found.push_back(row.id);
    });
    spilled->erase(found);
    groups.front()->events.promoted += static_cast<int64_t>(found.size());
  }

  void put(Group& group, uint64_t hash, const RowView& from) const {
    Row* row = group.make_row(from.id, hash);
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
    const bool divided = can_divide_push(ids);
    const bool stays_full = divided && is_full();
    write(ids, divided, [&](size_t i, uint64_t hash, Row* row, Group& group) {
      if (row == nullptr) {
        const bool full = divided ? stays_full : is_full();
        if (full || !passes_entry_policy(group, ids[i], hash, step, divided)) {
          ++group.events.refused;
          return;
        }
        row = group.make_row(ids[i], hash);
        initial.fill(ids[i], {row->floats(), width});
        initialise_state(options.rule, {row->floats() + width, state_width});
        ++group.events.created;
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

  bool has_form(const RowView& row) const {
    return row.weights.size() == width && row.state.size() == state_width && row.pushes != 0;
  }

  void insert_some(std::span<const RowView> rows) {
    std::vector<uint64_t> ids;
    for (const RowView& row : rows) ids.push_back(row.id);
    make_room(ids);
    if (spilled) {
      spilled->get(ids, [&](size_t, const RowView& row) { refuse(row.id, "is there already"); });
    }
    const bool divided = !are_few_rows(rows.size()) && (makes_room() || has_room(ids));
    // Of each group the first row that is refused; those after it stay out.
    std::vector<size_t> refused(groups.size(), rows.size());
    write(ids, divided, [&](size_t i, uint64_t hash, const Row* there, Group& group) {
      size_t& first = refused[number_of(hash)];
      if (first != rows.size()) return;
      if (there != nullptr || !has_form(rows[i]) || (!divided && is_full())) {
        first = i;
        return;
      }
      put(group, hash, rows[i]);
    });
    const size_t first = *std::min_element(refused.begin(), refused.end());
    if (first == rows.size()) return;
    // As if one group had them all: what others took after the first one that is refused goes again.
    for (size_t i = first + 1; i < rows.size(); ++i) {
      const uint64_t hash = splitmix64_finalizer(ids[i]);
      const size_t number = number_of(hash);
      if (i >= refused[number]) continue;
      Group& group = *groups[number];
      group.remove(static_cast<uint32_t>(group.find_value(ids[i], hash) - 1));
    }
    refuse(rows[first]);
  }

  [[noreturn]] void refuse(const RowView& row) const {
    const uint64_t hash = splitmix64_finalizer(row.id);
    if (groups[number_of(hash)]->find(row.id, hash) != nullptr) refuse(row.id, "is there already");
    if (!has_form(row)) {
      refuse(row.id, "expected " + std::to_string(width) + " weights, " +
                         std::to_string(state_width) + " floats of state and 1 push, found " +
                         std::to_string(row.weights.size()) + ", " +
                         std::to_string(row.state.size()) + " and " + std::to_string(row.pushes));
    }
    refuse(row.id, "no room: " + std::to_string(size()) + " rows fill memory_cap_bytes, " +
                       std::to_string(options.memory_cap_bytes));
  }

  [[noreturn]] void refuse(uint64_t id, const std::string& why) const {
    TORCH_CHECK_VALUE(false, "table \"", options.name, "\": row ", id, ": ", why);
  }

  TableOptions options;
  size_t width;
  size_t state_width;
  InitialWeights initial;
  std::unique_ptr<SpillStore> spilled;
  std::shared_ptr<TableThreads> threads;  // nullptr: one group.
  std::vector<std::unique_ptr<Group>> groups;
  int64_t max_rows = kUnlimited;
  int64_t max_counts = kUnlimited;
};

RowTable::RowTable(const TableOptions& options, std::unique_ptr<SpillStore> spill_store,
                   std::shared_ptr<TableThreads> threads) {
  validate(options);
  const bool spills = options.at_cap == AtCap::kSpill && options.memory_cap_bytes > 0;
  if (spills != (spill_store != nullptr)) {
    throw ConfigError("table \"" + options.name +
                      (spills
                           ? "\": at_cap spill: expected a spill store, found none"
                           : "\": expected no spill store without a memory cap and at_cap spill"));
  }
  rows_ = std::make_unique<Rows>(options, std::move(spill_store), std::move(threads));
}
RowTable::~RowTable() = default;
RowTable::RowTable(RowTable&&) noexcept = default;

const TableOptions& RowTable::options() const {
  return rows_->options;
}

void RowTable::pull(std::span<const uint64_t> ids, std::span<float> weights,
                    Unknown unknown) const {
  rows_->pull(ids, weights.data(), unknown);
}

void RowTable::pull(std::span<const uint64_t> ids, std::span<uint16_t> bfloat16s,
                    Unknown unknown) const {
  rows_->pull(ids, bfloat16s.data(), unknown);
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
  rows.run([&](size_t number) {
    Rows::Group& group = *rows.groups[number];
    group.for_each_place([&](uint32_t place, const Row& row) {
      if (!is_expired(eviction, row.last_push, row.pushes, now)) return;
      group.remove(place);
      ++group.events.evicted;
    });
  });
  if (!rows.spilled) return;
  std::vector<uint64_t> expired;
  rows.spilled->for_each([&](const RowView& row) {
    if (is_expired(eviction, row.last_push, row.pushes, now)) expired.push_back(row.id);
  });
  rows.spilled->erase(expired);
  rows.groups.front()->events.evicted += static_cast<int64_t>(expired.size());
}

void RowTable::for_each(const std::function<void(const RowView&)>& visit) const {
  for_each_in_memory(visit);
  if (rows_->spilled) rows_->spilled->for_each(visit);
}

void RowTable::for_each_in_memory(const std::function<void(const RowView&)>& visit) const {
  for (const auto& group : rows_->groups)
    group->for_each_place([&](uint32_t, const Row& row) { visit(rows_->view(row)); });
}

void RowTable::for_each_count(const std::function<void(uint64_t, uint32_t)>& visit) const {
  for (const auto& group : rows_->groups) {
    group->counts.for_each([&](uint64_t hash, uint64_t pushes) {
      visit(inverse_splitmix64_finalizer(hash), static_cast<uint32_t>(pushes));
    });
  }
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
  HashParts<8>& counts = rows.groups[rows.number_of(hash)]->counts;
  TORCH_CHECK_VALUE(counts.find(hash, always) == 0, "table \"", rows.options.name,
                    "\": the count of id ", id, " is there already");
  rows.make_room_for_count();
  counts.insert(hash, std::min(pushes, entry.pushes - 1));
}

TableStatistics RowTable::statistics() const {
  TableStatistics result;
  for (const auto& group : rows_->groups) {
    result.bytes += group->slabs.bytes() + group->index.bytes() + group->counts.bytes();
    result.created += group->events.created;
    result.evicted += group->events.evicted;
    result.demoted += group->events.demoted;
    result.promoted += group->events.promoted;
    result.refused += group->events.refused;
  }
  result.rows = rows_->size();
  result.spilled_rows = rows_->spilled ? rows_->spilled->rows() : 0;
  result.counted_ids = rows_->counted_ids();
  return result;
}

std::vector<std::span<std::byte>> RowTable::huge_pages() const {
  std::vector<std::span<std::byte>> all;
  for (const auto& group : rows_->groups) {
    for (const auto& some :
         {group->slabs.huge_pages(), group->index.huge_pages(), group->counts.huge_pages()})
      all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

SpillStore* RowTable::spill_store() {
  return rows_->spilled.get();
}

}  // namespace cohort::ps
