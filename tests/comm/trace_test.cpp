// SPDX-License-Identifier: Apache-2.0
// What a launcher reads of a rank: the trace page and the stack.
#include <ATen/ATen.h>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/base/stack_report.h"
#include "cohort/base/trace_page.h"
#include "cohort/comm/process_group.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/eventually.h"
#include "tests/support/ranks.h"

namespace cohort {
namespace trace_test {

using test::eventually;

constexpr std::chrono::seconds kLimit{40};

TEST(TracePageTest, AReaderSeesTheLastRecord) {
  const TemporaryFolder folder;
  const std::string path = folder / "trace";
  EXPECT_FALSE(TracePage::read(path).has_value());
  TracePage page(path);
  EXPECT_EQ(TracePage::read(path)->pid, getpid());
  EXPECT_EQ(describe(*TracePage::read(path)), "nothing yet");
  TraceRecord record;
  record.rank = 3;
  record.sequence = 17;
  record.state = TraceState::kWaiting;
  record.num_dims = 2;
  record.dims = {4, 8};
  set_field(record.operation, "all_reduce(sum)");
  set_field(record.dtype, "float32");
  set_call_site(record, {"/some/where/training.cpp", 112});
  page.write(record);
  const auto read = TracePage::read(path);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->rank, 3);
  EXPECT_EQ(read->sequence, 17);
  EXPECT_EQ(read->state, TraceState::kWaiting);
  EXPECT_EQ(describe(*read), "all_reduce(sum) of float32[4, 8] at training.cpp:112");
}

TEST(TracePageTest, LongTextsAreCutAndEndInAZero) {
  const std::string name(200, 'f');
  TraceRecord record;
  set_field(record.operation, std::string(200, 'o'));
  EXPECT_EQ(std::string(record.operation.data()), std::string(63, 'o'));
  set_call_site(record, {name.c_str(), 2147483647});
  EXPECT_EQ(std::string(record.call_site.data()), name.substr(0, 52) + ":2147483647");
}

TEST(TracePageTest, OtherFilesAreNoPages) {
  const TemporaryFolder folder;
  const std::string path = folder / "trace";
  write_file(path, "short");
  EXPECT_FALSE(TracePage::read(path).has_value());
  write_file(path, std::string(1 << 16, 'x'));
  EXPECT_FALSE(TracePage::read(path).has_value());
  try {
    TracePage page(folder / "none/trace");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(one_line(error).find("COHORT_TRACE_FILE="), std::string::npos);
    EXPECT_NE(one_line(error).find("cannot be made: No such file or directory"), std::string::npos);
  }
}

TEST(TracePageTest, AFileThatIsCutShortMeanwhileEndsNoReader) {
  const TemporaryFolder folder;
  const std::string path = folder / "trace";
  const TracePage page(path);
  const auto size = std::filesystem::file_size(path);
  std::atomic<bool> is_cut = false;
  const std::jthread cutter([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      std::filesystem::resize_file(path, 0);
      is_cut = true;
      std::filesystem::resize_file(path, size);
    }
  });
  while (!is_cut) std::this_thread::yield();
  for (int i = 0; i < 50'000; ++i) EXPECT_FALSE(TracePage::read(path));
}

// All fields of a record are the writer's one number: a torn record would show two. The writer
// rests for a time between writes, as a reader may lose against one that never does.
TEST(TracePageTest, ReadersNeverSeeHalfARecord) {
  const TemporaryFolder folder;
  const std::string path = folder / "trace";
  TracePage page(path);
  page.write({});
  std::jthread writer([&](const std::stop_token& stop) {
    TraceRecord record;
    for (int64_t i = 1; !stop.stop_requested(); ++i) {
      record.sequence = i;
      record.since_ns = i;
      record.dims.fill(i);
      page.write(record);
      for (const int64_t until = steady_now_ns() + i * 37 % 4000; steady_now_ns() < until;)
        continue;
    }
  });
  int64_t num_read = 0;
  int64_t last = 0;
  while (num_read < 2000) {
    const auto record = TracePage::read(path);
    if (!record || record->sequence == 0) continue;
    ++num_read;
    EXPECT_GE(record->sequence, last);
    last = record->sequence;
    ASSERT_EQ(record->since_ns, record->sequence);
    for (const int64_t dim : record->dims) ASSERT_EQ(dim, record->sequence);
  }
}

// The child hangs outside of this thread's reach; its launcher asks where.
[[gnu::noinline]] void a_function_that_hangs() {
  while (true) pause();
}

TEST(StackReportTest, TheMainThreadsStackIsWrittenOnRequest) {
  if (const char* file = std::getenv("COHORT_TEST_STACK")) {
    const StackReport report(file);
    write_file(std::string(file) + ".ready", std::to_string(getpid()));
    a_function_that_hangs();
  }
  const TemporaryFolder folder;
  const std::string path = folder / "trace.stack";
  setenv("COHORT_TEST_STACK", path.c_str(), 1);
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string command =
      self +
      " --gtest_filter=StackReportTest.TheMainThreadsStackIsWrittenOnRequest >/dev/null 2>&1 &";
  ASSERT_EQ(std::system(command.c_str()), 0);
  unsetenv("COHORT_TEST_STACK");
  ASSERT_TRUE(eventually([&] { return !read_file(path + ".ready").empty(); }, kLimit));
  const pid_t pid = std::stoi(read_file(path + ".ready"));
  for (int i = 0; i < 2; ++i) {  // it answers more than once
    std::filesystem::remove(path);
    ASSERT_EQ(kill(pid, stack_signal()), 0);
    ASSERT_TRUE(eventually([&] { return std::filesystem::exists(path); }, kLimit));
    const std::string stack = read_file(path);
    EXPECT_NE(stack.find("pause"), std::string::npos) << stack;
    EXPECT_NE(stack.find("__libc_start_main"), std::string::npos) << stack;
  }
  kill(pid, SIGKILL);
}

// A worker's page as its launcher sees it: in a collective, and between two.
TEST(TraceTest, TheGroupKeepsItsPage) {
  // Children inherit the folder of the process that the test runner started.
  std::optional<TemporaryFolder> folder;
  if (std::getenv("COHORT_TEST_TRACES") == nullptr) {
    setenv("COHORT_TEST_TRACES", folder.emplace().path().c_str(), 1);
  }
  const std::string base = std::string(std::getenv("COHORT_TEST_TRACES")) + "/trace";
  if (const char* rank = std::getenv("RANK")) setenv(kTraceFileVariable, (base + rank).c_str(), 1);
  test::ranks(2, [&](const comm::ProcessGroup& group) {
    at::Tensor x = at::ones({4, 8});
    group.all_reduce(x);
    if (group.rank() == 0) {
      const auto mine = TracePage::read(base + "0");
      ASSERT_TRUE(mine.has_value());
      EXPECT_EQ(mine->pid, getpid());
      EXPECT_EQ(mine->rank, 0);
      EXPECT_EQ(mine->world_size, 2);
      EXPECT_EQ(mine->sequence, 1);
      EXPECT_EQ(mine->state, TraceState::kRunning);
      EXPECT_EQ(std::string(mine->group.data()), "world");
      EXPECT_EQ(describe(*mine).find("all_reduce(sum) of float32[4, 8] at trace_test.cpp:"), 0u)
          << describe(*mine);
      // The peer waits for us in the barrier.
      EXPECT_TRUE(eventually(
          [&] {
            const auto theirs = TracePage::read(base + "1");
            return theirs && theirs->state == TraceState::kWaiting && theirs->sequence == 2 &&
                   describe(*theirs).find("barrier \"here\" at trace_test.cpp:") == 0;
          },
          kLimit));
    }
    group.barrier("here");
    // A guarded call that holds a collective: afterwards the outer one is under way again.
    group.translate_errors("outer", [&] {
      group.all_reduce_sum(1);
      EXPECT_EQ(describe(*TracePage::read(base + std::to_string(group.rank()))).find("outer at "),
                0u);
      EXPECT_EQ(TracePage::read(base + std::to_string(group.rank()))->state, TraceState::kWaiting);
    });
  });
  unsetenv("COHORT_TEST_TRACES");
}

}  // namespace trace_test
}  // namespace cohort
