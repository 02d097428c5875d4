// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/reaper.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <system_error>

#include "cohort/launch/session.h"

namespace cohort::launch {
namespace {

// A message is a session to track, minus a session to untrack, or kShutdown.
constexpr pid_t kShutdown = 0;
constexpr size_t kMostSessions = 8192;  // Twice the most workers of a node.

// Keeps only the pipe open, so that the reaper holds no terminal or file.
void keep_only(int fd) {
  const int null = ::open("/dev/null", O_RDWR);
  for (int standard = 0; standard < 3; ++standard) ::dup2(null, standard);
  if (fd > 3) ::close_range(3, static_cast<unsigned>(fd) - 1, 0);
  ::close_range(static_cast<unsigned>(fd) + 1, ~0U, 0);
}

[[noreturn]] void run_reaper(int pipe) {
  ::setsid();
  ::prctl(PR_SET_NAME, "cohort-reaper");
  sigset_t all;
  sigfillset(&all);
  ::sigprocmask(SIG_SETMASK, &all, nullptr);
  keep_only(pipe);
  std::array<pid_t, kMostSessions> sessions{};  // 0: free.
  pid_t message = 0;
  while (true) {
    const ssize_t size = ::read(pipe, &message, sizeof(message));
    if (size < 0 && errno == EINTR) continue;
    if (size != sizeof(message)) break;
    if (message == kShutdown) ::_exit(0);
    const pid_t old = message < 0 ? -message : 0;
    const auto slot = std::find(sessions.begin(), sessions.end(), old);
    if (slot != sessions.end()) *slot = std::max(message, 0);
  }
  kill_sessions(sessions);
  ::_exit(0);
}

}  // namespace

Reaper::Reaper() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw std::system_error(errno, std::generic_category(), "reaper: pipe");
  }
  Fd reader(ends[0]);
  pipe_ = Fd(ends[1]);
  pid_ = ::fork();
  if (pid_ < 0) throw std::system_error(errno, std::generic_category(), "reaper: fork");
  if (pid_ == 0) {
    pipe_.reset();
    run_reaper(reader.get());
  }
}

Reaper::~Reaper() {
  send(kShutdown);
  pipe_.reset();
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Reaper::track(pid_t session) const noexcept {
  send(session);
}

void Reaper::untrack(pid_t session) const noexcept {
  send(-session);
}

void Reaper::send(pid_t message) const noexcept {
  while (::write(pipe_.get(), &message, sizeof(message)) < 0 && errno == EINTR) {
  }
}

}  // namespace cohort::launch
