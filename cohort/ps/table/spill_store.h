// SPDX-License-Identifier: Apache-2.0
// Spilled rows: on disk, for a table that has no memory for them.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "cohort/ps/table/row_view.h"

namespace cohort::ps {

/// A folder of rows by id, of one width, in RocksDB.
///
/// It has no log of its own: after a crash the folder is discarded, and made again from a
/// checkpoint() and the server's update log. Beside `memory_bytes` RocksDB has filters in memory,
/// some 2 bytes a row, and 10 to 60 MB for compaction.
///
/// Threads: one at a time; RocksDB has its own for merging files. Not to be used in a forked child.
/// Errors of all: c10::Error with the folder and RocksDB's words; damaged blocks are among them.
class SpillStore {
 public:
  struct Options {
    int64_t width = 0;  ///< Weights of a row.
    int64_t state_width = 0;
    int64_t memory_bytes = int64_t{256} << 20;  ///< Rows not yet written, and blocks read before.
  };

  /// Begins an empty store in `folder`, which is not there, or opens a copy of a checkpoint.
  /// Errors: ConfigError if its rows have another width, or if it is no such copy.
  SpillStore(const std::string& folder, const Options& options);
  ~SpillStore();
  SpillStore(SpillStore&&) noexcept;

  int64_t rows() const;

  /// Adds rows, none of which is there.
  void put(std::span<const RowView> rows);
  /// Calls `visit(i, row)` for those of `ids` that are there, in the order of ids.
  void get(std::span<const uint64_t> ids,
           const std::function<void(size_t, const RowView&)>& visit) const;
  /// Removes rows, all of which are there.
  void erase(std::span<const uint64_t> ids);
  /// Calls `visit` for every row, sorted by id.
  void for_each(const std::function<void(const RowView&)>& visit) const;

  /// Makes the folder `copy`, which must not be there: all rows, mostly as hard links where it is
  /// on the same file system. Blocks until the disk has what is not yet there.
  void checkpoint(const std::string& copy);
  /// Makes `folder`, which must not be there, from a checkpoint: what is then written to it leaves
  /// the checkpoint as it is.
  static void restore(const std::string& checkpoint, const std::string& folder);

 private:
  struct Database;
  std::unique_ptr<Database> database_;
};

}  // namespace cohort::ps
