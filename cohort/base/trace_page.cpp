// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/trace_page.h"

#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <new>
#include <sys/mman.h>
#include <sys/stat.h>
#include <type_traits>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/base/fd.h"

namespace cohort {
namespace {

constexpr uint64_t kMagic =
    0x31304543'41525443;  // "CTRACE01" in memory; the digits are the version
constexpr size_t kNumWords = sizeof(TraceRecord) / sizeof(uint64_t);
constexpr int kMaxTries = 1000;

static_assert(std::is_trivially_copyable_v<TraceRecord> &&
              sizeof(TraceRecord) % sizeof(uint64_t) == 0);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

using Words = std::array<uint64_t, kNumWords>;

template <size_t N>
std::string_view text(const std::array<char, N>& field) {
  return {field.data(), strnlen(field.data(), N)};
}

}  // namespace

// `version` is odd while a write is under way; it grows by two with each.
struct TracePage::Layout {
  std::atomic<uint64_t> magic;
  std::atomic<uint64_t> version;
  std::array<std::atomic<uint64_t>, kNumWords> words;
};

void set_call_site(TraceRecord& record, const CallSite& site) {
  const char* slash = std::strrchr(site.file, '/');
  const std::string_view name = slash == nullptr ? site.file : slash + 1;
  // By hand: snprintf would be the dearest part of the record.
  std::array<char, 12> digits{};
  size_t begin = digits.size();
  for (unsigned line = static_cast<unsigned>(site.line); line > 0 || begin == digits.size();
       line /= 10) {
    digits[--begin] = static_cast<char>('0' + line % 10);
  }
  digits[--begin] = ':';
  const size_t num_digits = digits.size() - begin;
  const size_t count = name.copy(record.call_site.data(), record.call_site.size() - num_digits - 1);
  std::memcpy(record.call_site.data() + count, digits.data() + begin, num_digits);
  record.call_site[count + num_digits] = '\0';
}

std::string describe_tensor(const TraceRecord& record) {
  if (record.num_dims < 0) return "";
  std::string result(text(record.dtype));
  result += '[';
  for (int32_t d = 0; d < record.num_dims && d < 8; ++d) {
    result += (d == 0 ? "" : ", ") + std::to_string(record.dims[static_cast<size_t>(d)]);
  }
  return result + ']';
}

std::string describe(const TraceRecord& record) {
  if (text(record.operation).empty()) return "nothing yet";
  std::string result(text(record.operation));
  if (record.num_dims >= 0) result += " of " + describe_tensor(record);
  if (!text(record.call_site).empty()) result += " at " + std::string(text(record.call_site));
  return result;
}

int64_t steady_now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

TracePage::TracePage(const std::string& path) : mapped_(!path.empty()) {
  if (!mapped_) {
    layout_ = new Layout{};
  } else {
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    int error = fd < 0 ? errno : 0;
    if (error == 0 && ftruncate(fd, sizeof(Layout)) != 0) error = errno;
    // A hole would be filled by the first write, which a full disk answers by SIGBUS.
    if (error == 0) error = posix_fallocate(fd, 0, sizeof(Layout));
    void* memory = MAP_FAILED;
    if (error == 0) {
      memory = mmap(nullptr, sizeof(Layout), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (memory == MAP_FAILED) error = errno;
    }
    if (fd >= 0) ::close(fd);
    if (error != 0) {
      throw ConfigError(std::string(kTraceFileVariable) + "=" + path +
                        " cannot be made: " + std::strerror(error));
    }
    layout_ = new (memory) Layout{};
  }
  TraceRecord first;
  first.pid = getpid();
  first.since_ns = steady_now_ns();
  write(first);
  layout_->magic.store(kMagic, std::memory_order_release);
}

TracePage::~TracePage() {
  if (mapped_) {
    munmap(layout_, sizeof(Layout));
  } else {
    delete layout_;
  }
}

void TracePage::write(const TraceRecord& record) {
  const auto words = std::bit_cast<Words>(record);
  const std::lock_guard lock(mutex_);
  const uint64_t version = layout_->version.load(std::memory_order_relaxed);
  layout_->version.store(version + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  for (size_t i = 0; i < kNumWords; ++i)
    layout_->words[i].store(words[i], std::memory_order_relaxed);
  layout_->version.store(version + 2, std::memory_order_release);
}

TraceRecord TracePage::record() const {
  const std::lock_guard lock(mutex_);
  Words words;
  for (size_t i = 0; i < kNumWords; ++i)
    words[i] = layout_->words[i].load(std::memory_order_relaxed);
  return std::bit_cast<TraceRecord>(words);
}

// Not mapped: a process that truncates the file would end this one by SIGBUS.
std::optional<TraceRecord> TracePage::read(const std::string& path) noexcept {
  const Fd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (fstat(file.get(), &status) != 0 || status.st_size != static_cast<off_t>(sizeof(Layout)))
    return std::nullopt;
  const auto fetch = [&](void* to, size_t size, size_t from) {
    return pread(file.get(), to, size, static_cast<off_t>(from)) == static_cast<ssize_t>(size);
  };
  std::array<uint64_t, 2> head{};  // magic, version
  Words words;
  uint64_t after = 0;
  for (int i = 0; i < kMaxTries; ++i) {
    if (!fetch(head.data(), sizeof head, 0) || head[0] != kMagic ||
        !fetch(words.data(), sizeof words, offsetof(Layout, words)) ||
        !fetch(&after, sizeof after, offsetof(Layout, version))) {
      return std::nullopt;
    }
    if (head[1] % 2 == 0 && head[1] == after) return std::bit_cast<TraceRecord>(words);
  }
  return std::nullopt;
}

}  // namespace cohort
