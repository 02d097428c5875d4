// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/program.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <stdexcept>
#include <sys/resource.h>
#include <unistd.h>

#include "cohort/base/amx.h"
#include "cohort/base/atomic_file.h"
#include "cohort/base/error.h"

#include "tests/base/temporary_folder.h"

namespace cohort {
namespace program_test {

// The innermost frames come first; names need exported symbols, which a test program has none of.
TEST(ProgramTest, ACrashSaysWhereAndEndsByItsSignal) {
  const auto crash_by = [](int signal) {
    run_program("test", [signal] {
      std::raise(signal);
      return 0;
    });
  };
  EXPECT_EXIT(crash_by(SIGSEGV), testing::KilledBySignal(SIGSEGV),
              "^error: segmentation fault, in\n[^\n]*\\[0x[0-9a-f]+\\]\n");
  EXPECT_EXIT(crash_by(SIGABRT), testing::KilledBySignal(SIGABRT), "^error: abort, in\n");
  EXPECT_EXIT(crash_by(SIGFPE), testing::KilledBySignal(SIGFPE), "^error: arithmetic error, in\n");
}

[[gnu::noinline]] int descend(int depth) {
  volatile char frame[4096];
  frame[0] = static_cast<char>(depth);
  return depth < 0 ? 0 : descend(depth + 1) + frame[0];
}

TEST(ProgramTest, EvenWhenTheStackOverflows) {
  EXPECT_EXIT(run_program("test", [] { return descend(1); }), testing::KilledBySignal(SIGSEGV),
              "error: segmentation fault, in\n");
}

TEST(ProgramTest, WhatAProgramDoesWithASignalStays) {
  EXPECT_EXIT(
      {
        std::signal(SIGFPE, [](int) { std::_Exit(7); });
        run_program("test", [] {
          std::raise(SIGFPE);
          return 0;
        });
      },
      testing::ExitedWithCode(7), "");
}

// what() has the stack below the message.
TEST(ProgramTest, OneLineOfAnErrorIsItsMessage) {
  try {
    TORCH_CHECK_VALUE(false, "expected 1, got ", 2);
    FAIL();
  } catch (const std::exception& error) {
    EXPECT_EQ(one_line(error), "expected 1, got 2");
    EXPECT_NE(std::string(error.what()).find('\n'), std::string::npos);
  }
}

// It shows no stack, for its place in the program explains nothing.
TEST(ProgramTest, ALimitOnTheSizeOfFilesIsAnErrorOfOneLine) {
  const TemporaryFolder folder;
  const std::string file = folder / "f";
  const auto write = [&] {
    const rlimit limit{.rlim_cur = 4096, .rlim_max = RLIM_INFINITY};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    ::setenv("COHORT_ERROR_FILE", (folder / "error").c_str(), 1);
    std::exit(run_program("test", [&] {
      write_atomically(file, std::string(5000, 'x'));
      return 0;
    }));
  };
  EXPECT_EXIT(write(), testing::ExitedWithCode(kExitFailure),
              "^test: error: " + file + ": cannot write: File too large\n$");
  EXPECT_FALSE(std::filesystem::exists(file));
  EXPECT_NE(read_file(folder / "error").find("\"stack\":\"\""), std::string::npos);
}

TEST(ProgramTest, NoFileGetsTheNumberOfAClosedStandardDescriptor) {
  const TemporaryFolder folder;
  const std::string file = folder / "f";
  const auto run_without = [&](int closed, bool prints) {
    ::close(closed);
    std::exit(run_program("test", [&] {
      std::ofstream data(file);
      if (prints) std::fputs("printed\n", closed == STDOUT_FILENO ? stdout : stderr);
      data << "data";
      return 0;
    }));
  };
  EXPECT_EXIT(run_without(STDERR_FILENO, true), testing::ExitedWithCode(kExitOk), "^$");
  EXPECT_EQ(read_file(file), "data");
  EXPECT_EXIT(run_without(STDIN_FILENO, false), testing::ExitedWithCode(kExitOk), "^$");
  EXPECT_EQ(read_file(file), "data");
  // What cannot be printed is an error, as it is with a full disk.
  EXPECT_EXIT(run_without(STDOUT_FILENO, true), testing::ExitedWithCode(kExitFailure),
              "^test: error: standard output cannot be written: Bad file descriptor\n$");
  EXPECT_EQ(read_file(file), "data");
}

TEST(ProgramTest, AmxWithoutTilesIsNotUsedUnlessOneSaysSo) {
  constexpr const char* kVariable = "ONEDNN_MAX_CPU_ISA";
  const auto set_by_program = [] {
    run_program("test", [] {
      const char* value = std::getenv(kVariable);
      std::exit(value == nullptr ? 10 : std::string(value) == "AVX512_CORE_FP16" ? 11 : 12);
      return 0;
    });
  };
  ::unsetenv(kVariable);
  const bool is_listed_alone = amx_has_no_tiles();
  EXPECT_EXIT(set_by_program(), testing::ExitedWithCode(is_listed_alone ? 11 : 10),
              is_listed_alone ? "^warning: this processor lists AMX but no tiles for it: "
                                "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 is set\n$"
                              : "^$");
  ::setenv(kVariable, "DEFAULT", 1);
  EXPECT_EXIT(set_by_program(), testing::ExitedWithCode(12), "^$");
}

}  // namespace program_test
}  // namespace cohort
