// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/update_log.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "cohort/base/atomic_file.h"
#include "cohort/base/error.h"
#include "cohort/base/system_error.h"
#include "cohort/ps/crc32c.h"

namespace cohort::ps {

namespace {

namespace fs = std::filesystem;

constexpr uint32_t kMagic = 0x4d535043;     // "CPSM"
constexpr uint32_t kOldMagic = 0x4c535043;  // Version 0.3's, whose header has no "synced".

// The last record of a file of records, by which a reader knows that none is missing.
constexpr auto kEnd = static_cast<RecordKind>(100);

struct RecordHeader {
  uint32_t magic = kMagic;
  uint32_t header_checksum = 0;  // Of all that follows it in this struct.
  uint64_t number = 0;
  uint64_t synced = 0;
  RecordKind kind = RecordKind::kPush;
  uint32_t time = 0;
  uint32_t bytes = 0;
  uint32_t payload_checksum = 0;
};
static_assert(sizeof(RecordHeader) == 40);

uint32_t checksum_of(const RecordHeader& header) {
  return crc32c(std::as_bytes(std::span(&header, 1)).subspan(offsetof(RecordHeader, number)));
}

constexpr size_t padding_of(size_t bytes) {
  return (8 - bytes % 8) % 8;
}

int64_t bytes_of(const Record& record) {
  return static_cast<int64_t>(sizeof(RecordHeader) + record.payload.size() +
                              padding_of(record.payload.size()));
}

RecordHeader header_of(const Record& record, uint64_t synced) {
  RecordHeader header{
      .number = record.number,
      .synced = synced,
      .kind = record.kind,
      .time = record.time,
      .bytes = static_cast<uint32_t>(record.payload.size()),
      .payload_checksum = record.checksum ? *record.checksum : crc32c(record.payload)};
  header.header_checksum = checksum_of(header);
  return header;
}

// Writes header, payload and padding; returns 0 or errno's number.
int write_record(int file, const Record& record, uint64_t synced) {
  static constexpr std::array<std::byte, 8> kZeros{};
  const RecordHeader header = header_of(record, synced);
  std::array<iovec, 3> pieces{
      iovec{const_cast<RecordHeader*>(&header), sizeof(header)},
      iovec{const_cast<std::byte*>(record.payload.data()), record.payload.size()},
      iovec{const_cast<std::byte*>(kZeros.data()), padding_of(record.payload.size())}};
  size_t first = 0;
  while (first < pieces.size()) {
    if (pieces[first].iov_len == 0) {
      ++first;
      continue;
    }
    const ssize_t written = ::writev(file, &pieces[first], static_cast<int>(pieces.size() - first));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    size_t left = static_cast<size_t>(written);
    while (first < pieces.size() && left >= pieces[first].iov_len) {
      left -= pieces[first++].iov_len;
    }
    if (first < pieces.size()) {
      pieces[first].iov_base = static_cast<std::byte*>(pieces[first].iov_base) + left;
      pieces[first].iov_len -= left;
    }
  }
  return 0;
}

// Why a file could not get `bytes`. A disk may get room again; a limit stays until somebody raises
// it, so it is named.
std::string write_refusal(int error, int64_t bytes) {
  const std::string reason = system_reason(error);
  rlimit limit{};
  if (error != EFBIG || ::getrlimit(RLIMIT_FSIZE, &limit) != 0 ||
      limit.rlim_cur >= static_cast<rlim_t>(bytes))
    return reason;
  return reason + ": expected a limit of file sizes (ulimit -f) of at least " +
         std::to_string(bytes) + " bytes, got " + std::to_string(limit.rlim_cur) +
         "; raise it with prlimit, or start the server again without it";
}

// Whether a write to space that was reserved in this file cannot fail for want of space. Others, for
// example ZFS, whose fallocate only looks whether there is space, do not promise that.
bool keeps_reserved_space(int file) {
  struct statfs status {};
  if (::fstatfs(file, &status) != 0) return false;
  return status.f_type == EXT4_SUPER_MAGIC || status.f_type == XFS_SUPER_MAGIC;
}

// A file in memory, read only.
class Mapping {
 public:
  explicit Mapping(const std::string& path) : path_(path) {
    const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat status {};
    if (!file || ::fstat(file.get(), &status) != 0)
      throw ConfigError(path + ": cannot read it: " + system_reason(errno));
    if (status.st_size == 0) return;
    void* address =
        ::mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, file.get(), 0);
    if (address == MAP_FAILED)
      throw ConfigError(path + ": cannot read it: " + system_reason(errno));
    ::madvise(address, static_cast<size_t>(status.st_size), MADV_SEQUENTIAL);
    bytes_ = {static_cast<const std::byte*>(address), static_cast<size_t>(status.st_size)};
  }
  ~Mapping() {
    if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::string path_;
  std::span<const std::byte> bytes_;
};

// What the disk once refused may be in memory still, held for written: it is read as the disk has
// it.
void forget_cached(const std::string& path) {
  if (const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC)); file)
    ::posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED);
}

