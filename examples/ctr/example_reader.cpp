// SPDX-License-Identifier: Apache-2.0
#include "examples/ctr/example_reader.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "cohort/base/error.h"

namespace ctr {
namespace {

using cohort::ConfigError;

constexpr int64_t kLargestBlock = 1 << 20;
constexpr int64_t kSmallestBlock = 1 << 14;
constexpr int64_t kBlocksOfShare = 64;  // Of a small file, so that shares are about equal.
constexpr int64_t kLongestLine = 1 << 20;
constexpr int64_t kLineReserve = 1 << 12;  // Read beyond a block for the end of its last line.

[[noreturn]] void refuse_file(const std::string& path, const std::string& why) {
  throw ConfigError(path + ": expected a file that can be read, got " + why);
}

// The same for every reader of the file.
int64_t suitable_block(int64_t size, int shares) {
  return std::clamp(size / (kBlocksOfShare * shares), kSmallestBlock, kLargestBlock);
}

// Lines are counted only when one is refused.
int64_t line_number(const std::string& path, int64_t offset) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> buffer(kLargestBlock);
  int64_t number = 1;
  while (offset > 0 && file) {
    file.read(buffer.data(), std::min<int64_t>(offset, kLargestBlock));
    number += std::count(buffer.begin(), buffer.begin() + file.gcount(), '\n');
    offset -= file.gcount();
  }
  return number;
}

void reserve(Batch& batch, int64_t size) {
  const auto count = static_cast<size_t>(size);
  batch.labels.resize(count);
  batch.numbers.resize(count * kNumbers);
  batch.ids.resize(count * kCategories);
}

void put(const Example& example, Batch& batch) {
  const auto at = static_cast<size_t>(batch.size++);
  batch.labels[at] = example.label;
  std::copy(example.numbers.begin(), example.numbers.end(), &batch.numbers[at * kNumbers]);
  std::copy(example.ids.begin(), example.ids.end(), &batch.ids[at * kCategories]);
}

}  // namespace

ExampleReader::ExampleReader(ReaderOptions options) : options_(std::move(options)) {
  const auto require = [](bool holds, const std::string& what) {
    if (!holds) throw ConfigError("ExampleReader: expected " + what);
  };
  require(options_.shares >= 1 && options_.share >= 0 && options_.share < options_.shares,
          "0 <= share < shares, got " + std::to_string(options_.share) + " of " +
              std::to_string(options_.shares));
  require(options_.batch_size >= 1,
          "a batch of 1 or more, got " + std::to_string(options_.batch_size));
  require(options_.block_bytes >= 0,
          "block_bytes of 0 or more, got " + std::to_string(options_.block_bytes));
  if (!options_.files.empty()) open_file();
}

void ExampleReader::open_file() {
  const std::string& path = options_.files[file_];
  descriptor_ = cohort::Fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (!descriptor_ || ::fstat(descriptor_.get(), &status) != 0) {
    refuse_file(path, std::strerror(errno));
  }
  if (S_ISDIR(status.st_mode)) refuse_file(path, "a folder");
  if (!S_ISREG(status.st_mode)) refuse_file(path, "a device or pipe");
  size_ = status.st_size;
  block_bytes_ =
      options_.block_bytes > 0 ? options_.block_bytes : suitable_block(size_, options_.shares);
  block_ = options_.share;
}

bool ExampleReader::next(Batch& batch) {
  batch.size = 0;
  reserve(batch, options_.batch_size);
  Example example;
  while (batch.size < options_.batch_size) {
    if (line_ == lines_end_ && !next_block()) break;
    if (line_ == lines_end_) continue;
    const char* begin = line_;
    const char* newline =
        static_cast<const char*>(std::memchr(begin, '\n', static_cast<size_t>(lines_end_ - begin)));
    const char* end = newline > begin && newline[-1] == '\r' ? newline - 1 : newline;
    if (const auto fault = parse_line(begin, end, options_.labels, example)) {
      if (!options_.skip_damaged) refuse(*fault);
      ++counts_.damaged;
    } else {
      put(example, batch);
    }
    line_ = newline + 1;
  }
  counts_.examples += batch.size;
  reserve(batch, batch.size);
  return batch.size > 0;
}

