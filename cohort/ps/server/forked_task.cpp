// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/forked_task.h"

#include <array>
#include <cerrno>
#include <csignal>
#include <fcntl.h>
#include <fstream>
#include <string_view>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/base/system_error.h"

namespace cohort::ps {

namespace {

constexpr int kErrorDescriptor = 3;

// No more than a pipe takes at once: the parent reads when the child has ended.
void report(const std::string& text) {
  std::string_view rest = std::string_view(text).substr(0, 4096);
  while (!rest.empty()) {
    const ssize_t written = ::write(kErrorDescriptor, rest.data(), rest.size());
    if (written <= 0) return;
    rest.remove_prefix(static_cast<size_t>(written));
  }
}

[[noreturn]] void run_child(const std::function<void()>& work, int error_pipe, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  // Sockets that the child held open would keep the port of a server that was killed.
  ::dup2(error_pipe, kErrorDescriptor);
  ::close_range(kErrorDescriptor + 1, ~0U, 0);
  try {
    work();
  } catch (const std::exception& error) {
    report(one_line(error));
    ::_exit(1);
  }
  ::_exit(0);
}

}  // namespace

ForkedTask::ForkedTask(const std::function<void()>& work, std::function<void(std::string)> done)
    : done_(std::move(done)) {
  std::array<int, 2> ends{};
  TORCH_CHECK(::pipe2(ends.data(), O_CLOEXEC) == 0, "pipe: ", system_reason(errno));
  error_pipe_ = Fd(ends[0]);
  const Fd child_end(ends[1]);
  const pid_t parent = ::getpid();
  child_ = ::fork();
  TORCH_CHECK(child_ >= 0, "fork: ", system_reason(errno));
  if (child_ == 0) run_child(work, child_end.get(), parent);
}

ForkedTask::~ForkedTask() {
  if (child_ < 0) return;
  ::kill(child_, SIGKILL);
  ::waitpid(child_, nullptr, 0);
}

uint64_t ForkedTask::written_bytes() const {
  std::ifstream file("/proc/" + std::to_string(child_) + "/io");
  uint64_t bytes = 0;
  for (std::string name; file >> name >> bytes;) {
    if (name == "wchar:") return bytes;
  }
  return 0;
}

bool ForkedTask::poll() {
  if (child_ < 0) return true;
  int status = 0;
  const pid_t ended = ::waitpid(child_, &status, WNOHANG);
  if (ended == 0) return false;
  child_ = -1;
  std::string reason;
  if (ended < 0) {
    reason = "its end could not be learnt: " + system_reason(errno);
  } else if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    reason = "its process was killed";
  }
  if (!reason.empty()) {
    std::array<char, 4096> text{};
    const ssize_t bytes = ::read(error_pipe_.get(), text.data(), text.size());
    if (bytes > 0) reason.assign(text.data(), static_cast<size_t>(bytes));
  }
  done_(reason);
  return true;
}

}  // namespace cohort::ps
