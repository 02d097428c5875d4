// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ranks.h"

#include <array>
#include <cstdlib>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cohort/base/program.h"
#include "cohort/comm/listen.h"

extern char** environ;

namespace cohort::test {
namespace {

struct Child {
  pid_t pid = -1;
  int output = -1;
};

[[noreturn]] void be_a_rank(const std::function<void(const comm::ProcessGroup&)>& body,
                            comm::ProcessGroupOptions options) {
  const char* backend = std::getenv("COHORT_TEST_BACKEND");
  if (backend != nullptr && options.backend == comm::ProcessGroupOptions().backend)
    options.backend = backend;
  // COHORT_TEST_HOSTS=N: ranks count as those of N hosts, in turns.
  if (const char* hosts = std::getenv("COHORT_TEST_HOSTS")) {
    const int host = std::atoi(std::getenv("RANK")) % std::atoi(hosts);
    setenv("COHORT_HOST_NAME", ("host" + std::to_string(host)).c_str(), 1);
  }
  const int code = run_program("test", [&] {
    comm::ProcessGroup group(comm::rank_info_from_environment(), options);
    body(group);
    group.close();
    return testing::Test::HasFailure() ? kExitFailure : kExitOk;
  });
  std::fflush(nullptr);
  // An error that the test expects does not hide what it found before.
  _exit(testing::Test::HasFailure() ? kExitFailure : code);
}

Child start(int rank, int world_size, int port, int listen_fd) {
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  const std::string filter =
      std::string("--gtest_filter=") + info->test_suite_name() + "." + info->name();
  std::vector<std::string> variables;
  for (char** v = environ; *v != nullptr; ++v) variables.emplace_back(*v);
  const auto set = [&](const std::string& name, int value) {
    variables.push_back(name + "=" + std::to_string(value));
  };
  set("COHORT_TEST_RANK", rank);
  set("RANK", rank);
  set("WORLD_SIZE", world_size);
  set("LOCAL_RANK", rank);
  set("LOCAL_WORLD_SIZE", world_size);
  set("MASTER_PORT", port);
  variables.emplace_back("MASTER_ADDR=127.0.0.1");
  variables.emplace_back("OMP_NUM_THREADS=1");
  std::array<int, 2> pipe_fds{};
  if (pipe2(pipe_fds.data(), O_CLOEXEC) != 0) std::abort();
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe_fds[1], 1);
  posix_spawn_file_actions_adddup2(&actions, pipe_fds[1], 2);
  if (rank == 0) {
    set("COHORT_STORE_FD", 20);
    posix_spawn_file_actions_adddup2(&actions, listen_fd, 20);
  }
  std::vector<char*> environment;
  for (auto& v : variables) environment.push_back(v.data());
  environment.push_back(nullptr);
  std::string program = "/proc/self/exe";
  std::string filter_argument = filter;
  std::array<char*, 3> arguments{program.data(), filter_argument.data(), nullptr};
  Child child;
  const int error = posix_spawn(&child.pid, "/proc/self/exe", &actions, nullptr, arguments.data(),
                                environment.data());
  posix_spawn_file_actions_destroy(&actions);
  ::close(pipe_fds[1]);
  EXPECT_EQ(error, 0) << "cannot start rank " << rank;
  child.output = pipe_fds[0];
  return child;
}

// Reads all pipes to their ends, so that no rank blocks on a full one.
void drain(const std::vector<Child>& children, std::vector<RankEnd>& ends) {
  std::vector<pollfd> polls;
  for (const Child& child : children) polls.push_back({child.output, POLLIN, 0});
  size_t open = polls.size();
  while (open > 0) {
    if (poll(polls.data(), polls.size(), -1) < 0) return;
    for (size_t i = 0; i < polls.size(); ++i) {
      if (polls[i].revents == 0) continue;
      std::array<char, 4096> buffer{};
      const ssize_t count = read(polls[i].fd, buffer.data(), buffer.size());
      if (count > 0) {
        ends[i].output.append(buffer.data(), static_cast<size_t>(count));
      } else {
        ::close(polls[i].fd);
        polls[i].fd = -1;
        --open;
      }
    }
  }
}

}  // namespace

std::vector<RankEnd> run_ranks(int world_size,
                               const std::function<void(const comm::ProcessGroup&)>& body,
                               const comm::ProcessGroupOptions& options) {
  if (std::getenv("COHORT_TEST_RANK") != nullptr) be_a_rank(body, options);
  const int listen_fd = comm::listen_on(0);
  const int port = port_of(listen_fd);
  std::vector<Child> children;
  for (int rank = 0; rank < world_size; ++rank)
    children.push_back(start(rank, world_size, port, listen_fd));
  ::close(listen_fd);
  std::vector<RankEnd> ends(children.size());
  drain(children, ends);
  for (size_t i = 0; i < children.size(); ++i) {
    int status = 0;
    waitpid(children[i].pid, &status, 0);
    ends[i].exit_code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
  return ends;
}

void ranks(int world_size, const std::function<void(const comm::ProcessGroup&)>& body,
           const comm::ProcessGroupOptions& options) {
  const auto ends = run_ranks(world_size, body, options);
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    EXPECT_EQ(ends[rank].exit_code, 0) << "rank " << rank << " wrote:\n" << ends[rank].output;
  }
}

}  // namespace cohort::test