bool all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

// What reading a file of records came to.
struct ReadResult {
  size_t whole_bytes = 0;  // Of whole records; the rest of the file is unfinished or damaged.
  bool finished = true;
  std::string damage;  // With file and offset; "" if there is none.
};

// Visits the whole records of `bytes`, the first `most` of them. An unfinished record at the end is
// one whose header says more than there is, whose header itself is cut off, or zeros (pages that a
// power cut left unwritten).
ReadResult visit_records(const std::string& path, std::span<const std::byte> bytes,
                         const std::function<void(const Record&)>& visit, size_t most = SIZE_MAX) {
  size_t position = 0;
  const auto damaged = [&](const std::string& what) {
    return ReadResult{position, false,
                      path + ": damaged at byte " + std::to_string(position) + ": " + what};
  };
  for (; position < bytes.size() && most > 0; --most) {
    const auto rest = bytes.subspan(position);
    RecordHeader header;
    if (rest.size() < sizeof(header) || all_zero(rest)) return {position, false, ""};
    std::memcpy(&header, rest.data(), sizeof(header));
    if (header.magic == kOldMagic)
      throw ConfigError(path +
                        ": expected a log of this version, got version 0.3's: end that job " +
                        "there, and load its checkpoint here");
    if (header.magic != kMagic) return damaged("no record begins here");
    if (header.header_checksum != checksum_of(header))
      return damaged("the checksum of a record's header does not fit");
    const size_t record_bytes = sizeof(header) + header.bytes + padding_of(header.bytes);
    if (rest.size() < record_bytes) return {position, false, ""};
    const auto payload = rest.subspan(sizeof(header), header.bytes);
    if (crc32c(payload) != header.payload_checksum)
      return damaged("the checksum of record " + std::to_string(header.number) + " does not fit");
    if (!all_zero(rest.subspan(sizeof(header) + header.bytes, padding_of(header.bytes))))
      return damaged("expected zeros behind record " + std::to_string(header.number));
    visit({.number = header.number, .kind = header.kind, .time = header.time, .payload = payload});
    position += record_bytes;
  }
  return {position, true, ""};
}

// Whether a record behind the first byte of `rest` says that the disk was given record `number`.
bool was_synced(std::span<const std::byte> rest, uint64_t number) {
  RecordHeader header;
  for (size_t at = 8; at + sizeof(header) <= rest.size(); at += 8) {
    std::memcpy(&header, rest.data() + at, sizeof(header));
    if (header.magic == kMagic && header.header_checksum == checksum_of(header) &&
        header.synced >= number)
      return true;
  }
  return false;
}

std::string segment_name(uint64_t first) {
  std::array<char, 32> name{};
  std::snprintf(name.data(), name.size(), "%020" PRIu64 ".log", first);
  return name.data();
}

struct Segment {
  uint64_t first = 0;
  std::string path;
};

std::vector<Segment> segments_of(const std::string& folder) {
  std::vector<Segment> segments;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    uint64_t first = 0;
    if (std::sscanf(name.c_str(), "%20" SCNu64 ".log", &first) == 1 && name == segment_name(first))
      segments.push_back({first, entry.path().string()});
  }
  std::sort(segments.begin(), segments.end(),
            [](const Segment& a, const Segment& b) { return a.first < b.first; });
  return segments;
}

// From the last one on that begins at record `from` or before it.
std::vector<Segment> segments_from(const std::string& folder, uint64_t from) {
  auto segments = segments_of(folder);
  // A snapshot is named only when the segment behind it is there.
  if (segments.empty() && from > 1) {
    throw ConfigError(folder + ": expected a log that continues with record " +
                      std::to_string(from) + ", found none");
  }
  auto first = segments.begin();
  while (segments.end() - first > 1 && (first + 1)->first <= from) ++first;
  if (!segments.empty() && first->first > from) {
    throw ConfigError(first->path + ": expected a log that holds record " + std::to_string(from) +
                      ", it begins with " + std::to_string(first->first));
  }
  segments.erase(segments.begin(), first);
  return segments;
}

}  // namespace

