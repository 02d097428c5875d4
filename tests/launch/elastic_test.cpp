// SPDX-License-Identifier: Apache-2.0
// Elastic jobs: nodes join, leave, die and fail.
#include <algorithm>
#include <gtest/gtest.h>
#include <memory>
#include <poll.h>
#include <signal.h>
#include <sstream>
#include <stdexcept>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

#include "cohort/launch/handshake.h"
#include "cohort/launch/store_socket.h"

#include "tests/launch/launch_harness.h"
#include "tests/support/namespaces.h"

namespace cohort::launch {
namespace elastic_test {

using Lines = std::vector<std::string>;
using test::Namespaces;

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A rendezvous server that sends what a test wants, when the test wants. Its job has no secret.
class FakeRendezvousServer {
 public:
  std::string address() const { return "127.0.0.1:" + std::to_string(listener_.port); }

  // Waits for `count` messages of this kind in all; a heartbeat is none.
  void wait_for(const std::string& kind, int count = 1) {
    wait_for_text("\"kind\":\"" + kind + "\"", count);
  }

  // One write, so that all messages arrive together.
  void send(const Lines& messages) {
    std::string text;
    for (const std::string& message : messages) {
      text += std::to_string(++num_sent_) + " 0 " + message + "\n";
    }
    write(text);
  }

  // Takes the launcher's next connection, says nothing, and counts the heartbeats that come until the
  // launcher gives it up.
  int count_heartbeats() {
    received_.clear();
    shake_hands();
    char buffer[4096];
    for (ssize_t size; (size = ::read(launcher_.get(), buffer, sizeof(buffer))) > 0;)
      received_.append(buffer, static_cast<size_t>(size));
    launcher_ = Fd();
    int count = 0;
    std::istringstream lines(received_);
    for (std::string line; std::getline(lines, line);) count += line == "0 0 " ? 1 : 0;
    return count;
  }

  static std::string round(int number) {
    return R"({"kind": "round", "node_rank": 0, "nodes": 1, "base_rank": 0, "world_size": 1,)"
           R"( "master_addr": "127.0.0.1", "master_port": 1, "restart": 0, "job_id": "j", "round": )" +
           std::to_string(number) + "}";
  }

