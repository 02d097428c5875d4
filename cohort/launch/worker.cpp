// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/worker.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <iostream>
#include <sched.h>
#include <signal.h>
#include <sstream>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <system_error>
#include <thread>
#include <unistd.h>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/launch/session.h"

namespace cohort::launch {
namespace {

constexpr std::chrono::microseconds kLongestPause{20'000};

// Returns 0, or the errno that executing the file would fail with.
int executable_error(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return errno;
  if (S_ISDIR(status.st_mode)) return EISDIR;
  return ::access(path.c_str(), X_OK) == 0 ? 0 : errno;
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const std::string& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

struct ChildPlan {
  const ProcessOptions& options;
  const Reaper& reaper;
  const Signals& signals;
  char* const* argv;
  char* const* envp;
  pid_t launcher;
  int failure_fd;
  cpu_set_t cores;
};

cpu_set_t core_set(const std::vector<int>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  return set;
}

// What exec closes: all that the launcher has opened.
void close_on_exec() {
  std::vector<int> open;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    open.push_back(std::atoi(entry.path().filename().c_str()));
  for (const int fd : open) {
    const int flags = ::fcntl(fd, F_GETFD);
    if (flags >= 0 && (flags & FD_CLOEXEC) != 0) ::close(fd);
  }
}

void flush_output() {
  std::cout.flush();
  std::fflush(stdout);
  std::fflush(stderr);
}

// Static objects are the launcher's: _exit leaves them alone. An exception would unwind the
// launcher.
[[noreturn]] void run_function(const ProcessOptions& options, char** environment) noexcept {
  close_on_exec();
  ::environ = environment;
  const int code = options.function(options.local_rank);
  flush_output();
  ::_exit(code);
}

// Between fork and exec: nothing here allocates or locks, but for a function.
[[noreturn]] void become_worker(const ChildPlan& plan) {
  ::setsid();
  plan.reaper.track(::getpid());
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != plan.launcher) ::_exit(128 + SIGKILL);
  const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  ::dup2(null, STDIN_FILENO);
  ::dup2(plan.options.stdout_fd, STDOUT_FILENO);
  ::dup2(plan.options.stderr_fd, STDERR_FILENO);
  if (!plan.options.cores.empty()) ::sched_setaffinity(0, sizeof(plan.cores), &plan.cores);
  if (plan.options.inherited_fd >= 0) ::fcntl(plan.options.inherited_fd, F_SETFD, 0);
  plan.signals.restore();
  if (plan.options.function) run_function(plan.options, const_cast<char**>(plan.envp));
  ::execve(plan.options.program.c_str(), plan.argv, plan.envp);
  const int error = errno;
  while (::write(plan.failure_fd, &error, sizeof(error)) < 0 && errno == EINTR) {
  }
  ::_exit(127);
}

}  // namespace

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    const int error = executable_error(name);
    if (error == 0) return name;
    throw ConfigError(name + ": expected a program that can be executed, got " +
                      std::strerror(error));
  }
  std::istringstream folders(env_string("PATH").value_or("/usr/local/bin:/usr/bin:/bin"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string path = (folder.empty() ? "." : folder) + "/" + name;
    if (executable_error(path) == 0) return path;
  }
  throw ConfigError(name + ": expected a program in PATH (a file here is started as ./" + name +
                    "), found none");
}

pid_t start_process(const ProcessOptions& options, const Reaper& reaper, const Signals& signals) {
  const std::vector<char*> argv = pointers(options.command);
  const std::vector<char*> envp = pointers(options.environment);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw std::system_error(errno, std::generic_category(), "pipe");
  }
  Fd failure_reader(ends[0]);
  Fd failure_writer(ends[1]);
  const ChildPlan plan{options,
                       reaper,
                       signals,
                       argv.data(),
                       envp.data(),
                       ::getpid(),
                       failure_writer.get(),
                       core_set(options.cores)};
  if (options.function) flush_output();  // Or the worker would write it once more.
  const pid_t pid = ::fork();
  if (pid < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (pid == 0) become_worker(plan);
  failure_writer.reset();
  int error = 0;
  ssize_t size = 0;
  do {
    size = ::read(failure_reader.get(), &error, sizeof(error));
  } while (size < 0 && errno == EINTR);
  if (size == sizeof(error)) {
    kill_sessions({&pid, 1});
    reap(pid, std::chrono::steady_clock::now() + kKillTime);
    throw ConfigError(options.program + ": expected a program that can be executed, got " +
                      std::strerror(error));
  }
  return pid;
}

std::optional<ExitStatus> peek_exit(pid_t pid) {
  siginfo_t info{};
  if (::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0) {
    throw std::system_error(errno, std::generic_category(), "waitid " + std::to_string(pid));
  }
  if (info.si_pid == 0) return std::nullopt;
  if (info.si_code == CLD_EXITED) return ExitStatus{info.si_status, 0};
  return ExitStatus{128 + info.si_status, info.si_status};
}

bool reap(pid_t pid, std::chrono::steady_clock::time_point deadline) {
  for (std::chrono::microseconds pause{100};; pause = std::min(2 * pause, kLongestPause)) {
    const pid_t ended = ::waitpid(pid, nullptr, WNOHANG);
    if (ended != 0 && !(ended < 0 && errno == EINTR)) return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace cohort::launch