UpdateLog::UpdateLog(const std::string& folder, uint64_t from,
                     const std::function<void(const Record&)>& visit, PowerCut power_cut,
                     std::function<void()> synced)
    : folder_(folder),
      write_behind_(WriteBehind::kWindowBytes, std::move(synced)),
      next_number_(from),
      writer_("ps-log-write", [this] { write_beside(); }) {
  make_folder(folder);
  const auto segments = segments_from(folder, from);
  for (size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    forget_cached(segment.path);
    const Mapping mapping(segment.path);
    uint64_t expected = segment.first;
    const auto result = visit_records(segment.path, mapping.bytes(), [&](const Record& record) {
      if (record.number != expected) {
        throw ConfigError(segment.path + ": expected record " + std::to_string(expected) +
                          ", found " + std::to_string(record.number));
      }
      ++expected;
      if (record.number < from) return;
      visit(record);
      next_number_ = record.number + 1;
      total_bytes_ += bytes_of(record);
    });
    const bool last = i + 1 == segments.size();
    if (!result.damage.empty()) {
      // Segments before the last one were synced when the next one began.
      const bool explained = power_cut == PowerCut::kPossible && last &&
                             !was_synced(mapping.bytes().subspan(result.whole_bytes), expected);
      if (!explained) throw ConfigError(result.damage);
      cut_off_text_ = result.damage;
    }
    if (power_cut == PowerCut::kPossible && last && !result.finished && cut_off_text_.empty())
      cut_off_text_ =
          segment.path + ": it ends within a record, at byte " + std::to_string(result.whole_bytes);
    if (!result.finished && !last) {
      throw ConfigError(segment.path + ": damaged at byte " + std::to_string(result.whole_bytes) +
                        ": it ends within a record, and " + segments[i + 1].path + " continues");
    }
    if (!last && segments[i + 1].first != expected) {
      throw ConfigError(segment.path + ": expected " + segment_name(expected) +
                        " to follow, found " + segments[i + 1].path);
    }
    if (last) {
      path_ = segment.path;
      file_ = Fd(::open(path_.c_str(), O_WRONLY | O_CLOEXEC));
      // What was cut off must not come back behind what is written next.
      if (!file_ || ::ftruncate(file_.get(), static_cast<off_t>(result.whole_bytes)) != 0 ||
          ::lseek(file_.get(), 0, SEEK_END) < 0 ||
          (!cut_off_text_.empty() && ::fsync(file_.get()) != 0))
        throw ConfigError(path_ + ": expected a writable file: " + system_reason(errno));
      segment_bytes_ = static_cast<int64_t>(result.whole_bytes);
      // A snapshot may be newer than what a power cut left of the log: nothing may follow the gap
      // in its file.
      if (expected < from) file_ = {};
      write_behind_.begin(path_, segment_bytes_);
    }
  }
  if (!file_) open_segment();
  can_reserve_ = keeps_reserved_space(file_.get());
}

UpdateLog::~UpdateLog() {
  if (beside_) writer_.finish();
  give_back();
}

void UpdateLog::open_segment() {
  std::string path = (fs::path(folder_) / segment_name(next_number_)).string();
  const Fd folder(::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder) throw ConfigError(folder_ + ": cannot sync: " + system_reason(errno));
  Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file) throw ConfigError(path + ": expected a writable file: " + system_reason(errno));
  // An empty one behind the one before it would be a gap in the log.
  try {
    write_behind_.begin(path, 0);
  } catch (...) {
    ::unlink(path.c_str());
    throw;
  }
  if (::fsync(folder.get()) != 0) {
    const int error = errno;
    ::unlink(path.c_str());
    break_off(folder_, error);
  }
  path_ = std::move(path);
  file_ = std::move(file);
  segment_bytes_ = reserved_ = reserve_from_ = 0;
}

void UpdateLog::break_off(const std::string& path, int error) {
  broken_ = path + ": cannot sync: " + system_reason(error) +
            ": records may be lost; look after the disk, then start the server again";
  throw_without_stack(broken_);
}

void UpdateLog::check_disk() {
  if (is_broken()) throw_without_stack(broken_);
  if (const int error = write_behind_.error()) break_off(path_, error);
}

bool UpdateLog::cut_off() {
  reserved_ = 0;  // What was lies behind the file's end.
  return ::ftruncate(file_.get(), segment_bytes_) == 0 &&
         ::lseek(file_.get(), segment_bytes_, SEEK_SET) == segment_bytes_;
}

uint64_t UpdateLog::begin_append(Record record, bool beside) {
  TORCH_CHECK_VALUE(record.payload.size() < (size_t{1} << 31), "log: a record of ",
                    record.payload.size(), " bytes; expected less than 2 GiB");
  check_disk();
  record.number = next_number_;
  const int64_t bytes = bytes_of(record);
  const bool may_wait = beside && record.message && bytes >= kLeastBeside;
  if (may_wait && !is_torn_ && is_reserved(bytes)) {
    beside_ = Beside{std::move(record), synced()};
    writer_.begin();
    return next_number_;
  }
  // Nothing may follow half a record.
  const int error = is_torn_ && !cut_off() ? EIO : write_record(file_.get(), record, synced());
  is_torn_ = error != 0 && !cut_off();
  if (error != 0)
    throw_without_stack(path_ + ": cannot write: " + write_refusal(error, segment_bytes_ + bytes));
  note_appended(record);
  if (may_wait) reserve(segment_bytes_, bytes);
  return record.number;
}

