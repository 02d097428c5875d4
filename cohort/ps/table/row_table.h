// SPDX-License-Identifier: Apache-2.0
// One server's share of an embedding table: rows by 64-bit id, in memory.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cohort/ps/table/row_view.h"
#include "cohort/ps/table/spill_store.h"
#include "cohort/ps/table/table_options.h"

namespace cohort::ps {

class TableThreads;

/// Contents of a table, and counts of events since it was made or loaded.
struct TableStatistics {
  int64_t rows = 0;          ///< In memory.
  int64_t spilled_rows = 0;  ///< In the spill store only.
  int64_t counted_ids = 0;   ///< Without a row, but counted by the entry policy.
  int64_t bytes = 0;         ///< Of memory: rows, index, counts, free places; more with threads.
  int64_t created = 0;
  int64_t evicted = 0;   ///< Dropped for good.
  int64_t demoted = 0;   ///< Moved to the spill store.
  int64_t promoted = 0;  ///< Moved back by a push.
  int64_t refused = 0;   ///< Pushes to ids that get no row: entry policy, or the cap.
  double bytes_per_row() const {
    return rows ? static_cast<double>(bytes) / static_cast<double>(rows) : 0;
  }
};

/// A deterministic table: what it holds is a function of the pushes and evictions, in their order.
///
/// A pull changes nothing: the weights of a row that is not there are a function of (seed, table,
/// id), and the first push makes the row from them.
///
/// Layout: rows lie in slabs of memory, weights and state together (16 + 4 (width + state_width)
/// bytes each); the index has 10 to 12.5 bytes for a row, in many small parts, so that none takes
/// long to grow. Batches are walked with prefetches: the time goes to memory, not to arithmetic.
/// With a spill store a row is in one of the two: a push brings it to memory, a pull leaves it.
///
/// With TableThreads each thread has the rows of its own parts of the index, in slabs of its own, and
/// large pulls, pushes, insertions and evictions are divided among them. All of a row's updates are
/// one thread's, in their order: what the table holds, and its counts of events, do not depend on
/// the number of threads. One thread alone does pushes during which the table, or its counts, may
/// become full, all work on the spill store, and for_each.
/// Threads: one caller at a time. Local. Sizes of spans are the caller's promise: a server checks
/// them when a message arrives (DeclaredJob).
class RowTable {
 public:
  /// `spill_store`: given for AtCap::kSpill, and only then; its rows are the table's. `threads`: may
  /// be those of other tables, too; nullptr: the caller alone.
  /// Errors: ConfigError that names the option.
  explicit RowTable(const TableOptions& options, std::unique_ptr<SpillStore> spill_store = nullptr,
                    std::shared_ptr<TableThreads> threads = nullptr);
  ~RowTable();
  RowTable(RowTable&&) noexcept;

  const TableOptions& options() const;

  /// Copies the weights of `ids` (any, also repeated) to `weights` [ids.size() x width]. Ids
  /// without a row get what their first push would begin with: initial weights; zeros where the
  /// entry policy makes rows only later, and under Unknown::kZeros.
  enum class Unknown { kInitial, kZeros };
  void pull(std::span<const uint64_t> ids, std::span<float> weights, Unknown unknown) const;
  /// The same weights, rounded to the nearest bfloat16 (wire/bfloat16.h), as bits.
  void pull(std::span<const uint64_t> ids, std::span<uint16_t> bfloat16s, Unknown unknown) const;

  /// Updates the rows of `ids` by `gradients` [ids.size() x width], in their order, makes those not
  /// there yet. `step` as in update(); `now`: seconds since 1970, never less than before.
  /// Errors: std::bad_alloc, the spill store's: some of `ids` are updated then.
  void push(std::span<const uint64_t> ids, std::span<const float> gradients, int64_t step,
            uint32_t now);

  /// Drops rows by the table's options (age, score); `now` as in push.
  /// Cost: a pass over all rows, those of the spill store included.
  void evict(uint32_t now);

  /// Calls `visit` for every row, in no order that matters. With a spill store: its rows, too.
  void for_each(const std::function<void(const RowView&)>& visit) const;
  /// The rows in memory alone: takes no memory, no lock and no other thread, as a forked child needs
  /// it.
  void for_each_in_memory(const std::function<void(const RowView&)>& visit) const;
  /// Calls `visit(id, pushes)` for every id that the entry policy counts. Likewise.
  void for_each_count(const std::function<void(uint64_t, uint32_t)>& visit) const;

  /// Puts rows in as `for_each` showed them; makes room as a push does.
  /// Errors: c10::ValueError if one is there already, has another width or finds no room; those
  /// before it are in.
  void insert(std::span<const RowView> rows);
  void insert(const RowView& row) { insert(std::span(&row, 1)); }
  /// Puts a count in as `for_each_count` showed it. If the options now need fewer pushes, the next
  /// one makes the row; if they do not count, it is dropped.
  /// Errors: c10::ValueError: it is there already.
  void insert_count(uint64_t id, uint32_t pushes);

  TableStatistics statistics() const;
  /// The memory that is in huge pages, where the system has them: valid until the next change.
  std::vector<std::span<std::byte>> huge_pages() const;
  /// nullptr: there is none.
  SpillStore* spill_store();

 private:
  struct Rows;
  std::unique_ptr<Rows> rows_;
};

}  // namespace cohort::ps
