// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/peer_process.h"

#include <cerrno>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cohort/base/process_stat.h"

namespace cohort::comm {

PeerProcess::PeerProcess(pid_t pid, const std::string& started) : is_watched_(true) {
  if (pid == getpid()) return;
  fd_ = Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!fd_ && errno != ESRCH) {
    is_watched_ = false;
  } else if (!fd_ || process_stat(pid, 22) != started) {
    fd_.reset();  // the number is another process's by now
    had_ended_ = true;
  }
}

bool PeerProcess::has_ended() const {
  if (!fd_) return had_ended_;
  pollfd entry{.fd = fd_.get(), .events = POLLIN, .revents = 0};
  return poll(&entry, 1, 0) > 0;
}

}  // namespace cohort::comm
