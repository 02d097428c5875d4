// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/zip_archive.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "cohort/base/error.h"

namespace cohort {
namespace {

constexpr uint32_t kLocalHeader = 0x04034b50;
constexpr uint32_t kEntry = 0x02014b50;
constexpr uint32_t kEnd = 0x06054b50;
constexpr uint32_t kEnd64 = 0x06064b50;
constexpr uint32_t kEnd64Locator = 0x07064b50;
constexpr uint32_t kIn64 = 0xffffffff;  // The number stands in the zip64 fields.
constexpr size_t kEndSize = 22;

class Archive {
 public:
  Archive(const std::string& path, std::span<const std::byte> file) : path_(path), file_(file) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw ConfigError(path_ + ": not a valid archive of torch.save: " + what);
  }

  std::span<const std::byte> bytes(uint64_t offset, uint64_t size, const std::string& what) const {
    if (offset > file_.size() || size > file_.size() - offset)
      fail(what + " is not within the file: it is cut short or damaged");
    return file_.subspan(offset, size);
  }
  template <class Number>
  Number number(uint64_t offset, const std::string& what) const {
    Number number{};
    std::memcpy(&number, bytes(offset, sizeof(Number), what).data(), sizeof(Number));
    return number;
  }
  std::string text(uint64_t offset, uint64_t size, const std::string& what) const {
    const auto found = bytes(offset, size, what);
    return {reinterpret_cast<const char*>(found.data()), found.size()};
  }
  uint64_t size() const { return file_.size(); }

 private:
  const std::string& path_;
  std::span<const std::byte> file_;
};

struct Directory {
  uint64_t count = 0;
  uint64_t offset = 0;
};

Directory find_directory(const Archive& archive) {
  const std::string what = "the end record";
  if (archive.size() < kEndSize) archive.fail("it has no end record");
  const uint64_t last = archive.size() - kEndSize;
  const uint64_t first = last - std::min<uint64_t>(last, UINT16_MAX);
  for (uint64_t at = last + 1; at-- > first;) {
    if (archive.number<uint32_t>(at, what) != kEnd) continue;
    Directory directory{archive.number<uint16_t>(at + 10, what),
                        archive.number<uint32_t>(at + 16, what)};
    if (at >= 20 && archive.number<uint32_t>(at - 20, what) == kEnd64Locator) {
      const auto end64 = archive.number<uint64_t>(at - 12, what);
      if (archive.number<uint32_t>(end64, what) != kEnd64) archive.fail("its zip64 end is damaged");
      directory = {archive.number<uint64_t>(end64 + 32, what),
                   archive.number<uint64_t>(end64 + 48, what)};
    }
    return directory;
  }
  archive.fail("it has no end record: it is cut short");
}

// Sizes and offset of an entry; `offset` is the directory's record.
struct Entry {
  uint64_t stored = 0;
  uint64_t size = 0;
  uint64_t header = 0;
};

Entry read_entry(const Archive& archive, uint64_t offset, const std::string& what) {
  Entry entry{archive.number<uint32_t>(offset + 20, what),
              archive.number<uint32_t>(offset + 24, what),
              archive.number<uint32_t>(offset + 42, what)};
  uint64_t extra = offset + 46 + archive.number<uint16_t>(offset + 28, what);
  const uint64_t end = extra + archive.number<uint16_t>(offset + 30, what);
  while (extra + 4 <= end) {
    const auto kind = archive.number<uint16_t>(extra, what);
    uint64_t field = extra + 4;
    extra = field + archive.number<uint16_t>(extra + 2, what);
    if (kind != 1) continue;
    for (uint64_t* each : {&entry.size, &entry.stored, &entry.header}) {
      if (*each != kIn64) continue;
      if (field + 8 > extra) archive.fail(what + ": its zip64 field is damaged");
      *each = archive.number<uint64_t>(field, what);
      field += 8;
    }
  }
  return entry;
}

}  // namespace

bool is_zip_archive(std::span<const std::byte> file) {
  uint32_t word = 0;
  if (file.size() < sizeof(word)) return false;
  std::memcpy(&word, file.data(), sizeof(word));
  return word == kLocalHeader;
}

std::map<std::string, std::span<const std::byte>, std::less<>> zip_entries(
    const std::string& path, std::span<const std::byte> file) {
  const Archive archive(path, file);
  const Directory directory = find_directory(archive);
  std::map<std::string, std::span<const std::byte>, std::less<>> entries;
  uint64_t offset = directory.offset;
  for (uint64_t i = 0; i < directory.count; ++i) {
    const std::string record = "record " + std::to_string(i) + " of its directory";
    if (archive.number<uint32_t>(offset, record) != kEntry) archive.fail(record + " is damaged");
    const auto flags = archive.number<uint16_t>(offset + 8, record);
    const auto method = archive.number<uint16_t>(offset + 10, record);
    const auto name_size = archive.number<uint16_t>(offset + 28, record);
    const std::string name = archive.text(offset + 46, name_size, record);
    const std::string what = "entry " + name;
    const Entry entry = read_entry(archive, offset, what);
    offset += 46 + name_size + archive.number<uint16_t>(offset + 30, record) +
              archive.number<uint16_t>(offset + 32, record);
    if (method != 0 || (flags & 1) != 0 || entry.stored != entry.size) continue;
    if (archive.number<uint32_t>(entry.header, what) != kLocalHeader)
      archive.fail(what + ": its header is damaged");
    const uint64_t begin = entry.header + 30 + archive.number<uint16_t>(entry.header + 26, what) +
                           archive.number<uint16_t>(entry.header + 28, what);
    if (!entries.emplace(name, archive.bytes(begin, entry.size, what)).second)
      archive.fail(what + " occurs twice");
  }
  return entries;
}

}  // namespace cohort
