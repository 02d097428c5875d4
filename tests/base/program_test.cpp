#include "cohort/base/program.h"

#include <csignal>
#include <cstdlib>
#include <gtest/gtest.h>
#include <stdexcept>

namespace cohort {
namespace {

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

}  // namespace
}  // namespace cohort
