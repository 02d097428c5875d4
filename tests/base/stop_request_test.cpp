// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/stop_request.h"

#include <csignal>
#include <cstdlib>
#include <gtest/gtest.h>

namespace cohort {
namespace stop_request_test {

TEST(StopRequestTest, TheFirstSignalIsNoted) {
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) {
    const StopRequest request;
    EXPECT_EQ(request.signal(), 0);
    std::raise(signal);
    EXPECT_EQ(request.signal(), signal);
  }
}

TEST(StopRequestTest, TheSecondEndsTheProgram) {
  EXPECT_EXIT(
      {
        const StopRequest request;
        std::raise(SIGTERM);
        std::raise(SIGTERM);
      },
      testing::KilledBySignal(SIGTERM), "");
}

// When a terminal goes, its shell and the kernel send one each.
TEST(StopRequestTest, ASecondHangUpEndsNothing) {
  const StopRequest request;
  std::raise(SIGHUP);
  std::raise(SIGHUP);
  EXPECT_EQ(request.signal(), SIGHUP);
}

// nohup starts programs so.
TEST(StopRequestTest, ANohupStaysInForce) {
  EXPECT_EXIT(
      {
        std::signal(SIGHUP, SIG_IGN);
        const StopRequest request;
        std::raise(SIGHUP);
        std::raise(SIGHUP);
        std::exit(request.signal());
      },
      testing::ExitedWithCode(0), "");
}

TEST(StopRequestTest, AfterItsLifeSignalsDoWhatTheyDidBefore) {
  EXPECT_EXIT(
      {
        { const StopRequest request; }
        std::raise(SIGINT);
      },
      testing::KilledBySignal(SIGINT), "");
}

}  // namespace stop_request_test
}  // namespace cohort
