// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/write_behind.h"

#include <cerrno>
#include <fcntl.h>
#include <unistd.h>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/system_error.h"

namespace cohort::ps {

namespace {

// Errors that are not the disk's: such a file cannot be synced, or memory is short.
bool is_of_the_call(int error) {
  return error == ENOSYS || error == EINVAL || error == EROFS || error == ENOMEM;
}

}  // namespace

WriteBehind::WriteBehind(int64_t window_bytes, std::function<void()> synced)
    : window_bytes_(window_bytes), on_synced_(std::move(synced)), thread_([this] { work(); }) {}

WriteBehind::~WriteBehind() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

// An opening of its own: an error of the disk is reported once per opening, and the log must see
// it, too.
void WriteBehind::begin(const std::string& path, int64_t bytes) {
  auto file = std::make_shared<const Fd>(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!*file) throw ConfigError(path + ": cannot open it: " + system_reason(errno));
  const std::lock_guard lock(mutex_);
  file_ = std::move(file);
  handled_ = bytes_ = dropped_ = bytes;
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

void WriteBehind::sync_soon() {
  {
    const std::lock_guard lock(mutex_);
    is_asked_ = true;
  }
  changed_.notify_one();
}

void WriteBehind::work() {
  ::pthread_setname_np(::pthread_self(), "ps-log");
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait_for(lock, kPeriod,
                      [this] { return ends_ || is_asked_ || bytes_ - handled_ >= window_bytes_; });
    if (ends_) return;
    const bool is_asked = std::exchange(is_asked_, false);
    if (bytes_ == handled_ && !is_asked) continue;
    handled_ = bytes_;
    // Not behind each push: the last page would have to be read again for the next one.
    const bool drops = !is_asked || bytes_ - dropped_ >= window_bytes_;
    if (drops) dropped_ = bytes_;
    std::shared_ptr<const Fd> file = file_;
    const int64_t bytes = bytes_;
    const uint64_t number = number_;
    lock.unlock();
    const bool is_on_disk = sync(file->get(), number, is_asked);
    if (is_asked && on_synced_) on_synced_();
    // After an error nothing is let go: what the disk has not got is in memory alone.
    if (is_on_disk && drops) ::posix_fadvise(file->get(), 0, bytes, POSIX_FADV_DONTNEED);
    file.reset();
    lock.lock();
  }
}

bool WriteBehind::sync(int file, uint64_t number, bool is_asked) {
  if (error_ != 0) return false;
  if (::fdatasync(file) != 0) {
    if (is_asked || !is_of_the_call(errno)) error_ = errno;
    return false;
  }
  synced_ = number;
  return true;
}

}  // namespace cohort::ps
