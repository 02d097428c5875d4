// SPDX-License-Identifier: Apache-2.0
#include "tests/launch/launch_harness.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sstream>
#include <stdexcept>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/base/stack_report.h"
#include "cohort/base/trace_page.h"
#include "cohort/launch/cores.h"
#include "cohort/launch/elastic_agent.h"
#include "cohort/launch/environment.h"
#include "cohort/launch/spawn.h"

namespace cohort::launch {
namespace {

constexpr std::chrono::seconds kTimeout{60};

void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("test harness: " + what);
}

// Prints "rank R listens P" for the inherited store socket, or "rank R has none"; then the number
// of descriptors beyond stdin, stdout, stderr and that socket.
int store_worker() {
  const char* text = std::getenv("COHORT_STORE_FD");
  const std::string rank = std::getenv("RANK");
  int num_others = 0;
  for (int fd = 3; fd < 1024; ++fd) {
    const bool is_store = text && fd == std::atoi(text);
    if (!is_store && ::fcntl(fd, F_GETFD) >= 0) ++num_others;
  }
  std::string state = "has none";
  if (text) {
    int listens = 0;
    socklen_t size = sizeof(listens);
    ::getsockopt(std::atoi(text), SOL_SOCKET, SO_ACCEPTCONN, &listens, &size);
    sockaddr_in address{};
    size = sizeof(address);
    ::getsockname(std::atoi(text), reinterpret_cast<sockaddr*>(&address), &size);
    state = listens && std::to_string(ntohs(address.sin_port)) == std::getenv("MASTER_PORT")
                ? "listens on MASTER_PORT"
                : "does not listen";
  }
  std::printf("rank %s %s, %d others\n", rank.c_str(), state.c_str(), num_others);
  return 0;
}

// Starts itself as two workers; each says who it is.
int spawning_program(const std::string& what) {
  if (!is_spawned()) {
    return run_program("spawner", [] { return spawn({.nproc_per_node = 2, .tee = Tee::kAll}); });
  }
  if (what == "fail" && std::string(std::getenv("RANK")) == "1") return 7;
  std::printf("rank %s of %s\n", std::getenv("RANK"), std::getenv("WORLD_SIZE"));
  return 0;
}

// Calls a function in two forks of itself.
int forking_program(const std::string& what) {
  const std::string captured = "seen by both";
  std::printf("before the fork\n");  // Not flushed: one line, whatever the workers do.
  return run_program("spawner", [&] {
    const int code = spawn(
        [&](int local_rank) -> int {
          if (what == "throw" && local_rank == 1) throw ConfigError("no such flag");
          if (what == "throw-other" && local_rank == 1) throw 1;
          if (what == "fail" && local_rank == 1) return 7;
          if (what == "restart" && std::getenv("COHORT_RESTART_COUNT") == std::string("0"))
            return 1;
          if (what == "stopped") return kExitStopped;
          if (what == "store") return store_worker();
          if (what == "again") return spawn([](int) { return 0; }, 1);
          std::printf("rank %s of %s is local rank %d, %s, %s\n", std::getenv("RANK"),
                      std::getenv("WORLD_SIZE"), local_rank, captured.c_str(),
                      is_spawned() ? "spawned" : "on its own");
          return 0;
        },
        2, {.max_restarts = what == "restart" ? 1 : 0, .tee = Tee::kAll});
    std::printf("%s after the end\n", is_spawned() ? "spawned" : "on its own");
    return code;
  });
}

// Two workers beside the GPUs of the machine that COHORT_TEST_MACHINE holds; each says where it runs.
int bound_program() {
  if (!is_spawned()) {
    return run_program("spawner", [] {
      return spawn({.nproc_per_node = 2,
                    .tee = Tee::kAll,
                    .bind_cores = BindCores::kNode,
                    .machine_root = std::getenv("COHORT_TEST_MACHINE")});
    });
  }
  std::printf("%s threads, cores", std::getenv("OMP_NUM_THREADS"));
  for (const int core : usable_cores()) std::printf(" %d", core);
  std::printf("\n");
  return 0;
}

int threaded_spawner(bool forks) {
  std::jthread thread([](std::stop_token stop) {
    while (!stop.stop_requested()) std::this_thread::yield();
  });
  return run_program("spawner", [&] {
    return forks ? spawn([](int) { return 0; }, 2) : spawn({.nproc_per_node = 2});
  });
}

// A node of the rendezvous at `endpoint`, whose worker ends at once. Once stopped it waits half a
// second: its grace, which no flag allows, takes the rest of the 25 seconds that follow.
int impatient_node(const std::string& endpoint) {
  RunOptions options;
  options.command = {"true"};
  options.nnodes = {1, 2};
  options.rdzv_endpoint = endpoint;
  options.keep_alive.interval = std::chrono::seconds(60);
  options.grace = std::chrono::milliseconds(-24'500);
  const WorkerFunction none;
  return run_program("node", [&] { return ElasticAgent(options, none).run(); });
}

// Keeps a trace page: rank 1 computes for ever, all others wait in all_reduce #5. `what` may have
// rank 1 stop itself ("stopped"), do so in all_reduce #5, too ("came-stopped"), or in #4
// ("behind-stopped"), or be held by its parent as by a debugger ("traced"); or have all stop
// themselves in all_reduce #5 ("all-stopped"); or have all_reduce be that of a sub-group, and rank 1
// stop itself outside of it ("subgroup-stopped").
int tracing_worker(const std::string& what) {
  const bool second = std::string(std::getenv("RANK")) == "1";
  const bool traced = second && what == "traced";
  if (traced && ::fork() != 0) {
    while (true) ::pause();
  }
  if (traced) ::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
  const std::string path = std::getenv(kTraceFileVariable);
  const StackReport stacks(path + ".stack");
  TracePage page(path);
  TraceRecord record;
  record.pid = ::getpid();
  record.rank = std::atoi(std::getenv("RANK"));
  record.world_size = std::atoi(std::getenv("WORLD_SIZE"));
  // Rank 0 waits for a rank that has told where it is.
  const std::string other = path.substr(0, path.rfind("rank")) + "rank1.trace";
  for (int i = 0; i < 60'000 && !second; ++i) {
    if (TracePage::read(other).value_or(TraceRecord()).sequence != 0) break;
    ::usleep(1000);
  }
  record.since_ns = steady_now_ns();
  const bool behind = second && what == "behind-stopped";
  if (behind) record.since_ns = 0;  // It waits longest.
  const bool of_pair = what == "subgroup-stopped";
  const bool missing =
      second && (what == "running" || what == "stopped" || what == "traced" || of_pair);
  record.sequence = missing || behind ? 4 : 5;
  record.state = missing ? TraceState::kRunning : TraceState::kWaiting;
  record.num_dims = 1;
  record.dims[0] = 8;
  set_field(record.group, of_pair && !second ? "pair" : "world");
  set_field(record.operation, missing ? "broadcast" : "all_reduce(sum)");
  set_field(record.dtype, "float32");
  set_field(record.call_site, "train.cpp:12");
  page.write(record);
  if (what == "all-stopped" || (second && what != "running")) ::raise(SIGSTOP);
  while (true) ::pause();
}

int run_worker(const std::string& name) {
  if (name == "store") return store_worker();
  if (name.starts_with("spawn-")) return spawning_program(name.substr(6));
  if (name.starts_with("fork-")) return forking_program(name.substr(5));
  if (name == "bound") return bound_program();
  if (name == "threaded") return threaded_spawner(/*forks=*/false);
  if (name == "threaded-fork") return threaded_spawner(/*forks=*/true);
  if (name.starts_with("impatient-")) return impatient_node(name.substr(10));
  if (name.starts_with("trace-")) return tracing_worker(name.substr(6));
  if (name == "throw") {
    return run_program("thrower", []() -> int { C10_THROW_ERROR(Error, "the sky fell"); });
  }
  return 2;
}

}  // namespace

TemporaryFolder::TemporaryFolder() {
  std::string name = std::filesystem::temp_directory_path().string() + "/launch-test-XXXXXX";
  require(::mkdtemp(name.data()) != nullptr, name);
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::vector<std::string> TemporaryFolder::names() const {
  std::vector<std::string> result;
  for (const auto& entry : std::filesystem::directory_iterator(path_)) {
    result.push_back(entry.path().filename().string());
  }
  std::sort(result.begin(), result.end());
  return result;
}

Launched::Launched(const std::vector<std::string>& command,
                   const std::vector<std::string>& additions) {
  int ends[2];
  require(::pipe2(ends, O_CLOEXEC) == 0, "pipe");
  out_ = Fd(ends[0]);
  const Fd writer(ends[1]);
  const std::string err_path = folder_.path() + "/.err";
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, writer.get(), 1);
  ::posix_spawn_file_actions_addopen(&actions, 2, err_path.c_str(), O_WRONLY | O_CREAT, 0600);
  ::posix_spawn_file_actions_addclosefrom_np(&actions, 3);  // What the test itself inherited.
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  sigset_t all, none;
  ::sigfillset(&all);
  ::sigemptyset(&none);
  ::posix_spawnattr_setsigdefault(&attributes, &all);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setpgroup(&attributes, 0);
  ::posix_spawnattr_setflags(
      &attributes, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
  std::vector<std::string> environment = own_environment();
  std::erase_if(environment, [](const std::string& entry) { return entry.starts_with("TMPDIR="); });
  environment.push_back("TMPDIR=" + folder_.path());
  for (const std::string& addition : additions) {
    const std::string name = addition.substr(0, addition.find('=') + 1);
    std::erase_if(environment, [&](const std::string& entry) { return entry.starts_with(name); });
    environment.push_back(addition);
  }
  std::vector<char*> argv, envp;
  for (const auto& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  for (const auto& entry : environment) envp.push_back(const_cast<char*>(entry.c_str()));
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  const int error = ::posix_spawnp(&pid_, argv[0], &actions, &attributes, argv.data(), envp.data());
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&actions);
  require(error == 0, command.front() + ": " + std::strerror(error));
}

Launched::~Launched() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
}

bool Launched::read_some() {
  char buffer[4096];
  const ssize_t size = ::read(out_.get(), buffer, sizeof(buffer));
  if (size > 0) text_.append(buffer, static_cast<size_t>(size));
  return size > 0;
}

std::string Launched::read_lines(int num_lines) {
  while (std::count(text_.begin(), text_.end(), '\n') < num_lines) {
    require(read_some(), "stdout ended after: " + text_);
  }
  return text_;
}

std::string Launched::wait_for_err(const std::string& part, int count) const {
  const auto end = std::chrono::steady_clock::now() + kTimeout;
  while (true) {
    const std::string text = read_file(folder_.path() + "/.err");
    int found = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
      ++found;
    if (found >= count) return text;
    require(std::chrono::steady_clock::now() < end, "no \"" + part + "\" in: " + text);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void Launched::send(int signal) const {
  ::kill(pid_, signal);
}

Ended Launched::wait() {
  while (read_some()) {
  }
  int status = 0;
  require(::waitpid(pid_, &status, 0) == pid_, "waitpid");
  pid_ = -1;
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  Ended ended{code, text_, read_file(folder_.path() + "/.err")};
  std::filesystem::remove(folder_.path() + "/.err");
  return ended;
}

std::string cohort_program() {
  const char* folder = std::getenv("COHORT_BIN");
  require(folder != nullptr, "COHORT_BIN must name the folder of the cohort program");
  return std::string(folder) + "/cohort";
}

std::vector<std::string> cohort_run(std::vector<std::string> flags,
                                    const std::vector<std::string>& program) {
  std::vector<std::string> command{cohort_program(), "run"};
  command.insert(command.end(), flags.begin(), flags.end());
  command.push_back("--");
  command.insert(command.end(), program.begin(), program.end());
  return command;
}

std::vector<std::string> cohort_run_sh(std::vector<std::string> flags, const std::string& script) {
  return cohort_run(std::move(flags), {"/bin/sh", "-c", script});
}

std::string this_program() {
  return std::filesystem::read_symlink("/proc/self/exe").string();
}

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<std::string> sorted_lines(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  return lines;
}

std::string wait_for_file(const std::string& path) {
  const auto end = std::chrono::steady_clock::now() + kTimeout;
  std::string text;
  while ((text = read_file(path)).empty()) {
    require(std::chrono::steady_clock::now() < end, path + " did not appear");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return text;
}

Watched::Watched(pid_t pid) : pidfd_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) {
  require(static_cast<bool>(pidfd_), "no process " + std::to_string(pid));
}

bool Watched::wait_for_end() const {
  pollfd wait{pidfd_.get(), POLLIN, 0};
  return ::poll(&wait, 1, static_cast<int>(std::chrono::milliseconds(kTimeout).count())) == 1;
}

}  // namespace cohort::launch

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--worker") {
    return cohort::launch::run_worker(argv[2]);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