 private:
  void wait_for_text(const std::string& part, int count) {
    while (true) {
      int found = 0;
      for (size_t at = 0; (at = received_.find(part, at)) != std::string::npos; ++at) ++found;
      if (found >= count) return;
      if (!launcher_) shake_hands();
      char buffer[4096];
      pollfd wait{launcher_.get(), POLLIN, 0};
      if (::poll(&wait, 1, 60'000) != 1) throw std::runtime_error("silence after " + received_);
      const ssize_t size = ::read(launcher_.get(), buffer, sizeof(buffer));
      if (size <= 0) throw std::runtime_error("the launcher left after " + received_);
      received_.append(buffer, static_cast<size_t>(size));
    }
  }
  void shake_hands() {
    launcher_ = Fd(::accept(listener_.fd.get(), nullptr, nullptr));
    write(challenge_line("challenge") + "\n");
    wait_for_text("\n", 1);
    const Hello hello = parse_hello(received_.substr(0, received_.find('\n')));
    write(line_of(Welcome{.proof = proof_of_server("", "challenge", hello), .known = true}) + "\n");
  }
  void write(const std::string& text) {
    ASSERT_EQ(::write(launcher_.get(), text.data(), text.size()),
              static_cast<ssize_t>(text.size()));
  }

  const StoreSocket listener_ = listen_for_store(Reach::kLoopback, 0);
  Fd launcher_;
  int num_sent_ = 0;
  std::string received_;
};

// A launcher of its job, which takes no pause of the server's for a broken connection.
std::vector<std::string> node_of(const FakeRendezvousServer& server, const std::string& script) {
  return cohort_run_sh({"--nnodes", "1:2", "--rdzv-endpoint", server.address(), "--rdzv-conf",
                        "keep_alive_interval=60"},
                       script);
}

TEST(RendezvousTest, ARoundCalledOffAtOnceIsJoinedAgain) {
  FakeRendezvousServer server;
  Launched run(node_of(server, "echo started"));
  server.wait_for("join");
  server.send({FakeRendezvousServer::round(1), R"({"kind": "stop", "why": "a node joined"})"});
  server.wait_for("join", 2);
  server.send({FakeRendezvousServer::round(2)});
  server.wait_for("done");
  server.send({R"({"kind": "end", "code": 0, "why": ""})"});
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(ended.out, "started\n");
}

TEST(RendezvousTest, MessagesOfAnotherHostCannotSteerTheTerminal) {
  FakeRendezvousServer server;
  Launched run(node_of(server, "echo started"));
  server.wait_for("join");
  server.send({R"({"kind": "end", "code": 1, "why": "\u001b[2Jgone\r\n\u009b31m \u00fc"})"});
  const Ended ended = run.wait();
  EXPECT_TRUE(holds(ended.err, "the job ended:  [2Jgone   31m \u00fc\n")) << ended.err;
}

TEST(RendezvousTest, AStopThatComesWithTheRoundPreventsIt) {
  FakeRendezvousServer server;
  Launched run(node_of(server, "echo started; exec sleep 1000"));
  server.wait_for("join");
  run.send(SIGSTOP);
  const std::string state = "/proc/" + std::to_string(run.pid()) + "/stat";
  while (!holds(read_file(state), ") T ")) ::usleep(1000);
  server.send({FakeRendezvousServer::round(1)});
  run.send(SIGTERM);
  run.send(SIGCONT);  // It finds both in one iteration of its loop.
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 143) << ended.err;
  EXPECT_EQ(ended.out, "");
}

// Its own workers have ended; the other nodes' never do.
TEST(RendezvousTest, AStoppedNodeWaitsForTheOthersNoLongerThanForItsWorkers) {
  for (const int signal : {SIGHUP, SIGTERM}) {
    FakeRendezvousServer server;
    Launched run({this_program(), "--worker", "impatient-" + server.address()});
    server.wait_for("join");
    server.send({FakeRendezvousServer::round(1)});
    server.wait_for("done");
    run.send(signal);
    const Ended ended = run.wait();
    EXPECT_EQ(ended.exit_code, 128 + signal) << ended.err;
    EXPECT_TRUE(holds(ended.err, ": stopped by signal " + std::to_string(signal))) << ended.err;
  }
}

TEST(RendezvousTest, ANodeThatNoRoundAdmittedReportsThat) {
  FakeRendezvousServer server;
  Launched run(node_of(server, "echo started"));
  server.wait_for("join");
  server.send({R"({"kind": "end", "code": 0, "why": ""})"});
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(ended.out, "");
  EXPECT_TRUE(holds(ended.err, "the job ended before a round admitted this node\n")) << ended.err;
}

// A heartbeat is due every 48 ms, and the connection is given up after 240 ms. A busy machine may
// hold up a launcher: one connection with most of its heartbeats is enough.
TEST(RendezvousTest, HeartbeatsComeInTimeHoweverShortTheInterval) {
  FakeRendezvousServer server;
  Launched run(cohort_run_sh({"--nnodes", "1:2", "--rdzv-endpoint", server.address(), "--rdzv-conf",
                              "keep_alive_interval=0.24"},
                             "exit 0"));
  int most = 0;
  for (int i = 0; i < 20 && most < 4; ++i) most = std::max(most, server.count_heartbeats());
  EXPECT_GE(most, 4);
  run.send(SIGKILL);
  run.wait();
}

// Hosts, a folder that they share, and a launcher on each.
class ElasticTest : public ::testing::Test {
 protected:
  std::unique_ptr<Launched> start(int host, Lines flags, const std::string& script) const {
    Lines all{
        "--rdzv-endpoint", Namespaces::address(0) + ":29400", "--grace", "0.5", "--tee", "all"};
    all.insert(all.end(), flags.begin(), flags.end());
    return std::make_unique<Launched>(
        hosts_.on(host, cohort_run_sh(all, "cd " + folder_.path() + ";" + script)));
  }

  // A job of two nodes.
  auto start_two(const std::string& script, int max_restarts = 0) const {
    const Lines flags{"--nnodes", "2", "--max-restarts", std::to_string(max_restarts)};
    return std::pair{start(0, flags, script), start(1, flags, script)};
  }

  // Rank 0 counts steps in a file and writes "WORLD_SIZE first_step restarts" of each round to
  // another; all steps until there are 1000 or the file `stop` appears.
  static std::string counting() {
    return "step=$(cat step 2>/dev/null || echo 0);"
           "if [ $RANK = 0 ]; then echo $WORLD_SIZE $step $COHORT_RESTART_COUNT >> rounds; fi;"
           "until [ -e stop ]; do"
           "  if [ $RANK = 0 ]; then step=$((step+1)); echo $step > next; mv next step; fi;"
           "  sleep 0.05; done";
  }

  std::string wait_for_rounds(int count) const {
    std::string text;
    for (int i = 0; i < 6000; ++i) {
      text = read_file(folder_.path() + "/rounds");
      if (std::count(text.begin(), text.end(), '\n') >= count) return text;
      ::usleep(10000);
    }
    ADD_FAILURE() << "expected " << count << " rounds, got: " << text;
    return text;
  }

  // Until the round has made steps of its own.
  void wait_for_step_after(int step) const {
    for (int i = 0; i < 6000; ++i) {
      const std::string text = read_file(folder_.path() + "/step");
      if (!text.empty() && std::stoi(text) > step) return;
      ::usleep(10000);
    }
    ADD_FAILURE() << "no step after " << step;
  }

  int steps() const { return std::stoi(wait_for_file(folder_.path() + "/step")); }

  const Namespaces hosts_{3};
  const TemporaryFolder folder_;
};

TEST_F(ElasticTest, NodesJoinAndLeaveAndTrainingContinues) {
  const std::string logs = folder_.path() + "/logs";
  const Lines flags{"--nnodes", "1:3", "--log-dir", logs};
  const std::string script = "echo up;" + counting();
  const auto first = start(0, flags, script);
  wait_for_rounds(1);
  wait_for_step_after(2);
  const auto second = start(1, flags, script);
  wait_for_rounds(2);
  wait_for_step_after(steps() + 1);
  EXPECT_EQ(wait_for_file(logs + "/rank1.stdout.log"), "up\n");
  second->send(SIGKILL);
  wait_for_rounds(3);
  wait_for_step_after(steps() + 1);
  const auto third = start(2, flags, script);
  const std::string rounds = wait_for_rounds(4);
  wait_for_step_after(steps() + 1);
  ASSERT_EQ(std::system(("touch " + folder_.path() + "/stop").c_str()), 0);
  const Ended ended = first->wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(third->wait().exit_code, 0);
  EXPECT_TRUE(holds(ended.err, "cohort run: new round: a node joined\n")) << ended.err;
  EXPECT_TRUE(holds(ended.err, "cohort run: new round: node 1 left\n")) << ended.err;
  // World sizes 1, 2, 1, 2; no restart is counted; each round begins where the last one stood.
  std::istringstream lines(rounds);
  int last_step = -1;
  for (const int expected : {1, 2, 1, 2}) {
    int world_size = 0, step = 0, restarts = -1;
    lines >> world_size >> step >> restarts;
    EXPECT_EQ(world_size, expected) << rounds;
    EXPECT_GT(step, last_step) << rounds;
    EXPECT_EQ(restarts, 0) << rounds;
    last_step = step;
  }
  // The third node had the second's rank, and kept what that had written.
  EXPECT_EQ(read_file(logs + "/rank0.stdout.log"), "up\nup\nup\nup\n");
  EXPECT_EQ(read_file(logs + "/rank1.stdout.log"), "up\nup\n");
}

TEST_F(ElasticTest, AllNodesHaveOneSecretInAllRounds) {
  const std::string file = folder_.path() + "/secret";
  ASSERT_EQ(std::system(("echo the text of the file > " + file).c_str()), 0);
  std::vector<std::string> drawn;
  for (const Lines& more : {Lines{}, Lines{"--rdzv-secret-file", file}}) {
    Lines flags{"--nnodes", "2", "--max-restarts", "1"};
    flags.insert(flags.end(), more.begin(), more.end());
    const std::string script = "echo $COHORT_JOB_SECRET; exit $((1 - COHORT_RESTART_COUNT))";
    const auto first = start(0, flags, script), second = start(1, flags, script);
    Lines lines = sorted_lines(first->wait().out + second->wait().out);
    for (std::string& line : lines) line.erase(0, 9);
    EXPECT_GE(lines.size(), 3U) << "a worker may be stopped before it says anything";
    for (const std::string& line : lines) EXPECT_EQ(line, lines.front());
    drawn.push_back(lines.front());
  }
  EXPECT_EQ(drawn[0].size(), 32U) << drawn[0];
  EXPECT_EQ(drawn[1].size(), 64U) << drawn[1];
}

TEST_F(ElasticTest, AFailedWorkerRestartsEveryNode) {
  const Lines flags{"--nnodes", "2", "--max-restarts", "1"};
  const std::string script =
      "echo rank $RANK of $WORLD_SIZE round $COHORT_RESTART_COUNT at $MASTER_ADDR;"
      "touch here$RANK$COHORT_RESTART_COUNT;"
      "if [ $RANK$COHORT_RESTART_COUNT = 20 ]; then"
      "  until [ -e here00 -a -e here10 ]; do sleep 0.02; done; exit 5; fi;"
      "if [ $COHORT_RESTART_COUNT = 0 ]; then exec sleep 1000; fi";
  Lines small(flags), large(flags);
  small.insert(small.end(), {"--nproc-per-node", "1"});
  large.insert(large.end(), {"--nproc-per-node", "2"});
  const auto first = start(0, large, script);
  const auto second = start(1, small, script);
  const Ended one = first->wait();
  const Ended two = second->wait();
  EXPECT_EQ(one.exit_code, 0) << one.err;
  EXPECT_EQ(two.exit_code, 0) << two.err;
  EXPECT_TRUE(holds(one.err, "exited with code 5; restart 1 of 1\n")) << one.err;
  EXPECT_EQ(sorted_lines(one.out), (Lines{"[rank 0] rank 0 of 3 round 0 at 10.77.0.1",
                                          "[rank 0] rank 0 of 3 round 1 at 10.77.0.1",
                                          "[rank 1] rank 1 of 3 round 0 at 10.77.0.1",
                                          "[rank 1] rank 1 of 3 round 1 at 10.77.0.1"}));
  EXPECT_EQ(sorted_lines(two.out), (Lines{"[rank 2] rank 2 of 3 round 0 at 10.77.0.1",
                                          "[rank 2] rank 2 of 3 round 1 at 10.77.0.1"}));
}

TEST_F(ElasticTest, TheLastFailureEndsTheJobOnEveryNode) {
  for (const int max_restarts : {0, 1}) {
    const std::string rounds = "rounds_of_" + std::to_string(max_restarts) + "_";
    const std::string script = "echo $COHORT_RESTART_COUNT >> " + rounds +
                               "$RANK;"
                               "if [ $RANK = 0 ]; then exec sleep 1000; fi;"
                               "until grep -qx $COHORT_RESTART_COUNT " +
                               rounds +
                               "0; do sleep 0.02; done;"
                               "echo the last line >&2; exit 6";
    const auto [first, second] = start_two(script, max_restarts);
    const Ended one = first->wait();
    const Ended two = second->wait();
    EXPECT_EQ(one.exit_code, 6);
    EXPECT_EQ(two.exit_code, 6);
    EXPECT_TRUE(holds(one.err, "cohort run: the job ended: node 1: rank 1 (pid ")) << one.err;
    EXPECT_TRUE(holds(two.err, "cohort run: rank 1 (pid ")) << two.err;
    for (const std::string rank : {"0", "1"}) {
      EXPECT_EQ(read_file(folder_.path() + "/" + rounds + rank),
                max_restarts == 0 ? "0\n" : "0\n1\n")
          << "rank " << rank << ", at most " << max_restarts << " restarts";
    }
  }
}

TEST_F(ElasticTest, TheRendezvousServersDeathEndsTheJob) {
  const Lines flags{"--nnodes", "1:2"};
  const auto first = start(0, flags, "echo up; exec sleep 1000");
  first->read_lines(1);
  const auto second = start(1, flags, "echo up; exec sleep 1000");
  second->read_lines(1);
  first->send(SIGKILL);
  const Ended ended = second->wait();
  EXPECT_EQ(ended.exit_code, 3);
  EXPECT_TRUE(holds(ended.err,
                    "the job ended: the rendezvous server at 10.77.0.1:29400 closed the "
                    "connection\n"))
      << ended.err;
}

// A node counts as gone after 4 s of silence.
const Lines kSoon{"--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=4,join_timeout=60"};

Lines with(Lines flags, const Lines& more) {
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

// Reads what a launcher shows until it holds `part`; returns all of it.
std::string read_until(Launched& launcher, const std::string& part) {
  std::string text;
  for (int lines = 1; !holds(text, part); ++lines) text = launcher.read_lines(lines);
  return text;
}

TEST_F(ElasticTest, ASilentNodeIsRemovedAndRejoinsUnderItsOldRank) {
  const Lines flags = with({"--nnodes", "2:3"}, kSoon);
  const std::string script = "echo node $GROUP_RANK of $GROUP_WORLD_SIZE;" + counting();
  const auto first = start(0, flags, script);
  ::usleep(300'000);
  const auto second = start(1, flags, script);
  read_until(*second, "node 1 of 2\n");
  const auto third = start(2, flags, script);
  read_until(*second, "node 1 of 3\n");
  read_until(*third, "node 2 of 3\n");
  hosts_.unplug(1);
  EXPECT_TRUE(
      holds(first->wait_for_err("stopped responding"), "new round: node 1 stopped responding\n"));
  read_until(*third, "node 1 of 2\n");
  hosts_.plug(1);
  EXPECT_TRUE(holds(second->wait_for_err("removed it"), "received nothing from this node"));
  wait_for_rounds(4);
  wait_for_step_after(steps());
  ASSERT_EQ(std::system(("touch " + folder_.path() + "/stop").c_str()), 0);
  const Ended one = first->wait(), two = second->wait(), three = third->wait();
  for (const Ended* ended : {&one, &two, &three}) EXPECT_EQ(ended->exit_code, 0) << ended->err;
  EXPECT_EQ(two.out, "[rank 1] node 1 of 2\n[rank 1] node 1 of 3\n[rank 1] node 1 of 3\n");
  EXPECT_EQ(three.out, "[rank 2] node 2 of 3\n[rank 1] node 1 of 2\n[rank 2] node 2 of 3\n");
}

TEST_F(ElasticTest, ARendezvousServerThatCannotBeReachedEndsTheJobInTime) {
  const Lines flags{"--nnodes", "1:2", "--rdzv-conf",
                    "keep_alive_interval=1,keep_alive_max_attempt=4,join_timeout=8"};
  const auto first = start(0, flags, counting());
  wait_for_rounds(1);
  const auto second = start(1, flags, counting());
  wait_for_rounds(2);
  hosts_.unplug(1);
  wait_for_rounds(3);
  const Ended ended = second->wait();
  EXPECT_EQ(ended.exit_code, 3);
  EXPECT_TRUE(holds(ended.err, "the rendezvous server at 10.77.0.1:29400 stopped responding\n"))
      << ended.err;
  ASSERT_EQ(std::system(("touch " + folder_.path() + "/stop").c_str()), 0);
  EXPECT_EQ(first->wait().exit_code, 0);
}

// Longer than one heartbeat and shorter than the limit: suspended launchers, an unplugged cable,
// broken connections.
TEST_F(ElasticTest, LaunchersSuspendedForAWhileEndNothing) {
  const auto [first, second] = start_two(counting());
  wait_for_rounds(1);
  first->send(SIGSTOP);
  second->send(SIGSTOP);
  ::sleep(4);
  second->send(SIGCONT);
  ::sleep(2);
  first->send(SIGCONT);
  ::sleep(1);
  hosts_.unplug(1);
  ::sleep(6);
  hosts_.plug(1);
  ::sleep(1);
  const int steps_then = steps();
  wait_for_step_after(steps_then);
  ASSERT_EQ(std::system(("touch " + folder_.path() + "/stop").c_str()), 0);
  const Ended one = first->wait(), two = second->wait();
  for (const Ended* ended : {&one, &two}) {
    EXPECT_EQ(ended->exit_code, 0) << ended->err;
    EXPECT_FALSE(holds(ended->err, "new round")) << ended->err;
  }
  EXPECT_EQ(read_file(folder_.path() + "/rounds"), "2 0 0\n");
}

// The rendezvous server is suspended for three times the limit: the workers keep running.
TEST_F(ElasticTest, ASuspendedRendezvousServerIsWaitedFor) {
  const Lines flags = with({"--nnodes", "2"}, kSoon);
  const auto first = start(0, flags, counting());
  const auto second = start(1, flags, counting());
  wait_for_rounds(1);
  first->send(SIGSTOP);
  ::sleep(12);
  wait_for_step_after(steps());
  first->send(SIGCONT);
  ::sleep(1);
  ASSERT_EQ(std::system(("touch " + folder_.path() + "/stop").c_str()), 0);
  const Ended one = first->wait(), two = second->wait();
  EXPECT_EQ(one.exit_code, 0) << one.err;
  EXPECT_EQ(two.exit_code, 0) << two.err;
  EXPECT_EQ(read_file(folder_.path() + "/rounds"), "2 0 0\n");
}

TEST_F(ElasticTest, ANodeSuspendedForAMinuteRejoins) {
  const Lines flags{"--nnodes", "1:2"};
  const auto first = start(0, flags, counting());
  wait_for_rounds(1);
  const auto second = start(1, flags, counting());
  wait_for_rounds(2);
  second->send(SIGSTOP);
  wait_for_rounds(3);
  ::sleep(45);  // A node has left after 15 seconds.
  second->send(SIGCONT);
  wait_for_rounds(4);
  ASSERT_EQ(std::system(("touch " + folder_.path() + "/stop").c_str()), 0);
  const Ended one = first->wait(), two = second->wait();
  EXPECT_EQ(one.exit_code, 0) << one.err;
  EXPECT_EQ(two.exit_code, 0) << two.err;
  std::istringstream lines(read_file(folder_.path() + "/rounds"));
  for (const int expected : {1, 2, 1, 2}) {
    int world_size = 0, step = 0, restarts = -1;
    lines >> world_size >> step >> restarts;
    EXPECT_EQ(world_size, expected);
    EXPECT_EQ(restarts, 0);
  }
}

TEST_F(ElasticTest, ALostPeerIsTheConsequenceOfANodesLoss) {
  // The survivor's worker exits with 3 before the rendezvous server can know that its peer's node
  // is gone.
  const Lines flags{"--nnodes", "1:2"};
  const std::string script = kExplained +
                             "if [ $WORLD_SIZE = 1 ]; then until [ -e gone ]; do sleep 0.02; done; "
                             "fi;"  // It may begin alone.
                             "echo $WORLD_SIZE $$ $COHORT_RESTART_COUNT; if [ $WORLD_SIZE = 2 ]; "
                             "then"
                             "  if [ $RANK = 0 ]; then until [ -e gone ]; do sleep 0.02; done; "
                             "explained 3; fi;"
                             "  exec sleep 1000; fi;";
  const auto second = start(1, flags, script);  // Waits for the rendezvous server.
  const auto first = start(0, flags, script);
  std::istringstream words(first->read_lines(1));
  std::string prefix, rank;
  int world_size = 0, pid = 0;
  words >> prefix >> rank >> world_size >> pid;
  ASSERT_EQ(world_size, 2);
  const Watched worker(pid);
  ASSERT_EQ(std::system(("touch " + folder_.path() + "/gone").c_str()), 0);
  EXPECT_TRUE(worker.wait_for_end());
  second->send(SIGKILL);
  const Ended ended = first->wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_TRUE(holds(ended.err, "new round: node 1 left\n")) << ended.err;
  EXPECT_TRUE(holds(ended.out, "[rank 0] 1 ")) << ended.out;
}

TEST_F(ElasticTest, TooFewNodesAreAnErrorInTime) {
  const auto first = start(0, {"--nnodes", "2:3", "--rdzv-timeout", "7"}, "echo started");
  const Ended ended = first->wait();
  EXPECT_EQ(ended.exit_code, 3);
  EXPECT_EQ(ended.out, "");
  EXPECT_TRUE(holds(ended.err, "--nnodes: expected at least 2 nodes within 7 s, got 1\n"))
      << ended.err;
  EXPECT_TRUE(holds(ended.err,
                    "waiting at 10.77.0.1:29400 for a round of 2:3 nodes (--nnodes); too few for "
                    "7 s (--rdzv-timeout) end the job\n"))
      << ended.err;
  const auto lonely = start(1, {"--nnodes", "2", "--rdzv-timeout", "1"}, "echo started");
  const Ended alone = lonely->wait();
  EXPECT_EQ(alone.exit_code, 3);
  EXPECT_TRUE(
      holds(alone.err, "the rendezvous server at 10.77.0.1:29400 did not respond in time\n"))
      << alone.err;
}

TEST(RendezvousTest, AHostThatDoesNotResolveIsWaitedForAndNamed) {
  const auto start = [](const std::string& timeout) {
    return std::make_unique<Launched>(cohort_run_sh(
        {"--nnodes", "2", "--rdzv-endpoint", "no-such-host.invalid", "--rdzv-timeout", timeout},
        "echo started"));
  };
  const std::string waits = "--rdzv-endpoint no-such-host.invalid:29400 does not resolve yet: ";
  const Ended late = start("1")->wait();
  EXPECT_EQ(late.exit_code, 2);
  EXPECT_EQ(late.out, "");
  EXPECT_TRUE(holds(late.err, waits)) << late.err;
  EXPECT_TRUE(holds(late.err, "no-such-host.invalid:29400: expected a host that resolves, got "))
      << late.err;
  const auto waiting = start("600");
  waiting->wait_for_err(waits);
  waiting->send(SIGTERM);
  const Ended stopped = waiting->wait();
  EXPECT_EQ(stopped.exit_code, 143);
  EXPECT_TRUE(holds(stopped.err, "stopped by signal 15")) << stopped.err;
}

TEST_F(ElasticTest, ANodeOfAnotherJobIsRefused) {
  const auto first = start(0, {"--nnodes", "1:2", "--rdzv-id", "a"}, "echo up; exec sleep 1000");
  first->read_lines(1);
  const auto other = start(1, {"--nnodes", "1:2", "--rdzv-id", "b"}, "echo up");
  const Ended ended = other->wait();
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_TRUE(holds(ended.err, "--rdzv-id: expected a, got b\n")) << ended.err;
  first->send(SIGTERM);
  EXPECT_EQ(first->wait().exit_code, 143);
}

TEST_F(ElasticTest, ANodeWithOtherSettingsOfTheJobIsRefused) {
  const auto first =
      start(0, {"--nnodes", "1:3", "--max-restarts", "1"}, "echo up; exec sleep 1000");
  first->read_lines(1);
  const auto refused = [this](const Lines& flags, const std::string& why) {
    const Ended ended = start(1, flags, "echo up")->wait();
    EXPECT_EQ(ended.exit_code, 2);
    EXPECT_EQ(ended.out, "");
    EXPECT_TRUE(holds(ended.err, why)) << ended.err << "expected: " << why;
  };
  refused({"--nnodes", "1:5", "--max-restarts", "4"},
          "--nnodes: expected 1:3, got 1:5; --max-restarts: expected 1, got 4: ");
  refused({"--nnodes", "3", "--max-restarts", "1"}, ": --nnodes: expected 1:3, got 3: ");
  refused({"--nnodes", "1:3"}, ": --max-restarts: expected 1, got 0: ");
  refused({"--nnodes", "1:3", "--max-restarts", "1", "--rdzv-conf", "keep_alive_interval=100"},
          "--rdzv-conf keep_alive_interval: expected 5 s, got 100 s: ");
  first->send(SIGTERM);
  const Ended ended = first->wait();
  EXPECT_EQ(ended.exit_code, 143);
  EXPECT_FALSE(holds(ended.err, "new round")) << ended.err;
}

TEST_F(ElasticTest, AStopReachesNodesThroughTheirWorkers) {
  // Workers agree to stop by a file, as a training job does by a collective, and exit with 4.
  const std::string script =
      kExplained +
      "trap 'touch stop' TERM; echo up; until [ -e stop ]; do sleep 0.02; done; explained 4";
  const auto [first, second] = start_two(script);
  first->read_lines(1);
  second->read_lines(1);
  second->send(SIGTERM);
  const Ended one = first->wait();
  EXPECT_EQ(one.exit_code, 4) << one.err;
  EXPECT_EQ(second->wait().exit_code, 4);
}

}  // namespace elastic_test
}  // namespace cohort::launch
