// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/table/table_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/base/system_error.h"
#include "cohort/ps/crc32c.h"
#include "cohort/ps/table/row_slabs.h"

namespace cohort::ps {
namespace {

static_assert(std::endian::native == std::endian::little, "files hold little-endian numbers");

constexpr std::array<char, 8> kMagic = {'C', 'O', 'H', 'O', 'R', 'T', 'T', 'B'};
constexpr uint32_t kVersion = 1;
constexpr uint32_t kMaxOptionsBytes = 1 << 20;
constexpr size_t kBlockBytes = size_t{1} << 20;

struct FileHeader {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t text_bytes;
  uint32_t checksum;
};
struct [[gnu::packed]] BlockHeader {
  uint32_t kind;
  uint32_t entries;
  uint64_t bytes;
  uint32_t checksum;
};
static_assert(sizeof(FileHeader) == 20 && sizeof(BlockHeader) == 20);
constexpr size_t kChecked = 16;  // Bytes of both before their checksum.

struct [[gnu::packed]] CountEntry {
  uint64_t id;
  uint32_t pushes;
};
struct EndEntry {
  uint64_t rows;
  uint64_t counts;
};

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

size_t row_size(const TableOptions& options) {
  return sizeof(Row) +
         sizeof(float) *
             static_cast<size_t>(options.width + state_width(options.rule.rule, options.width));
}

// At least a row, however wide.
size_t block_size(const TableOptions& options) {
  return std::max(kBlockBytes, row_size(options));
}

}  // namespace

TableFileWriter::TableFileWriter(const RowTable& table)
    : table_(table), block_(sizeof(BlockHeader) + block_size(table.options())) {
  const std::string text = to_text(table.options());
  TORCH_CHECK_VALUE(text.size() <= kMaxOptionsBytes, "table \"", table.options().name,
                    "\": its options have more than ", kMaxOptionsBytes, " bytes");
  FileHeader header{kMagic, kVersion, static_cast<uint32_t>(text.size()), 0};
  header.checksum =
      crc32c(std::as_bytes(std::span(text)), crc32c(bytes_of(header).first(kChecked)));
  header_.assign(reinterpret_cast<const char*>(&header), sizeof(header));
  header_ += text;
}

int TableFileWriter::write(int descriptor) {
  descriptor_ = descriptor;
  write_all(std::as_bytes(std::span(header_)));
  // A lambda with one pointer: std::function then takes no memory for it.
  table_.for_each_in_memory([this](const RowView& row) {
    const Row head{row.id, row.last_push, row.pushes};
    begin_entry(Kind::kRows, sizeof(head) + row.weights.size_bytes() + row.state.size_bytes());
    append(bytes_of(head));
    append(std::as_bytes(row.weights));
    append(std::as_bytes(row.state));
    ++rows_;
  });
  table_.for_each_count([this](uint64_t id, uint32_t pushes) {
    begin_entry(Kind::kCounts, sizeof(CountEntry));
    append(bytes_of(CountEntry{id, pushes}));
    ++counts_;
  });
  begin_entry(Kind::kEnd, sizeof(EndEntry));
  append(bytes_of(EndEntry{rows_, counts_}));
  end_block();
  return error_;
}

void TableFileWriter::begin_entry(Kind kind, size_t entry_bytes) {
  const size_t room = block_.size() - sizeof(BlockHeader) - filled_;
  if (kind != kind_ || entry_bytes > room) end_block();
  kind_ = kind;
  ++entries_;
}

void TableFileWriter::append(std::span<const std::byte> bytes) {
  std::copy(bytes.begin(), bytes.end(), block_.data() + sizeof(BlockHeader) + filled_);
  filled_ += bytes.size();
}

void TableFileWriter::end_block() {
  if (entries_ > 0) {
    BlockHeader header{static_cast<uint32_t>(kind_), entries_, filled_, 0};
    const std::span content(block_.data() + sizeof(header), filled_);
    header.checksum = crc32c(content, crc32c(bytes_of(header).first(kChecked)));
    std::memcpy(block_.data(), &header, sizeof(header));
    write_all({block_.data(), sizeof(header) + filled_});
  }
  filled_ = 0;
  entries_ = 0;
}

void TableFileWriter::write_all(std::span<const std::byte> bytes) {
  if (error_ != 0) return;
  bytes_ += bytes.size();
  checksum_ = crc32c(bytes, checksum_);
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      error_ = errno;
      return;
    }
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

TableFileReader::TableFileReader(const std::string& path)
    : path_(path), file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (!file_) throw ConfigError(path + ": expected the file of a table: " + system_reason(errno));
  FileHeader header{};
  read_exactly(std::as_writable_bytes(std::span(&header, 1)), "the header");
  if (header.magic != kMagic) fail("not the file of a table");
  if (header.version != kVersion) {
    fail("expected version " + std::to_string(kVersion) + ", found " +
         std::to_string(header.version));
  }
  if (header.text_bytes > kMaxOptionsBytes) {
    fail("expected at most " + std::to_string(kMaxOptionsBytes) + " bytes of options, found " +
         std::to_string(header.text_bytes));
  }
  std::string text(header.text_bytes, ' ');
  read_exactly(std::as_writable_bytes(std::span(text)), "the options");
  offset_ = 0;
  const uint32_t sum =
      crc32c(std::as_bytes(std::span(text)), crc32c(bytes_of(header).first(kChecked)));
  if (sum != header.checksum) fail("the header's checksum is wrong");
  try {
    options_ = table_options_of(text);
    validate(options_);
  } catch (const ConfigError& error) {
    fail(one_line(error));
  }
}