void UpdateLog::finish_append() {
  if (!beside_) return;
  writer_.finish();
  const Beside done = *std::exchange(beside_, std::nullopt);
  if (done.error != 0) {
    broken_ = path_ + ": cannot write to reserved space: " + system_reason(done.error) +
              ": look after the disk, then start the server again";
    throw_without_stack(broken_);
  }
  note_appended(done.record);
}

void UpdateLog::write_beside() {
  const int64_t bytes = bytes_of(beside_->record);
  beside_->error = write_record(file_.get(), beside_->record, beside_->synced);
  if (beside_->error == 0) reserve(segment_bytes_ + bytes, bytes);
}

void UpdateLog::note_appended(const Record& record) {
  segment_bytes_ += bytes_of(record);
  total_bytes_ += bytes_of(record);
  write_behind_.grown_to(segment_bytes_, record.number);
  next_number_ = record.number + 1;
}

// The limit of a process is not looked at when space is reserved, and may change.
bool UpdateLog::is_reserved(int64_t bytes) const {
  rlimit limit{};
  return segment_bytes_ + bytes <= reserved_ && ::getrlimit(RLIMIT_FSIZE, &limit) == 0 &&
         limit.rlim_cur >= static_cast<rlim_t>(segment_bytes_ + bytes);
}

// Early enough for the next record, which is like this one of `bytes` before `end`. On a disk that
// is nearly full records are written as long as there is space for them, before they are applied.
void UpdateLog::reserve(int64_t end, int64_t bytes) {
  const int64_t ahead = std::max(kReservedBytes, 2 * bytes);
  if (!can_reserve_ || end < reserve_from_ || reserved_ - end >= ahead / 2) return;
  const int64_t begin = std::max(reserved_, end);
  if (::fallocate(file_.get(), FALLOC_FL_KEEP_SIZE, begin, end + ahead - begin) == 0) {
    reserved_ = end + ahead;
  } else {
    reserve_from_ = end + ahead;
    (void)!::ftruncate(file_.get(), end);  // It may have taken what there was.
    reserved_ = 0;
  }
}

// An error leaves it to the next start, or to the segment's end.
void UpdateLog::give_back() {
  if (reserved_ > segment_bytes_) (void)!::ftruncate(file_.get(), segment_bytes_);
  reserved_ = 0;
}

void UpdateLog::sync() {
  check_disk();
  if (::fdatasync(file_.get()) != 0) break_off(path_, errno);
  synced_ = next_number_ - 1;
}

void UpdateLog::begin_segment() {
  check_disk();
  if (segment_bytes_ == 0) return;
  give_back();
  sync();
  open_segment();
}

void UpdateLog::remove_before(uint64_t number) {
  const auto segments = segments_of(folder_);
  for (size_t i = 0; i + 1 < segments.size(); ++i) {
    if (segments[i + 1].first <= number) fs::remove(segments[i].path);
  }
}

void write_records(const std::string& path, std::span<const Record> records) {
  for (const Record& record : records) {
    TORCH_CHECK_VALUE(record.payload.size() < (size_t{1} << 32), path, ": record ", record.number,
                      " has ", record.payload.size(), " bytes; expected less than 4 GiB");
  }
  write_atomically(path, [&](FileWriter& file) {
    static constexpr std::array<std::byte, 8> kZeros{};
    const auto write = [&](const Record& record) {
      const RecordHeader header = header_of(record, 0);
      file.write(std::as_bytes(std::span(&header, 1)));
      file.write(record.payload);
      file.write(std::span(kZeros).first(padding_of(record.payload.size())));
    };
    for (const Record& record : records) write(record);
    write({.number = records.size() + 1, .kind = kEnd});
  });
}

void read_records(const std::string& path, const std::function<void(const Record&)>& visit,
                  size_t most) {
  const Mapping mapping(path);
  size_t visited = 0;
  bool ended = false;
  const auto result = visit_records(
      path, mapping.bytes(),
      [&](const Record& record) {
        ended = record.kind == kEnd || ++visited == most;
        if (record.kind != kEnd) visit(record);
      },
      most);
  if (!result.damage.empty()) throw ConfigError(result.damage);
  if (!result.finished || !ended) {
    throw ConfigError(path + ": damaged at byte " + std::to_string(result.whole_bytes) +
                      ": it is cut off");
  }
}

}  // namespace cohort::ps
