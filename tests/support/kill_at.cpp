// SPDX-License-Identifier: Apache-2.0
#include "tests/support/kill_at.h"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <mutex>
#include <string_view>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int kHere = -100;  // AT_FDCWD; its header may define open in terms of another.

struct State {
  std::mutex mutex;
  std::string prefix;
  std::string calls;
  int kill_at = 0;
  int count = 0;
  std::array<bool, 4096> watched{};  // by file descriptor
};

State& state() {
  static State* const state = new State;  // lives until the last thread's last call
  return *state;
}

bool is_watched(const char* path) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  return !s.prefix.empty() && std::string_view(path).starts_with(s.prefix);
}

bool is_watched(int file) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  return file >= 0 && static_cast<size_t>(file) < s.watched.size() &&
         s.watched[static_cast<size_t>(file)];
}

void watch(int file, bool on) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  if (file >= 0 && static_cast<size_t>(file) < s.watched.size())
    s.watched[static_cast<size_t>(file)] = on;
}

// Returns whether the next count is the last.
bool count(const char* name, const char* path = "") {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  if (++s.count == s.kill_at) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
  const std::string_view whole(path);
  s.calls += std::string(name) + " " + std::string(whole.substr(whole.rfind('/') + 1)) + "\n";
  return s.count + 1 == s.kill_at;
}

int open_at(const char* path, int flags, unsigned mode) {
  const bool counted = is_watched(path);
  if (counted) count("open", path);
  const int file = static_cast<int>(syscall(SYS_openat, kHere, path, flags, mode));
  watch(file, counted);
  return file;
}

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const unsigned mode = va_arg(arguments, unsigned);
  va_end(arguments);
  return open_at(path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const unsigned mode = va_arg(arguments, unsigned);
  va_end(arguments);
  return open_at(path, flags, mode);
}

ssize_t write(int file, const void* bytes, size_t size) {
  if (is_watched(file)) {
    if (count("write")) syscall(SYS_write, file, bytes, size / 2);
    count("write on");
  }
  return syscall(SYS_write, file, bytes, size);
}

int fsync(int file) {
  if (!is_watched(file)) return static_cast<int>(syscall(SYS_fsync, file));
  count("fsync");
  return 0;
}

int close(int file) {
  if (is_watched(file)) count("close");
  watch(file, false);
  return static_cast<int>(syscall(SYS_close, file));
}

int rename(const char* from, const char* to) noexcept {
  if (is_watched(from)) count("rename", to);
  return static_cast<int>(syscall(SYS_rename, from, to));
}

int unlink(const char* path) noexcept {
  if (is_watched(path)) count("unlink", path);
  return static_cast<int>(syscall(SYS_unlink, path));
}

int remove(const char* path) noexcept {
  if (is_watched(path)) count("unlink", path);
  const auto result = static_cast<int>(syscall(SYS_unlink, path));
  return result != 0 && errno == EISDIR ? static_cast<int>(syscall(SYS_rmdir, path)) : result;
}

int mkdir(const char* path, mode_t mode) noexcept {
  if (is_watched(path)) count("mkdir", path);
  return static_cast<int>(syscall(SYS_mkdir, path, mode));
}

}  // extern "C"

namespace cohort::test {

void kill_at(const std::string& prefix, int number) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  s.prefix = prefix;
  s.kill_at = number;
}

const std::string& counted_calls() {
  return state().calls;
}

}  // namespace cohort::test