void TableFileReader::fail(const std::string& what) const {
  throw ConfigError(path_ + ": damaged at offset " + std::to_string(offset_) + ": " + what);
}

void TableFileReader::read_exactly(std::span<std::byte> bytes, const char* what) {
  offset_ = next_;
  while (!bytes.empty()) {
    const ssize_t count = ::read(file_.get(), bytes.data(), bytes.size());
    if (count < 0) {
      if (errno == EINTR) continue;
      fail(std::string("reading ") + what + ": " + system_reason(errno));
    }
    if (count == 0) fail(std::string("the file ends in ") + what);
    next_ += static_cast<uint64_t>(count);
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
}

TableFileWriter::Kind TableFileReader::read_block(std::vector<std::byte>& block) {
  using Kind = TableFileWriter::Kind;
  BlockHeader header{};
  read_exactly(std::as_writable_bytes(std::span(&header, 1)), "the header of a block");
  const uint64_t start = offset_;
  const size_t entry = header.kind == static_cast<uint32_t>(Kind::kRows)     ? row_size(options_)
                       : header.kind == static_cast<uint32_t>(Kind::kCounts) ? sizeof(CountEntry)
                       : header.kind == static_cast<uint32_t>(Kind::kEnd)    ? sizeof(EndEntry)
                                                                             : 0;
  if (entry == 0 || header.bytes != uint64_t{header.entries} * entry ||
      header.bytes > block_size(options_)) {
    fail("no block of this table: kind " + std::to_string(header.kind) + ", " +
         std::to_string(header.entries) + " entries, " + std::to_string(header.bytes) + " bytes");
  }
  block.resize(header.bytes);
  const std::span content(block);
  read_exactly(content, "a block");
  offset_ = start;
  if (crc32c(content, crc32c(bytes_of(header).first(kChecked))) != header.checksum) {
    fail("the block's checksum is wrong");
  }
  return static_cast<Kind>(header.kind);
}

void TableFileReader::read(const std::function<void(std::span<const RowView>)>& rows,
                           const std::function<void(uint64_t id, uint32_t pushes)>& count) {
  using Kind = TableFileWriter::Kind;
  const auto width = static_cast<size_t>(options_.width);
  const size_t row_bytes = row_size(options_);
  const size_t floats = (row_bytes - sizeof(Row)) / sizeof(float);
  std::vector<std::byte> block;
  std::vector<RowView> views;
  EndEntry seen{};
  for (bool ended = false; !ended;) {
    const Kind kind = read_block(block);
    const std::span content(block);
    switch (kind) {
      case Kind::kRows:
        views.clear();
        for (const std::byte* at = content.data(); at != content.data() + content.size();
             at += row_bytes) {
          const auto* row = reinterpret_cast<const Row*>(at);
          const std::span all(row->floats(), floats);
          views.push_back(
              {row->id, row->last_push, row->pushes, all.first(width), all.subspan(width)});
        }
        seen.rows += views.size();
        rows(views);
        break;
      case Kind::kCounts:
        for (const std::byte* at = content.data(); at != content.data() + content.size();
             at += sizeof(CountEntry)) {
          CountEntry found{};
          std::memcpy(&found, at, sizeof(found));
          count(found.id, found.pushes);
        }
        seen.counts += content.size() / sizeof(CountEntry);
        break;
      case Kind::kEnd: {
        EndEntry end{};
        if (content.size() != sizeof(end)) fail("expected one end");
        std::memcpy(&end, content.data(), sizeof(end));
        if (end.rows != seen.rows || end.counts != seen.counts) {
          fail("expected " + std::to_string(end.rows) + " rows and " + std::to_string(end.counts) +
               " counts, found " + std::to_string(seen.rows) + " and " +
               std::to_string(seen.counts));
        }
        ended = true;
        break;
      }
    }
  }
  std::byte more{};
  offset_ = next_;
  if (::read(file_.get(), &more, 1) != 0) fail("expected the file to end");
}

void write_table_file(const RowTable& table, const std::string& path) {
  const Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  TORCH_CHECK(file, path, ": cannot be written: ", system_reason(errno));
  const int error = TableFileWriter(table).write(file.get());
  TORCH_CHECK(error == 0, path, ": writing: ", system_reason(error));
}

void load_table_file(const std::string& path, RowTable& table,
                     const std::function<bool(uint64_t id)>& keep) {
  TableFileReader reader(path);
  check_same_rows(reader.options(), table.options());
  std::vector<RowView> kept;
  reader.read(
      [&](std::span<const RowView> rows) {
        kept.clear();
        for (const RowView& row : rows) {
          if (keep(row.id)) kept.push_back(row);
        }
        table.insert(kept);
      },
      [&](uint64_t id, uint32_t pushes) {
        if (keep(id)) table.insert_count(id, pushes);
      });
}

}  // namespace cohort::ps
