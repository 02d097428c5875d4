// SPDX-License-Identifier: Apache-2.0
// The rows of a table as a file.
//
// Layout, little-endian:
//   magic "COHORTTB", version u32, bytes of the text u32, crc32c of these 16 bytes and the text
//   u32, the table's options as text (table_options.h), blocks: kind u32, entries u32, bytes u64,
//   crc32c of these 16 bytes and the content u32, content
//     rows:   id u64, last_push u32, pushes u32, weights and state as float32
//     counts: id u64, pushes u32
//     end:    rows u64, counts u64; the last one
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cohort/base/fd.h"
#include "cohort/ps/table/row_table.h"

namespace cohort::ps {

/// Writes a table's rows in memory and its counts; rows of a spill store have their own checkpoint.
///
/// Made to be used in a forked child of a process with threads: what memory it needs is taken when
/// it is made, write() calls nothing but write(2).
class TableFileWriter {
 public:
  /// `table` must outlive this.
  explicit TableFileWriter(const RowTable& table);

  /// Writes the file to `descriptor`, from where that stands. Once.
  /// Returns: 0, or the errno of what failed.
  int write(int descriptor);
  /// What was written: the bytes, and the crc32c of all of them.
  uint64_t bytes() const { return bytes_; }
  uint32_t checksum() const { return checksum_; }

 private:
  enum class Kind : uint32_t { kRows = 1, kCounts = 2, kEnd = 3 };
  friend class TableFileReader;

  void append(std::span<const std::byte> bytes);
  void begin_entry(Kind kind, size_t entry_bytes);
  void end_block();
  void write_all(std::span<const std::byte> bytes);

  const RowTable& table_;
  std::string header_;
  std::vector<std::byte> block_;  // With room for its header.
  size_t filled_ = 0;
  Kind kind_ = Kind::kRows;
  uint32_t entries_ = 0;
  int descriptor_ = -1;
  int error_ = 0;
  uint64_t bytes_ = 0;
  uint32_t checksum_ = 0;
  uint64_t rows_ = 0;
  uint64_t counts_ = 0;
};

/// Reads such a file block by block: a block of memory, however large it is.
/// Threads: one.
class TableFileReader {
 public:
  /// Errors of both: ConfigError that names the file, the offset and what is wrong there.
  explicit TableFileReader(const std::string& path);
  const TableOptions& options() const { return options_; }

  /// Calls `rows` for the rows of each block, which hold until it returns, and `count` for every
  /// count. Once. What they throw passes through.
  void read(const std::function<void(std::span<const RowView>)>& rows,
            const std::function<void(uint64_t id, uint32_t pushes)>& count);

 private:
  [[noreturn]] void fail(const std::string& what) const;
  void read_exactly(std::span<std::byte> bytes, const char* what);
  // Whole entries of the kind that it returns.
  TableFileWriter::Kind read_block(std::vector<std::byte>& block);

  std::string path_;
  Fd file_;
  uint64_t offset_ = 0;  // Of what is being read, for errors.
  uint64_t next_ = 0;
  TableOptions options_;
};

/// Writes `table` to `path`, which is replaced; not in one step: for that see base/atomic_file.h.
/// Errors: c10::Error that names the file and the system's reason.
void write_table_file(const RowTable& table, const std::string& path);

/// Puts the rows and counts of a file whose ids `keep` wants into `table`.
/// Errors: the reader's; check_same_rows(); RowTable::insert.
void load_table_file(const std::string& path, RowTable& table,
                     const std::function<bool(uint64_t id)>& keep);

}  // namespace cohort::ps
