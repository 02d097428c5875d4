#include "cohort/base/program.h"

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "cohort/base/env.h"
#include "cohort/base/error.h"

namespace cohort {
namespace {

// Where the error was raised, as far as it says: c10's errors carry their stack.
std::string stack_of(const std::exception& error) {
  const auto* raised = dynamic_cast<const c10::Error*>(&error);
  return raised && raised->backtrace() ? raised->backtrace()->get() : "";
}

int report(const std::string& program, int code, const std::exception& error) {
  const std::string text = one_line(error);
  const auto rank = env_string("RANK");
  const auto world = env_string("WORLD_SIZE");
  const std::string tag = rank && world ? "[rank " + *rank + "/" + *world + "] " : "";
  std::fprintf(stderr, "%s%s: error: %s\n", tag.c_str(), program.c_str(), text.c_str());
  if (const auto path = env_string("COHORT_ERROR_FILE")) {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    const nlohmann::json record = {{"rank", rank ? *rank : ""},
                                   {"exit_code", code},
                                   {"message", text},
                                   {"stack", stack_of(error)},
                                   {"time", std::chrono::duration<double>(now).count()}};
    std::ofstream(*path) << record.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)
                         << '\n';
  }
  return code;
}

}  // namespace

int run_program(const std::string& program, const std::function<int()>& body) {
  try {
    const int code = body();
    std::cout.flush();
    if (code == kExitOk && (std::fflush(stdout) != 0 || std::ferror(stdout) != 0))
      throw std::system_error(errno, std::generic_category(), "standard output cannot be written");
    return code;
  } catch (const c10::ValueError& error) {
    return report(program, kExitUsage, error);
  } catch (const c10::DistError& error) {
    return report(program, kExitLostPeer, error);
  } catch (const std::exception& error) {
    return report(program, kExitFailure, error);
  }
}

}  // namespace cohort