// Advances to this share's next block; false if there is none in any file.
bool ExampleReader::next_block() {
  while (descriptor_) {
    if (block_ * block_bytes_ < size_) {
      read_block(block_);
      block_ += options_.shares;
      return true;
    }
    descriptor_.reset();
    if (++file_ < options_.files.size()) open_file();
  }
  return false;
}

void ExampleReader::read_block(int64_t block) {
  const int64_t begin = block * block_bytes_;
  const int64_t end = std::min(begin + block_bytes_, size_);
  // The byte before says whether a line begins with the block.
  const int64_t first = std::max<int64_t>(begin - 1, 0);
  int64_t last = std::min(end + kLineReserve, size_);
  read_into_buffer(first, last);
  // The block's last line ends where it ends, or with the file.
  const auto reaches_line_end = [&] {
    const auto inside = static_cast<size_t>(end - 1 - first);
    return std::memchr(buffer_.data() + inside, '\n', buffer_.size() - inside) != nullptr;
  };
  while (last < size_ && !reaches_line_end()) {
    if (last - end >= kLongestLine) {
      throw ConfigError(options_.files[file_] + ": expected lines of at most " +
                        std::to_string(kLongestLine) + " bytes, got a longer one at byte " +
                        std::to_string(end));
    }
    last = std::min(last + (last - first), size_);
    read_into_buffer(first, last);
  }
  if (last == size_ && buffer_.back() != '\n') buffer_.push_back('\n');
  find_lines(begin, end);
}

void ExampleReader::read_into_buffer(int64_t begin, int64_t end) {
  buffer_.resize(static_cast<size_t>(end - begin));
  buffer_begin_ = begin;
  for (size_t done = 0; done < buffer_.size();) {
    const ssize_t got = ::pread(descriptor_.get(), buffer_.data() + done, buffer_.size() - done,
                                begin + static_cast<int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      refuse_file(options_.files[file_],
                  got == 0 ? "a file that was shortened meanwhile" : std::strerror(errno));
    }
    done += static_cast<size_t>(got);
    counts_.bytes += got;
  }
}

// The lines whose first byte is in [begin, end) of the file.
void ExampleReader::find_lines(int64_t begin, int64_t end) {
  const char* data = buffer_.data();
  const char* data_end = data + buffer_.size();
  const auto line_at_or_after = [&](int64_t offset) {
    if (offset == 0) return data;
    const char* before = data + (offset - 1 - buffer_begin_);
    const void* newline = std::memchr(before, '\n', static_cast<size_t>(data_end - before));
    return newline ? static_cast<const char*>(newline) + 1 : data_end;
  };
  line_ = line_at_or_after(begin);
  lines_end_ = std::max(line_, line_at_or_after(end));
}

void ExampleReader::refuse(const LineFault& fault) const {
  const std::string& path = options_.files[file_];
  const int64_t offset = buffer_begin_ + (line_ - buffer_.data());
  throw ConfigError(path + ":" + std::to_string(line_number(path, offset)) + ": field " +
                    std::to_string(fault.field) + ": expected " + fault.expected);
}

int64_t count_lines(ReaderOptions options) {
  ExampleReader reader(std::move(options));
  int64_t count = 0;
  while (reader.next_block()) count += std::count(reader.line_, reader.lines_end_, '\n');
  return count;
}

Labels labels_of(const std::string& file) {
  const ExampleReader refuses_what_is_no_file({.files = {file}});
  std::ifstream stream(file);
  std::string line;
  if (!std::getline(stream, line)) {
    refuse_file(file, stream.is_open() ? "an empty one" : std::strerror(errno));
  }
  const auto tabs = std::count(line.begin(), line.end(), '\t');
  return tabs == kNumbers + kCategories - 1 ? Labels::kAbsent : Labels::kGiven;
}

}  // namespace ctr
