// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/forked_task.h"

#include <array>
#include <chrono>
#include <csignal>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <optional>
#include <string>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "cohort/base/error.h"

namespace cohort::ps {
namespace forked_task_test {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Polls until the child has ended, a minute at most.
void await_end(ForkedTask& task) {
  const auto until = steady_clock::now() + std::chrono::seconds(60);
  while (!task.poll() && steady_clock::now() < until) std::this_thread::sleep_for(milliseconds(1));
}

std::optional<std::string> outcome_of(const std::function<void()>& work) {
  std::optional<std::string> word;
  ForkedTask task(work, [&word](const std::string& text) { word = text; });
  await_end(task);
  return word;
}

TEST(ForkedTaskTest, ItSeesMemoryAsItWasAtTheFork) {
  std::vector<int> numbers(100'000, 1);
  const std::string path = testing::TempDir() + "forked_" + std::to_string(::getpid());
  std::optional<std::string> word;
  // The child closes its descriptors: it waits for a file instead.
  ForkedTask task(
      [&] {
        while (::access((path + ".go").c_str(), F_OK) != 0) ::usleep(1000);
        for (const int number : numbers) {
          if (number != 1) throw ConfigError("it has seen a later value");
        }
      },
      [&word](const std::string& text) { word = text; });
  numbers.assign(numbers.size(), 2);
  EXPECT_FALSE(task.poll());
  EXPECT_FALSE(word.has_value());
  std::ofstream(path + ".go") << "go";
  await_end(task);
  EXPECT_EQ(word, "");
  std::filesystem::remove(path + ".go");
}

TEST(ForkedTaskTest, ItsErrorIsTheParents) {
  EXPECT_EQ(outcome_of([] { throw ConfigError("table.3: the disk is full"); }),
            "table.3: the disk is full");
  EXPECT_EQ(outcome_of([] { ::raise(SIGKILL); }), "its process was killed");
  // Longer than what a pipe holds: nobody waits for anybody.
  const auto long_word = outcome_of([] { throw ConfigError(std::string(1'000'000, 'x')); });
  ASSERT_TRUE(long_word.has_value());
  EXPECT_EQ(long_word->substr(0, 4), "xxxx");
}

// Where SIGCHLD is ignored the system forgets how a child ended.
TEST(ForkedTaskTest, AnEndThatCannotBeLearntIsAFailure) {
  const sighandler_t before = ::signal(SIGCHLD, SIG_IGN);
  EXPECT_EQ(outcome_of([] { ::raise(SIGKILL); }),
            "its end could not be learnt: No child processes");
  EXPECT_EQ(outcome_of([] { throw ConfigError("the disk is full"); }), "the disk is full");
  ::signal(SIGCHLD, before);
}

TEST(ForkedTaskTest, ItHoldsNoneOfTheParentsDescriptors) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  ForkedTask task([] { ::pause(); }, [](const std::string&) {});
  // The other side sees the end although the child lives: it has closed its copy.
  ::close(ends[0]);
  timeval timeout{.tv_sec = 60, .tv_usec = 0};
  ::setsockopt(ends[1], SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  char byte = 0;
  EXPECT_EQ(::read(ends[1], &byte, 1), 0);
  ::close(ends[1]);
  EXPECT_FALSE(task.poll());
}

TEST(ForkedTaskTest, ItEndsWithItsOwner) {
  const auto before = steady_clock::now();
  bool called = false;
  {
    const ForkedTask task([] { ::pause(); }, [&called](const std::string&) { called = true; });
  }
  EXPECT_LT(steady_clock::now() - before, std::chrono::seconds(20));
  EXPECT_FALSE(called);
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);  // It was waited for.
}

}  // namespace forked_task_test
}  // namespace cohort::ps
