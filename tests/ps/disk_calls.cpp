// SPDX-License-Identifier: Apache-2.0
#include "tests/ps/disk_calls.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fcntl.h>
#include <pthread.h>
#include <string_view>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

namespace cohort::ps::disk_calls {

namespace {

struct Note {
  std::atomic<int> call{-1};
  std::atomic<uint64_t> device{0};
  std::atomic<uint64_t> file{0};
  std::atomic<int64_t> bytes{0};
};

// Shared with forked children.
struct Notes {
  std::array<std::atomic<int>, 5> next_error{};
  std::atomic<long> file_system{0};
  std::atomic<int> instead_us{-1};  // What a sync takes instead of reaching the disk; -1: it does.
  std::atomic<uint64_t> count{0};
  std::array<Note, size_t{1} << 16> ring{};
};

Notes& notes() {
  static Notes* const shared = [] {
    void* const memory =
        ::mmap(nullptr, sizeof(Notes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    return new (memory) Notes;
  }();
  return *shared;
}

// Returns the error that the call is to have, or 0.
int planned_error(Call call) {
  return notes().next_error[static_cast<size_t>(call)].exchange(0);
}

// `status`: of the file, when the call began.
void note(Call call, const struct stat& status) {
  Notes& all = notes();
  Note& next = all.ring[all.count++ % all.ring.size()];
  next.device = status.st_dev;
  next.file = status.st_ino;
  next.bytes = status.st_size;
  next.call = static_cast<int>(call);
}

// Calls `visit` for what was noted of a file, the last first, until it returns false.
template <class Visit>
void visit_notes(const std::string& path, const Visit& visit) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return;
  Notes& all = notes();
  const uint64_t count = all.count;
  for (uint64_t i = count; i > 0 && count - i < all.ring.size(); --i) {
    const Note& one = all.ring[(i - 1) % all.ring.size()];
    if (one.device == status.st_dev && one.file == status.st_ino && !visit(one)) return;
  }
}

}  // namespace

void fail_next(Call call, int error) {
  notes().next_error[static_cast<size_t>(call)] = error;
}

int count(Call call, const std::string& path) {
  int number = 0;
  visit_notes(path, [&](const Note& one) {
    number += one.call == static_cast<int>(call);
    return true;
  });
  return number;
}

int64_t synced_bytes(const std::string& path) {
  int64_t bytes = -1;
  visit_notes(path, [&](const Note& one) {
    if (one.call != static_cast<int>(Call::kFdatasync) &&
        one.call != static_cast<int>(Call::kFsync))
      return true;
    bytes = one.bytes;
    return false;
  });
  return bytes;
}

ReplacedSyncs::ReplacedSyncs(int microseconds) {
  notes().instead_us = microseconds;
}

ReplacedSyncs::~ReplacedSyncs() {
  notes().instead_us = -1;
}

void set_file_system(long type) {
  notes().file_system = type;
}

void forget() {
  notes().count = 0;
}

namespace {

// What is synced is what was there before, once the call has returned: a process may be killed in
// it.
int pass_on(Call call, long number, int descriptor) {
  if (const int error = planned_error(call)) {
    errno = error;
    return -1;
  }
  struct stat status {};
  const bool known = ::fstat(descriptor, &status) == 0;
  if (const int instead_us = notes().instead_us; instead_us >= 0) {
    ::usleep(static_cast<unsigned>(instead_us));
  } else if (::syscall(number, descriptor) != 0) {
    return -1;
  }
  if (known) note(call, status);
  return 0;
}

bool is_large(const iovec* pieces, int count) {
  size_t bytes = 0;
  for (int i = 0; i < count; ++i) bytes += pieces[i].iov_len;
  return bytes >= size_t{64} << 10;
}

bool is_thread_of_the_log() {
  std::array<char, 16> name{};
  return ::pthread_getname_np(::pthread_self(), name.data(), name.size()) == 0 &&
         std::string_view(name.data()) == "ps-log-write";
}

}  // namespace

}  // namespace cohort::ps::disk_calls

using cohort::ps::disk_calls::pass_on;
using DiskCall = cohort::ps::disk_calls::Call;

extern "C" int fdatasync(int file) {
  return pass_on(DiskCall::kFdatasync, SYS_fdatasync, file);
}

extern "C" int fsync(int file) {
  return pass_on(DiskCall::kFsync, SYS_fsync, file);
}

// Returns its error instead of setting errno.
extern "C" int posix_fadvise(int file, off_t begin, off_t bytes, int advice) noexcept {
  struct stat status {};
  if (advice == POSIX_FADV_DONTNEED && ::fstat(file, &status) == 0)
    cohort::ps::disk_calls::note(DiskCall::kDropPages, status);
  return ::syscall(SYS_fadvise64, file, begin, bytes, advice) == 0 ? 0 : errno;
}

extern "C" ssize_t writev(int file, const iovec* pieces, int count) {
  if (cohort::ps::disk_calls::is_large(pieces, count)) {
    if (const int error = cohort::ps::disk_calls::planned_error(DiskCall::kWriteLarge)) {
      errno = error;
      return -1;
    }
    struct stat status {};
    if (cohort::ps::disk_calls::is_thread_of_the_log() && ::fstat(file, &status) == 0)
      cohort::ps::disk_calls::note(DiskCall::kWriteLarge, status);
  }
  return ::syscall(SYS_writev, file, pieces, count);
}

extern "C" int fallocate(int file, int mode, off_t begin, off_t bytes) {
  if (const int error = cohort::ps::disk_calls::planned_error(DiskCall::kReserve)) {
    // As a file system may do that finds the rest of its disk too small.
    if (error == ENOSPC) (void)::syscall(SYS_fallocate, file, mode, begin, bytes / 2);
    errno = error;
    return -1;
  }
  struct stat status {};
  if (::fstat(file, &status) == 0) cohort::ps::disk_calls::note(DiskCall::kReserve, status);
  return static_cast<int>(::syscall(SYS_fallocate, file, mode, begin, bytes));
}

extern "C" int fstatfs(int file, struct statfs* status) noexcept {
  if (::syscall(SYS_fstatfs, file, status) != 0) return -1;
  const long said = cohort::ps::disk_calls::notes().file_system;
  if (said != 0) status->f_type = said;
  return 0;
}
