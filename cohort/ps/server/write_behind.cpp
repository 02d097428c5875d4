#include "cohort/ps/server/write_behind.h"

#include <cerrno>
#include <fcntl.h>
#include <utility>

#include "cohort/base/fd.h"

namespace cohort::ps {

namespace {

// Of windows that wait. With more the disk is behind by far.
constexpr size_t kMostWaiting = 4;

// What says nothing of the disk: the call is not there for this file, or memory is short.
bool is_of_the_call(int error) {
  return error == ENOSYS || error == EINVAL || error == EOPNOTSUPP || error == ESPIPE ||
         error == ENOMEM;
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
  path_ = path;
  handled_ = bytes;
}

void WriteBehind::grown_to(int64_t bytes) {
  if (bytes - handled_ < window_bytes_) return;
  Window window{path_, std::exchange(handled_, bytes), bytes};
  {
    const std::lock_guard lock(mutex_);
    if (waiting_.size() == kMostWaiting) return;
    waiting_.push_back(std::move(window));
  }
  changed_.notify_one();
}

void WriteBehind::work() {
  ::pthread_setname_np(::pthread_self(), "ps-log");
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ends_ || !waiting_.empty(); });
    if (ends_) return;
    const Window window = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    // Opened anew: an error of the disk is told once to each opening, and the log must hear of it.
    // After an error nothing is let go: what the disk has not got is in memory alone.
    if (const Fd file(::open(window.path.c_str(), O_RDONLY | O_CLOEXEC)); file && error_ == 0) {
      if (::sync_file_range(file.get(), window.begin, window.end - window.begin,
                            SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER) != 0) {
        if (!is_of_the_call(errno)) error_ = errno;
      } else {
        // From the beginning: what was not yet on the disk stayed the last time.
        ::posix_fadvise(file.get(), 0, window.end, POSIX_FADV_DONTNEED);
      }
    }
    lock.lock();
  }
}

}  // namespace cohort::ps
