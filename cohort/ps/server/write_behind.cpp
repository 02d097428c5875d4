// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/write_behind.h"

#include <cerrno>
#include <fcntl.h>
#include <unistd.h>

#include "cohort/base/fd.h"

namespace cohort::ps {

namespace {

// Errors that are not the disk's: such a file cannot be synced, or memory is short.
bool is_of_the_call(int error) {
  return error == ENOSYS || error == EINVAL || error == EROFS || error == ENOMEM;
}

}  // namespace

WriteBehind::WriteBehind(int64_t window_bytes)
    : window_bytes_(window_bytes), thread_([this] { work(); }) {}

WriteBehind::~WriteBehind() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void WriteBehind::begin(const std::string& path, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  path_ = path;
  handled_ = bytes_ = bytes;
}

void WriteBehind::grown_to(int64_t bytes, uint64_t number) {
  bool due = false;
  {
    const std::lock_guard lock(mutex_);
    bytes_ = bytes;
    number_ = number;
    due = bytes_ - handled_ >= window_bytes_;
  }
  if (due) changed_.notify_one();
}

void WriteBehind::work() {
  ::pthread_setname_np(::pthread_self(), "ps-log");
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait_for(lock, kPeriod,
                      [this] { return ends_ || bytes_ - handled_ >= window_bytes_; });
    if (ends_) return;
    if (bytes_ == handled_) continue;
    handled_ = bytes_;
    const std::string path = path_;
    const int64_t bytes = bytes_;
    const uint64_t number = number_;
    lock.unlock();
    sync(path, bytes, number);
    lock.lock();
  }
}

// The file is opened again: an error of the disk is reported once per opening, and the log must see
// it, too. After an error nothing is let go: what the disk has not got is in memory alone.
void WriteBehind::sync(const std::string& path, int64_t bytes, uint64_t number) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file || error_ != 0) return;
  if (::fdatasync(file.get()) != 0) {
    if (!is_of_the_call(errno)) error_ = errno;
    return;
  }
  synced_ = number;
  ::posix_fadvise(file.get(), 0, bytes, POSIX_FADV_DONTNEED);
}

}  // namespace cohort::ps
