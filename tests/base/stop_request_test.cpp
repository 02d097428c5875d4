// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/stop_request.h"

#include <csignal>
#include <cstdlib>
#include <gtest/gtest.h>

namespace cohort {
namespace stop_request_test {

// Also where the tests run under nohup.
class StopRequestTest : public testing::Test {
 protected:
  void SetUp() override { hang_up_ = std::signal(SIGHUP, SIG_DFL); }
  void TearDown() override { std::signal(SIGHUP, hang_up_); }

 private:
  void (*hang_up_)(int) = SIG_DFL;
};

TEST_F(StopRequestTest, TheFirstSignalIsNoted) {
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) {
    const StopRequest request;
    EXPECT_EQ(request.signal(), 0);
    std::raise(signal);
    EXPECT_EQ(request.signal(), signal);
  }
}

TEST_F(StopRequestTest, TheSecondEndsTheProgram) {
  EXPECT_EXIT(
      {
        const StopRequest request;
        std::raise(SIGTERM);
        std::raise(SIGTERM);
      },
      testing::KilledBySignal(SIGTERM), "");
}

// When a terminal goes, its shell and the kernel send one each.
TEST_F(StopRequestTest, ASecondHangUpEndsNothing) {
  const StopRequest request;
  std::raise(SIGHUP);
  std::raise(SIGHUP);
  EXPECT_EQ(request.signal(), SIGHUP);
}

// nohup starts programs so.
TEST_F(StopRequestTest, ANohupStaysInForce) {
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

TEST_F(StopRequestTest, AfterItsLifeSignalsDoWhatTheyDidBefore) {
  EXPECT_EXIT(
      {
        { const StopRequest request; }
        std::raise(SIGINT);
      },
      testing::KilledBySignal(SIGINT), "");
}

}  // namespace stop_request_test
}  // namespace cohort
