// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/signals.h"

#include <cerrno>
#include <sys/signalfd.h>
#include <system_error>

namespace cohort::launch {

Signals::Signals() {
  sigset_t handled;
  sigemptyset(&handled);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP}) {
    struct sigaction current {};
    ::sigaction(signal, nullptr, &current);
    if (current.sa_handler != SIG_IGN) sigaddset(&handled, signal);
  }
  sigaddset(&handled, table_signal());
  sigaddset(&handled, SIGWINCH);
  sigaddset(&handled, SIGCHLD);
  // An inherited "ignore" would have the kernel reap workers before their status is read.
  struct sigaction plain {};
  plain.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &plain, &old_child_);
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &ignore, &old_pipe_);
  ::sigprocmask(SIG_BLOCK, &handled, &old_mask_);
  fd_ = Fd(::signalfd(-1, &handled, SFD_NONBLOCK | SFD_CLOEXEC));
  if (!fd_) {
    const int error = errno;
    restore();
    throw std::system_error(error, std::generic_category(), "signalfd");
  }
}

std::optional<int> Signals::next() const {
  signalfd_siginfo info{};
  if (::read(fd_.get(), &info, sizeof(info)) != sizeof(info)) return std::nullopt;
  return static_cast<int>(info.ssi_signo);
}

void Signals::unblock() const noexcept {
  ::sigprocmask(SIG_SETMASK, &old_mask_, nullptr);
}

void Signals::restore() const noexcept {
  ::sigaction(SIGPIPE, &old_pipe_, nullptr);
  ::sigaction(SIGCHLD, &old_child_, nullptr);
  unblock();
}

}  // namespace cohort::launch
