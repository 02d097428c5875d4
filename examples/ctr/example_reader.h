// SPDX-License-Identifier: Apache-2.0
// Reads files of examples, one trainer's share of them, batch by batch.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "cohort/base/fd.h"

#include "examples/ctr/example_line.h"

namespace ctr {

struct ReaderOptions {
  std::vector<std::string> files;  ///< Read one after the other.
  int share = 0;                   ///< This reader's, in [0, shares).
  int shares = 1;            ///< Readers that share the files: each line is read by one of them.
  int64_t batch_size = 512;  ///< Examples; the last batch may have fewer.
  Labels labels = Labels::kGiven;
  bool skip_damaged = false;  ///< Leave malformed lines out, and count them; else they are errors.
  int64_t block_bytes = 0;    ///< See below; 0: what suits the file's size.
};

/// Examples side by side, in the order of their lines.
struct Batch {
  int64_t size = 0;
  std::vector<float> labels;   ///< [size]
  std::vector<float> numbers;  ///< [size x kNumbers]
  std::vector<uint64_t> ids;   ///< [size x kCategories]
};

struct ReaderCounts {
  int64_t examples = 0;
  int64_t damaged = 0;
  int64_t bytes = 0;  ///< Read from files.
};

/// A pass over the files.
///
/// Shares: a file is cut into blocks of equal size, which are dealt out in turn; a line belongs to
/// the block that its first byte is in. So shares have about equally many lines from all parts of
/// the file, no reader looks at more than its share, and which lines a share has depends on the
/// file's size and the number of shares alone.
/// Owner:   of the open file and a buffer of a block.
/// Threads: one. Blocks on the disk.
/// Errors:  ConfigError that names the file if it cannot be read, and for a malformed line file,
///          line, field and what was expected, unless such lines are left out.
class ExampleReader {
 public:
  /// Errors: ConfigError for an option out of range, or a file that cannot be opened.
  explicit ExampleReader(ReaderOptions options);

  /// Fills `batch` with the next examples; false, with an empty batch, after the last one.
  bool next(Batch& batch);
  const ReaderCounts& counts() const { return counts_; }

 private:
  friend int64_t count_lines(ReaderOptions options);
  void open_file();
  bool next_block();
  void read_block(int64_t block);
  void read_into_buffer(int64_t begin, int64_t end);
  void find_lines(int64_t begin, int64_t end);
  [[noreturn]] void refuse(const LineFault& fault) const;

  ReaderOptions options_;
  ReaderCounts counts_;
  size_t file_ = 0;  // Index of the open one.
  cohort::Fd descriptor_;
  int64_t size_ = 0;  // Of the open file.
  int64_t block_bytes_ = 0;
  int64_t block_ = 0;  // The next one of this share.
  std::vector<char> buffer_;
  int64_t buffer_begin_ = 0;    // Where in the file the buffer begins.
  const char* line_ = nullptr;  // The next line, and where the last of this block's ends.
  const char* lines_end_ = nullptr;
};

/// Counts the lines of the share, malformed ones included, without parsing them: as many as a
/// reader with these options meets.
/// Errors: as ExampleReader's constructor and next.
int64_t count_lines(ReaderOptions options);

/// Whether the first line of `file` has one field less than a labelled one.
/// Errors: ConfigError if the file cannot be read, or is empty.
Labels labels_of(const std::string& file);

}  // namespace ctr
