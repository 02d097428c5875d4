// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/stack_report.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cxxabi.h>
#include <execinfo.h>
#include <fstream>
#include <memory>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cohort/base/trace_page.h"

namespace cohort {
namespace {

constexpr int kMaxFrames = 64;

// A signal handler reaches nothing but statics.
struct HandlerState {
  std::atomic<bool> taken{false};  // a StackReport lives
  std::atomic<bool> busy{false};   // addresses wait for the thread
  std::array<void*, kMaxFrames> frames{};
  int num_frames = 0;
  sem_t ready{};
};

HandlerState& state() {
  static HandlerState instance;
  return instance;
}

void on_signal(int signal) {
  const int saved = errno;
  const pid_t process = getpid();
  if (static_cast<pid_t>(syscall(SYS_gettid)) != process) {
    syscall(SYS_tgkill, process, process,
            signal);  // the kernel may pick any thread: pass it to the main one
  } else if (!state().busy.exchange(true)) {
    state().num_frames = backtrace(state().frames.data(), kMaxFrames);
    sem_post(&state().ready);
  }
  errno = saved;
}

// "lib.so(_ZN3fooEv+0x12) [0x7f..]" with the name in the brackets made readable.
std::string readable(const std::string& line) {
  const size_t begin = line.find('(');
  const size_t end = line.find('+', begin);
  if (begin == std::string::npos || end == std::string::npos || end == begin + 1) return line;
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(line.substr(begin + 1, end - begin - 1).c_str(), nullptr, nullptr,
                          &status),
      &std::free);
  return status == 0 ? line.substr(0, begin + 1) + name.get() + line.substr(end) : line;
}

void write_stack(const std::string& path) {
  const std::unique_ptr<char*, decltype(&std::free)> names(
      backtrace_symbols(state().frames.data(), state().num_frames), &std::free);
  const std::string temporary = path + ".new";
  {
    // Whole or absent for a reader, but not synced: the launcher waits for it, and a crash of the
    // machine may lose it.
    std::ofstream file(temporary);
    const int skipped = 2;  // the handler and the kernel's frame beneath it
    for (int i = skipped; names != nullptr && i < state().num_frames; ++i)
      file << readable(names.get()[i]) << '\n';
    if (!file.flush()) return;
  }
  std::rename(temporary.c_str(), path.c_str());
}

}  // namespace

StackReport::StackReport(std::string path) : path_(std::move(path)) {
  active_ = !state().taken.exchange(true);
  if (!active_) return;
  // The first call loads the unwinder's library, which allocates: not in the handler.
  std::array<void*, 1> frame{};
  backtrace(frame.data(), 1);
  sem_init(&state().ready, 0, 0);
  state().busy = false;
  thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  pthread_setname_np(thread_.native_handle(), "cohort-stack");
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(stack_signal(), &action, nullptr);
}

StackReport::~StackReport() {
  if (!active_) return;
  signal(stack_signal(),
         SIG_IGN);  // the default would end the process when the launcher asks a moment too late
  thread_.request_stop();
  sem_post(&state().ready);
  thread_.join();
  state().taken = false;
}

void StackReport::run(const std::stop_token& stop) {
  while (true) {
    while (sem_wait(&state().ready) != 0 && errno == EINTR) {
    }
    if (stop.stop_requested()) return;
    write_stack(path_);
    state().busy = false;
  }
}

}  // namespace cohort
