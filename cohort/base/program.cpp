// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/program.h"

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <execinfo.h>
#include <fcntl.h>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "cohort/base/amx.h"
#include "cohort/base/env.h"
#include "cohort/base/error.h"

namespace cohort {
namespace {

// Where the error was raised, as far as it says: c10's errors carry their stack.
std::string stack_of(const std::exception& error) {
  const auto* raised = dynamic_cast<const c10::Error*>(&error);
  return raised && raised->backtrace() ? raised->backtrace()->get() : "";
}

constexpr std::pair<int, const char*> kCrashes[] = {{SIGSEGV, "segmentation fault"},
                                                    {SIGBUS, "bus error"},
                                                    {SIGFPE, "arithmetic error"},
                                                    {SIGILL, "illegal instruction"},
                                                    {SIGABRT, "abort"}};
constexpr size_t kCrashFrames = 12;   // innermost first; a launcher shows the last lines of stderr
constexpr size_t kHandlerFrames = 2;  // the handler's own and the kernel's

void write_text(const char* text) {
  if (::write(STDERR_FILENO, text, std::strlen(text)) < 0) return;
}

// Reaches nothing that allocates or locks; then the signal does what it would have done.
void on_crash(int signal) {
  const char* name = "";
  for (const auto& [number, text] : kCrashes) {
    if (number == signal) name = text;
  }
  write_text("error: ");
  write_text(name);
  write_text(", in\n");
  std::array<void*, kHandlerFrames + kCrashFrames> frames{};
  const int count = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  if (count > static_cast<int>(kHandlerFrames)) {
    ::backtrace_symbols_fd(frames.data() + kHandlerFrames, count - static_cast<int>(kHandlerFrames),
                           STDERR_FILENO);
  }
  ::raise(signal);
}

// A crash tells where it was. What a program or a tool has set up for a signal stays.
void report_crashes() {
  std::array<void*, 1> frame{};
  ::backtrace(frame.data(), 1);  // The first call loads a library: not in the handler.
  static std::array<std::byte, 64 * 1024> stack;  // The usual one may be what has overflowed.
  stack_t other{};
  other.ss_sp = stack.data();
  other.ss_size = stack.size();
  ::sigaltstack(&other, nullptr);
  for (const auto& [number, name] : kCrashes) {
    struct sigaction action {};
    ::sigaction(number, nullptr, &action);
    if ((action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler != SIG_DFL) continue;
    action.sa_handler = on_crash;
    action.sa_flags = SA_ONSTACK | SA_NODEFER | static_cast<int>(SA_RESETHAND);
    ::sigaction(number, &action, nullptr);
  }
}

// Tells the launcher, if there is one, what the exit code means.
void explain(int code, const std::string& text, const std::string& stack) {
  const auto path = env_string("COHORT_ERROR_FILE");
  if (!path) return;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const nlohmann::json record = {{"rank", env_string("RANK").value_or("")},
                                 {"exit_code", code},
                                 {"message", text},
                                 {"stack", stack},
                                 {"time", std::chrono::duration<double>(now).count()}};
  std::ofstream(*path) << record.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)
                       << '\n';
}

int report(const std::string& program, int code, const std::exception& error) {
  const std::string text = one_line(error);
  const auto rank = env_string("RANK");
  const auto world = env_string("WORLD_SIZE");
  const std::string tag = rank && world ? "[rank " + *rank + "/" + *world + "] " : "";
  std::fprintf(stderr, "%s%s: error: %s\n", tag.c_str(), program.c_str(), text.c_str());
  explain(code, text, stack_of(error));
  return code;
}

}  // namespace

void open_standard_descriptors() {
  for (int fd = 0; fd < 3; ++fd) {
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

int run_program(const std::string& program, const std::function<int()>& body) {
  open_standard_descriptors();
  avoid_amx_without_tiles();
  report_crashes();
  // A limit on the size of files is an error of `write`, as a full disk is. A handler rather than
  // SIG_IGN: programs that this one starts do not inherit it.
  std::signal(SIGXFSZ, [](int) {});
  try {
    const int code = body();
    std::cout.flush();
    if (code == kExitOk && (std::fflush(stdout) != 0 || std::ferror(stdout) != 0))
      throw std::system_error(errno, std::generic_category(), "standard output cannot be written");
    if (code == kExitStopped) explain(code, "stopped on request", "");
    return code;
  } catch (const ConfigError& error) {
    return report(program, kExitUsage, error);
  } catch (const c10::DistError& error) {
    return report(program, kExitLostPeer, error);
  } catch (const std::exception& error) {
    return report(program, kExitFailure, error);
  }
}

}  // namespace cohort
