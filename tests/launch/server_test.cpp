// SPDX-License-Identifier: Apache-2.0
// `cohort run --servers`: the servers are shell scripts here, which say what they were given.
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <signal.h>
#include <sstream>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/launch/launch_harness.h"

namespace cohort::launch {
namespace server_test {

using Lines = std::vector<std::string>;

// A job with servers that run `script`, in a folder of its own.
class Job {
 public:
  explicit Job(const std::string& script) {
    const std::string path = folder_.path() + "/server";
    std::ofstream(path) << "#!/bin/sh\n" << script;
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  }
  /// The command line of the job.
  Lines run(Lines flags, const std::string& trainer) const {
    flags.insert(flags.end(), {"--server-program", folder_.path() + "/server", "--server-dir",
                               folder_.path() + "/state", "--log-dir", folder_.path() + "/logs"});
    return cohort_run_sh(std::move(flags), trainer);
  }
  std::string path(const std::string& name) const { return folder_.path() + "/" + name; }
  std::string log(int server) const {
    return read_file(path("logs/server." + std::to_string(server) + ".log"));
  }

 private:
  TemporaryFolder folder_;
};

// Serves until it is told to stop; $7 of its arguments is the number of servers.
const char* const kServes =
    "trap 'echo stopped; exit 0' TERM\n"
    "echo \"$@\"; echo complaint >&2\n"
    "echo $PADDLE_TRAINING_ROLE $PADDLE_CURRENT_ENDPOINT rank=$RANK\n"
    "while :; do sleep 0.01; done\n";

// Waits until every server has written its log.
const char* const kWaits =
    "for i in 0 1; do until grep -q PSERVER $COHORT_LOG_DIR/server.$i.log; do sleep 0.01; done; "
    "done 2>/dev/null; ";

Lines words_of(const std::string& text) {
  std::istringstream stream(text);
  Lines words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

TEST(ServerRunTest, TrainersAndServersFindEachOther) {
  const Job job(kServes);
  Launched run(job.run({"--servers", "2", "--trainers", "2", "--server-arg=--level=synced"},
                       std::string(kWaits) + "echo $PADDLE_TRAINING_ROLE $PADDLE_TRAINER_ID of "
                                             "$PADDLE_TRAINERS_NUM $PADDLE_PSERVERS_IP_PORT_LIST"),
               {"PADDLE_PSERVER_IPS=elsewhere", "TRAINING_ROLE=PSERVER"});
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(ended.err, "cohort run: logs are in " + job.path("logs") + "\n");
  std::string endpoints;
  for (const int server : {0, 1}) {
    const std::string id = std::to_string(server);
    const std::string log = job.log(server);
    const Lines words = words_of(log);
    ASSERT_GE(words.size(), 3u) << log;
    const std::string endpoint = words[2];
    EXPECT_EQ(endpoint.find("unix:" + run.temporary().path() + "/cohort-servers-"), 0u);
    EXPECT_EQ(log.find("server --endpoint " + endpoint + " --server-id " + id +
                       " --servers 2 --folder " + job.path("state/server." + id) +
                       " --level=synced\ncomplaint\nPSERVER " + endpoint + " rank=\n"),
              0u)
        << log;
    EXPECT_TRUE(log.ends_with("stopped\n")) << log;
    EXPECT_TRUE(std::filesystem::is_directory(job.path("state/server." + id)));
    endpoints += (server == 0 ? "" : ",") + endpoint;
  }
  EXPECT_EQ(ended.out, "TRAINER 0 of 2 " + endpoints + "\n");
}

TEST(ServerRunTest, SocketsAndSecretAreTheUsersAlone) {
  const Job job(
      "echo secret $COHORT_JOB_SECRET; stat -c %a $(dirname ${3#unix:})\n"
      "trap 'exit 0' TERM; while :; do sleep 0.01; done\n");
  Launched run(job.run({"--servers", "1", "--trainers", "2", "--tee", "all"},
                       "until grep -q 700 " + job.path("logs/server.0.log") +
                           "; do sleep 0.01; done;"
                           "echo $COHORT_JOB_SECRET;"
                           "cat $(dirname ${PADDLE_PSERVERS_IP_PORT_LIST#unix:})/secret"),
               {"COHORT_JOB_SECRET=inherited"});
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  const std::string log = job.log(0);
  const std::string secret = log.substr(7, 32);
  EXPECT_EQ(log.find("secret " + secret + "\n700\n"), 0U) << log;
  EXPECT_EQ(secret.find_first_not_of("0123456789abcdef"), std::string::npos) << log;
  EXPECT_EQ(sorted_lines(ended.out), (Lines{"[rank 0] " + secret, "[rank 0] " + secret,
                                            "[rank 1] " + secret, "[rank 1] " + secret}));
  EXPECT_EQ(run.temporary().names(), Lines{});
}

TEST(ServerRunTest, ASecretThatCannotBeWrittenLeavesNoFolder) {
  const Job job(kServes);
  Lines command{"/bin/sh", "-c", "ulimit -f 0; exec \"$@\"", "sh"};
  const Lines limited = job.run({"--servers", "1"}, "exit 0");
  command.insert(command.end(), limited.begin(), limited.end());
  Launched run(command);
  EXPECT_NE(run.wait().exit_code, 0);
  EXPECT_EQ(run.temporary().names(), Lines{});
}

TEST(ServerRunTest, ADeadServerIsStartedAgainWithItsSocketAndFolder) {
  // Dies once; its folder remembers that.
  const Job job(
      "echo \"$3\" >> \"$9/endpoints\"\n"
      "if [ ! -e \"$9/died\" ]; then touch \"$9/died\"; kill -9 $$; fi\n"
      "trap 'exit 0' TERM\n"
      "while :; do sleep 0.01; done\n");
  Launched run(job.run({"--servers", "1", "--trainers", "1", "--max-server-restarts", "1"},
                       "until [ $(wc -l < " + job.path("state/server.0/endpoints") +
                           ") = 2 ]; do sleep 0.01; done 2>/dev/null; echo done"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(ended.out, "done\n");
  EXPECT_NE(ended.err.find("was killed by signal 9 (Killed); server restart 1 of 1"),
            std::string::npos)
      << ended.err;
  const Lines endpoints = words_of(read_file(job.path("state/server.0/endpoints")));
  ASSERT_EQ(endpoints.size(), 2u);
  EXPECT_EQ(endpoints[0], endpoints[1]);
}

TEST(ServerRunTest, TheReportOfATrainerThatStartedAgainHasNoLineOfTheFirstStart) {
  const Job job("trap 'exit 0' TERM; while :; do sleep 0.01; done\n");
  Launched run(job.run({"--servers", "1", "--trainers", "1", "--restart-policy", "single",
                        "--max-restarts", "1", "--tee", "none"},
                       "echo start $COHORT_RESTART_COUNT failed >&2; exit 7"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 7);
  EXPECT_NE(ended.err.find("last lines of its stderr:\n    start 1 failed\n"), std::string::npos)
      << ended.err;
}

TEST(ServerRunTest, AServerThatStaysDownEndsTheJobByName) {
  const Job job(
      "if [ \"$5\" = 0 ]; then trap 'exit 0' TERM; while :; do sleep 0.01; done; fi\n"
      "echo the disk is full >&2; exit 7\n");
  Launched run(job.run(
      {"--servers", "2", "--trainers", "2", "--max-server-restarts", "1", "--max-restarts", "5"},
      "sleep 1000"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 7);
  EXPECT_NE(ended.err.find("exited with code 7; server restart 1 of 1"), std::string::npos);
  EXPECT_NE(ended.err.find(") exited with code 7\ncohort run: last lines of its log:\n"
                           "    the disk is full\n"
                           "cohort run: "),
            std::string::npos)
      << "lines of the first start must not be shown: " << ended.err;
  EXPECT_NE(ended.err.find("cohort run: server 1 is not restarted: all 1 of "
                           "--max-server-restarts are used\n"),
            std::string::npos)
      << ended.err;
  EXPECT_EQ(ended.err.find("restart 1 of 5"), std::string::npos);
  EXPECT_NE(ended.err.find("cohort run: stopped because server 1 failed: rank 0, rank 1\n"),
            std::string::npos)
      << ended.err;
}

TEST(ServerRunTest, ABadFlagOfAServerIsNoReasonToStartItAgain) {
  const Job job(kExplained + "explained 2\n");
  Launched run(job.run({"--servers", "1", "--max-server-restarts", "9"}, "sleep 1000"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_EQ(ended.err.find("server restart"), std::string::npos) << ended.err;
}

TEST(ServerRunTest, ACodeOfAnotherProgramIsAReasonToStartItAgain) {
  const Job job("exit 2\n");
  Launched run(job.run({"--servers", "1", "--max-server-restarts", "1"}, "sleep 1000"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_NE(ended.err.find("server restart 1 of 1"), std::string::npos) << ended.err;
}

TEST(ServerRunTest, AServerThatLeavesTooEarlyFailed) {
  const Job job("exit 0\n");
  Launched run(job.run({"--servers", "1"}, "sleep 1000"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_NE(ended.err.find("exited with code 0 before the trainers were done"), std::string::npos)
      << ended.err;
}

// A traced process is not its parent's to reap: for the launcher it stays, as in state D.
TEST(ServerRunTest, AServerThatSigkillDoesNotEndIsLeftBehindByName) {
  const Job job("trap '' TERM; echo $$ > \"$9/pid\"; while :; do sleep 0.01; done\n");
  Launched run(job.run({"--servers", "1", "--trainers", "1", "--grace", "0.1"},
                       "until [ -e " + job.path("go") + " ]; do sleep 0.01; done"));
  const pid_t server = std::stoi(wait_for_file(job.path("state/server.0/pid")));
  ASSERT_EQ(::ptrace(PTRACE_SEIZE, server, nullptr, nullptr), 0) << std::strerror(errno);
  std::ofstream(job.path("go"));
  const Ended ended = run.wait();
  EXPECT_NE(ended.err.find("warning: server 0 (pid " + std::to_string(server) +
                           ") does not end after SIGKILL and is left behind"),
            std::string::npos)
      << ended.err;
  int status = 0;
  EXPECT_EQ(::waitpid(server, &status, __WALL), server);
}

TEST(ServerRunTest, AFailingTrainerIsReportedAndNoServerStays) {
  const Job job(std::string("echo $$ > \"$9/pid\"\n") + kServes);
  const std::string pid_file = job.path("state/server.0/pid");
  Launched run(job.run({"--servers", "2", "--trainers", "2", "--grace", "4"},
                       std::string(kWaits) + "if [ $RANK = 1 ]; then until [ -e " + job.path("go") +
                           " ]; do sleep 0.01; done; exit 9; fi; sleep 1000"));
  const pid_t pid = std::atoi(wait_for_file(pid_file).c_str());
  const Watched server(pid);
  std::ofstream(job.path("go")).flush();
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 9);
  EXPECT_NE(ended.err.find("rank 1 (pid "), std::string::npos) << ended.err;
  EXPECT_TRUE(server.wait_for_end());
  EXPECT_NE(job.log(0).find("stopped"), std::string::npos);
}

TEST(ServerRunTest, AServerThatIgnoresSigtermIsKilledAfterTheGrace) {
  const Job job("trap '' TERM\necho PSERVER\nwhile :; do sleep 0.01; done\n");
  Launched run(job.run({"--servers", "2", "--grace", "0.1"}, kWaits));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_NE(ended.err.find("was killed because still running after the grace period"),
            std::string::npos)
      << ended.err;
}

// Suspended for longer than the grace, while the server saves.
TEST(ServerRunTest, TimeInWhichTheJobIsSuspendedIsNotOfTheGrace) {
  const Job job(
      "trap 'echo saving; until [ -e \"$9/go\" ]; do sleep 0.01; done; i=0;"
      " while [ $i -lt 30 ]; do i=$((i+1)); sleep 0.01; done; echo saved; exit 0' TERM\n"
      "echo PSERVER\nwhile :; do sleep 0.01; done\n");
  Launched run(job.run(
      {"--servers", "1", "--grace", "4"},
      "until grep -q PSERVER $COHORT_LOG_DIR/server.0.log; do sleep 0.01; done 2>/dev/null"));
  const auto wait_for = [](const auto& condition) {
    for (int i = 0; i < 6000 && !condition(); ++i) ::usleep(10'000);
    EXPECT_TRUE(condition());
  };
  wait_for([&] { return job.log(0).find("saving") != std::string::npos; });
  run.send(SIGTSTP);
  const std::string state = "/proc/" + std::to_string(run.pid()) + "/stat";
  wait_for([&] { return read_file(state).find(") T ") != std::string::npos; });
  ::usleep(4'200'000);
  std::ofstream(job.path("state/server.0/go")).flush();
  run.send(SIGCONT);
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(ended.err.find("was killed because"), std::string::npos) << ended.err;
  EXPECT_TRUE(job.log(0).ends_with("saved\n")) << job.log(0);
}

TEST(ServerRunTest, AServerThatCannotSaveAtTheEndFailsTheJob) {
  const Job job(
      "trap 'echo cannot save >&2; exit 1' TERM\necho PSERVER\n"
      "while :; do sleep 0.01; done\n");
  Launched run(job.run({"--servers", "2"}, kWaits));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_NE(ended.err.find("    cannot save\n"), std::string::npos) << ended.err;
}

// An interrupt is the trainers' business: they save through the servers.
TEST(ServerRunTest, SignalsReachServersOnlyAfterTheTrainers) {
  const Job job(std::string("trap 'echo interrupted' INT\n") + kServes);
  Launched run(job.run({"--servers", "2"}, std::string(kWaits) + kExplained +
                                               "trap 'sleep 0.1; grep -c stopped "
                                               "$COHORT_LOG_DIR/server.0.log; explained 4' INT; "
                                               "echo ready; while :; do sleep 0.01; done"));
  run.read_lines(1);
  run.send(SIGINT);
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 4);
  EXPECT_EQ(ended.out, "ready\n0\n");
  EXPECT_EQ(job.log(0).find("interrupted"), std::string::npos);
  EXPECT_NE(job.log(0).find("stopped"), std::string::npos);
}

// Without --server-dir: what an interrupted job leaves is named, and a job that succeeds leaves
// nothing.
TEST(ServerRunTest, StateThatStaysBesideTheLogsIsNamed) {
  const Job job("echo state > \"$9/state\"\ntrap 'exit 0' TERM\nwhile :; do sleep 0.01; done\n");
  const auto command = [&](const std::string& then) {
    return cohort_run_sh({"--servers", "1", "--server-program", job.path("server")},
                         "until [ -s $COHORT_LOG_DIR/servers/server.0/state ]; do sleep 0.01; done;"
                         "echo $COHORT_LOG_DIR;" +
                             then);
  };
  Launched interrupted(command("exec sleep 1000"));
  std::string logs = interrupted.read_lines(1);
  logs.pop_back();
  interrupted.send(SIGINT);
  const Ended ended = interrupted.wait();
  EXPECT_EQ(ended.exit_code, 128 + SIGINT);
  EXPECT_EQ(ended.err,
            "cohort run: stopped by signal 2 (Interrupt)\n"
            "cohort run: logs and the servers' state are in " +
                logs + "\n");
  EXPECT_EQ(read_file(logs + "/servers/server.0/state"), "state\n");

  Launched saved(
      command(kExplained + "trap 'explained 4' INT; echo ready; while :; do sleep 0.01; done"));
  const std::string lines = saved.read_lines(2);
  logs = lines.substr(0, lines.find('\n'));
  saved.send(SIGINT);
  const Ended after_save = saved.wait();
  EXPECT_EQ(after_save.exit_code, 4);
  EXPECT_EQ(after_save.err, "cohort run: logs and the servers' state are in " + logs + "\n");
  EXPECT_EQ(read_file(logs + "/servers/server.0/state"), "state\n");

  Launched succeeded(command("exit 0"));
  EXPECT_EQ(succeeded.wait().err, "");
  EXPECT_EQ(succeeded.temporary().names(), Lines{});
}

TEST(ServerRunTest, AKilledLauncherLeavesNoServer) {
  const Job job(std::string("echo $$ > \"$9/pid\"\n") + kServes);
  Launched run(job.run({"--servers", "1"}, "sleep 1000"));
  const Watched server(std::atoi(wait_for_file(job.path("state/server.0/pid")).c_str()));
  run.send(SIGKILL);
  run.wait();
  EXPECT_TRUE(server.wait_for_end());
}

TEST(ServerRunTest, BadFlagsAreNamed) {
  const auto refusal = [](Lines flags) {
    Launched run(cohort_run_sh(std::move(flags), "exit 0"));
    const Ended ended = run.wait();
    EXPECT_EQ(ended.exit_code, 2);
    return ended.err;
  };
  EXPECT_EQ(refusal({"--servers", "-1"}),
            "cohort run: error: --servers: expected 0 to 4096, got -1\n");
  EXPECT_EQ(
      refusal({"--servers", "1", "--nnodes", "2", "--master-addr", "h", "--master-port", "9"}),
      "cohort run: error: --servers: expected one node: on several, start `cohort ps server` "
      "by hand and name it in --pservers, got --nnodes 2\n");
  EXPECT_EQ(refusal({"--servers", "1", "--server-program", "/nowhere/ps"}),
            "cohort run: error: /nowhere/ps: expected a program that can be executed, got No such "
            "file or directory\n");
  for (const Lines& flags :
       {Lines{"--trainers", "2"}, Lines{"--max-server-restarts", "2"}, Lines{"--server-dir", "d"},
        Lines{"--server-arg", "a"}, Lines{"--server-program", "p"}}) {
    const std::string text = refusal(flags);
    EXPECT_NE(text.find(flags[0]), std::string::npos) << text;
    EXPECT_NE(text.find("--servers"), std::string::npos) << text;
  }
  // 0 means none, which is the default.
  for (const Lines& flags : {Lines{"--trainers", "2"}, Lines{"--on-trainer-loss", "wait"},
                             Lines{"--max-server-restarts", "2"}, Lines{"--server-dir", "d"},
                             Lines{"--server-arg", "a"}, Lines{"--server-program", "p"}}) {
    EXPECT_EQ(
        refusal({"--servers", "0", flags[0], flags[1]}),
        "cohort run: error: " + flags[0] + ": expected --servers 1 or more beside it, got 0\n");
  }
  Launched none(cohort_run_sh({"--servers", "0"}, "exit 0"));
  EXPECT_EQ(none.wait().exit_code, 0);
  EXPECT_EQ(refusal({"--servers", "1", "--trainers", "0"}),
            "cohort run: error: --trainers: expected 1 to 4096, got 0\n");
}

}  // namespace server_test
}  // namespace cohort::launch
