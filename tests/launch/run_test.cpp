// SPDX-License-Identifier: Apache-2.0
// `cohort run` from outside, where nothing goes wrong but the command line.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <signal.h>

#include "cohort/launch/cores.h"
#include "cohort/launch/store_socket.h"

#include "tests/launch/launch_harness.h"

namespace cohort::launch {
namespace run_test {

using Lines = std::vector<std::string>;

TEST(RunTest, EachRankGetsItsVariables) {
  Launched run(cohort_run_sh({"--nproc-per-node", "3", "--tee", "all"},
                             "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK "
                             "$GROUP_WORLD_SIZE $MASTER_ADDR"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(sorted_lines(ended.out),
            (Lines{"[rank 0] 0 0 3 3 0 1 127.0.0.1", "[rank 1] 1 1 3 3 0 1 127.0.0.1",
                   "[rank 2] 2 2 3 3 0 1 127.0.0.1"}));
  EXPECT_EQ(ended.err, "");
}

TEST(RunTest, RanksAreTheTrainersOfServersThatWereStartedByHand) {
  Launched run(cohort_run_sh({"--nproc-per-node", "2", "--tee", "all", "--pservers", "a:1,b:2"},
                             "echo $PADDLE_TRAINING_ROLE $PADDLE_TRAINER_ID of "
                             "$PADDLE_TRAINERS_NUM at $PADDLE_PSERVERS_IP_PORT_LIST"));
  EXPECT_EQ(sorted_lines(run.wait().out),
            (Lines{"[rank 0] TRAINER 0 of 2 at a:1,b:2", "[rank 1] TRAINER 1 of 2 at a:1,b:2"}));
}

TEST(RunTest, EveryJobHasASecretOfItsOwn) {
  const auto run = [](const Lines& environment) {
    Launched job(
        cohort_run_sh({"--nproc-per-node", "2", "--tee", "all"}, "echo $COHORT_JOB_SECRET"),
        environment);
    const Lines lines = sorted_lines(job.wait().out);
    EXPECT_EQ(lines.size(), 2U);
    EXPECT_EQ(lines.front().substr(9), lines.back().substr(9));
    return lines.front().substr(9);
  };
  const std::string first = run({}), second = run({});
  EXPECT_EQ(first.size(), 32U);
  EXPECT_EQ(first.find_first_not_of("0123456789abcdef"), std::string::npos) << first;
  EXPECT_NE(first, second);
  EXPECT_EQ(run({"COHORT_JOB_SECRET=inherited"}), "inherited");
}

// Launchers without a rendezvous derive it from the file; no worker receives the file's text.
TEST(RunTest, NodesWithoutRendezvousUseTheSecretOfTheirFile) {
  const TemporaryFolder folder;
  const std::string file = folder.path() + "/secret";
  ASSERT_EQ(std::system(("echo the text of the file > " + file).c_str()), 0);
  const std::string port = std::to_string(listen_for_store(Reach::kLoopback, 0).port);
  const auto run = [&](const std::string& rank, const Lines& more) {
    Lines flags{"--nnodes",      "2",  "--node-rank", rank, "--master-addr", "127.0.0.1",
                "--master-port", port, "--tee",       "all"};
    flags.insert(flags.end(), more.begin(), more.end());
    Launched job(cohort_run_sh(flags, "echo $COHORT_JOB_SECRET"));
    const Ended ended = job.wait();
    EXPECT_EQ(ended.err, "");
    return ended.out.substr(ended.out.find(']') + 2);
  };
  const std::string first = run("0", {"--rdzv-secret-file", file});
  EXPECT_EQ(first.size(), 65U) << first;
  EXPECT_EQ(run("1", {"--rdzv-secret-file", file}), first);
  EXPECT_NE(run("1", {"--rdzv-secret-file", file, "--rdzv-id", "another"}), first);
  EXPECT_EQ(first.find("file"), std::string::npos);
  EXPECT_EQ(run("0", {}), "\n");
}

TEST(RunTest, EachStreamOfEachRankHasItsLog) {
  const TemporaryFolder logs;
  Launched run(cohort_run_sh({"--nproc-per-node", "2", "--log-dir", logs.path() + "/a/b"},
                             "echo out $RANK; echo err $RANK >&2"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(ended.out, "out 0\n");
  EXPECT_EQ(ended.err, "err 0\ncohort run: logs are in " + logs.path() + "/a/b\n");
  for (const std::string rank : {"0", "1"}) {
    EXPECT_EQ(read_file(logs.path() + "/a/b/rank" + rank + ".stdout.log"), "out " + rank + "\n");
    EXPECT_EQ(read_file(logs.path() + "/a/b/rank" + rank + ".stderr.log"), "err " + rank + "\n");
  }
}

TEST(RunTest, ASecondJobInTheFolderOfLogsIsRefusedByName) {
  const TemporaryFolder folder;
  const std::string logs = folder.path() + "/logs", go = folder.path() + "/go";
  const std::string waits = "echo first; until [ -e " + go + " ]; do sleep 0.01; done";
  Launched first(cohort_run_sh({"--log-dir", logs}, waits));
  first.read_lines(1);
  const std::string port = std::to_string(listen_for_store(Reach::kLoopback, 0).port);
  const auto node = [&](const std::string& rank) {
    return Lines{"--nnodes",      "2",  "--node-rank", rank, "--master-addr", "127.0.0.1",
                 "--master-port", port, "--log-dir",   logs};
  };
  const auto expect_refused = [&](const Lines& flags) {
    Launched second(cohort_run_sh(flags, "echo second"));
    const Ended refused = second.wait();
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_EQ(refused.err, "cohort run: error: --log-dir " + logs +
                               ": expected a folder without a running job, got that of another "
                               "`cohort run`; give each job a folder of its own\n");
  };
  expect_refused({"--log-dir", logs});
  expect_refused(node("0"));
  std::ofstream(go).flush();
  EXPECT_EQ(first.wait().exit_code, 0);
  EXPECT_EQ(read_file(logs + "/rank0.stdout.log"), "first\n");
  std::filesystem::remove(go);

  // Nodes of one job share it, and a launcher that was killed leaves it free.
  Launched node0(cohort_run_sh(node("0"), waits));
  node0.read_lines(1);
  Launched node1(cohort_run_sh(node("1"), "echo $RANK"));
  EXPECT_EQ(node1.wait().exit_code, 0);
  EXPECT_EQ(read_file(logs + "/rank1.stdout.log"), "1\n");
  expect_refused({"--log-dir", logs});
  node0.send(SIGKILL);
  node0.wait();
  Launched next(cohort_run_sh({"--log-dir", logs}, "echo next"));
  EXPECT_EQ(next.wait().exit_code, 0);
}

TEST(RunTest, AJobOfFewerRanksRemovesTheLogsOfTheOthers) {
  const TemporaryFolder logs;
  const std::string script = "echo $RANK; : > $COHORT_LOG_DIR/notes.$RANK";
  Launched first(cohort_run_sh({"--nproc-per-node", "3", "--log-dir", logs.path()}, script));
  EXPECT_EQ(first.wait().exit_code, 0);
  for (const std::string name : {"rank2.error.json", "rank11.trace", "rank11.trace.stack",
                                 "rank2.stdout.log.gz", "rank.trace", "rank02.trace"})
    std::ofstream(logs.path() + "/" + name).flush();
  Launched second(cohort_run_sh({"--nproc-per-node", "2", "--log-dir", logs.path()}, "echo $RANK"));
  EXPECT_EQ(second.wait().exit_code, 0);
  const Lines names = logs.names();
  const auto has = [&](const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  for (const std::string name : {"rank2.stdout.log", "rank2.stderr.log", "rank2.error.json",
                                 "rank11.trace", "rank11.trace.stack"})
    EXPECT_FALSE(has(name)) << name;
  for (const std::string name : {"rank0.stdout.log", "rank1.stdout.log", "rank1.stderr.log",
                                 "notes.2", "rank2.stdout.log.gz", "rank.trace", "rank02.trace"})
    EXPECT_TRUE(has(name)) << name;
}

TEST(RunTest, AFolderOfLogsThatCannotBeMadeIsNamed) {
  const TemporaryFolder folder;
  const std::string logs = folder.path() + "/" + std::string(300, 'x');
  Launched run(cohort_run_sh({"--log-dir", logs}, "true"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_EQ(ended.err, "cohort run: error: --log-dir " + logs +
                           ": expected a folder that can be made, got File name too long\n");
}

TEST(RunTest, LinesThatARankForcesAreShown) {
  Launched run(
      cohort_run_sh({"--nproc-per-node", "3"},
                    "printf \"[rank $RANK] \"; echo forced; echo ' [rank 1] no'; echo '[rank 2]'; "
                    "echo '[rank 0] of another'; [ $RANK != 2 ] || printf '[rank 2] last' >&2"));
  const Ended ended = run.wait();
  EXPECT_EQ(sorted_lines(ended.out),
            (Lines{" [rank 1] no", "[rank 0] forced", "[rank 0] of another", "[rank 1] forced",
                   "[rank 2]", "[rank 2] forced"}));
  EXPECT_EQ(ended.err, "[rank 2] last\n");
}

TEST(RunTest, TheFreshLogFolderGoesWhenAllSucceed) {
  Launched run(cohort_run_sh({}, "test -d $COHORT_LOG_DIR && echo $COHORT_LOG_DIR"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(ended.out.find(run.temporary().path() + "/cohort-"), 0U) << ended.out;
  EXPECT_EQ(run.temporary().names(), Lines{});
}

TEST(RunTest, TeeNoneShowsNothing) {
  Launched run(cohort_run_sh({"--tee", "none"}, "echo out; echo err >&2"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(ended.out + ended.err, "");
}

TEST(RunTest, TeeAllWritesWholeLines) {
  Launched run(cohort_run_sh({"--nproc-per-node", "2", "--tee", "all"},
                             "printf a; printf b; echo; printf 'no end'"));
  EXPECT_EQ(sorted_lines(run.wait().out),
            (Lines{"[rank 0] ab", "[rank 0] no end", "[rank 1] ab", "[rank 1] no end"}));
}

TEST(RunTest, TorchrunsNumbersChooseStreams) {
  const std::string script = "echo out; echo err >&2";
  Launched some(cohort_run_sh({"--nproc-per-node", "2", "--tee", "0:1,1:2"}, script));
  const Ended chosen = some.wait();
  EXPECT_EQ(chosen.out, "[rank 0] out\n");
  EXPECT_EQ(chosen.err, "[rank 1] err\n");
  Launched less(cohort_run_sh({"--nproc-per-node", "2", "--redirects", "1"}, script));
  const Ended redirected = less.wait();
  EXPECT_EQ(redirected.out, "");
  EXPECT_EQ(redirected.err, "err\n");
}

TEST(RunTest, WorkersCanBeCountedByCores) {
  const auto world_of = [](const std::string& count) {
    Launched run(cohort_run_sh({"--nproc-per-node", count}, "echo $WORLD_SIZE"),
                 {"CUDA_VISIBLE_DEVICES=0,1,2,3,4"});
    const Ended ended = run.wait();
    return ended.out + ended.err;
  };
  const std::string cores = std::to_string(usable_cores().size()) + "\n";
  EXPECT_EQ(world_of("cpu"), cores);
  EXPECT_EQ(world_of("auto"), cores) << "whatever GPUs there are";
  EXPECT_EQ(world_of("many"),
            "cohort run: error: --nproc-per-node: expected a number, auto, cpu or gpu, got many\n");
}

TEST(RunTest, WorkersCanBeCountedByGpus) {
  const auto run_with = [](const std::string& visible) {
    Launched run(cohort_run_sh({"--nproc-per-node", "gpu"}, "echo $WORLD_SIZE"), {visible});
    return run.wait();
  };
  EXPECT_EQ(run_with("CUDA_VISIBLE_DEVICES=0,2,5").out, "3\n");
  EXPECT_EQ(run_with("CUDA_VISIBLE_DEVICES=1,-1,0").out, "1\n") << "CUDA's rule";
  EXPECT_EQ(run_with("CUDA_VISIBLE_DEVICES=").out, "") << "none is visible";
  const Ended none = run_with("CUDA_VISIBLE_DEVICES=-1");
  EXPECT_EQ(none.out, "");
  EXPECT_EQ(none.err,
            "cohort run: error: --nproc-per-node gpu: expected a GPU on this node, got none: "
            "CUDA_VISIBLE_DEVICES=-1\n");
}

TEST(RunTest, EachWorkerHasCoresOfItsOwn) {
  const int num_workers = static_cast<int>(usable_cores().size());
  Launched run(cohort_run_sh({"--nproc-per-node", "cpu", "--bind-cores", "cores", "--tee", "all"},
                             "taskset -cp $$ | sed 's/.*: //'; echo threads $OMP_NUM_THREADS"),
               {"OMP_NUM_THREADS="});
  const Ended ended = run.wait();
  Lines expected;
  for (int rank = 0; rank < num_workers; ++rank) {
    const std::string prefix = "[rank " + std::to_string(rank) + "] ";
    const int core = usable_cores()[static_cast<size_t>(rank)];
    expected.push_back(prefix + std::to_string(core));
    expected.push_back(prefix + "threads 1");
  }
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(sorted_lines(ended.out), expected);
  EXPECT_EQ(ended.err.find("cohort run: " + std::to_string(num_workers) + " worker"), 0U)
      << ended.err;
  EXPECT_NE(ended.err.find(" 1 thread each, cores "), std::string::npos) << ended.err;
}

TEST(RunTest, TooFewCoresToBindAreAnError) {
  const std::string many = std::to_string(usable_cores().size() + 1);
  Launched run(cohort_run_sh({"--nproc-per-node", many, "--bind-cores", "cores"}, "echo started"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_EQ(ended.out, "");
  EXPECT_EQ(ended.err.find("cohort run: error: --bind-cores cores: expected a core for each"), 0U);
}

TEST(RunTest, ANumberThatIsTooLargeIsNoWordButTooLarge) {
  for (const std::string given : {"1000001", "2000000", "-0.5"}) {
    Launched seconds(cohort_run_sh({"--grace=" + given}, "true"));
    EXPECT_EQ(
        seconds.wait().err,
        "cohort run: error: --grace: expected seconds from 0 to 1000000, got " + given + "\n");
  }
  Launched run(cohort_run_sh({"--max-restarts", "99999999999"}, "true"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_NE(ended.err.find("--max-restarts 99999999999: expected a smaller number"),
            std::string::npos)
      << ended.err;
}

TEST(RunTest, ATimeLimitOfARendezvousNeedsOne) {
  Launched run(cohort_run_sh({"--rdzv-timeout", "30"}, "true"));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_EQ(ended.err.find("cohort run: error: --rdzv-timeout: expected --rdzv-endpoint"), 0U)
      << ended.err;
}

TEST(RunTest, TorchrunsOtherFlagsAreAccepted) {
  Launched run(cohort_run_sh(
      {"--standalone", "--nnodes=1", "--nproc-per-node=2", "--no-python", "--max_restarts=3",
       "--rdzv_id", "job", "--rdzv-backend=c10d", "--interface=lo"},
      "echo $TORCHELASTIC_RUN_ID $TORCHELASTIC_MAX_RESTARTS "
      "$TORCHELASTIC_RESTART_COUNT $GLOO_SOCKET_IFNAME"));
  EXPECT_EQ(run.wait().out, "job 3 0 lo\n");
  // For several jobs of one node on a host.
  Launched any(cohort_run_sh({"--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"},
                             "echo $WORLD_SIZE"));
  EXPECT_EQ(any.wait().out, "1\n");
  Launched several(cohort_run_sh({"--nnodes=2", "--rdzv-endpoint=localhost:0"}, "true"));
  const Ended ended = several.wait();
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_NE(ended.err.find("a port from 1 to 65535, got localhost:0"), std::string::npos)
      << ended.err;
}

TEST(RunTest, Rank0AloneInheritsTheListeningSocketAndNobodyMore) {
  Launched run(
      cohort_run({"--nproc-per-node", "2", "--tee", "all"}, {this_program(), "--worker", "store"}));
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_EQ(sorted_lines(ended.out), (Lines{"[rank 0] rank 0 listens on MASTER_PORT, 0 others",
                                            "[rank 1] rank 1 has none, 0 others"}));
}

TEST(RunTest, FreePortsDifferAndAPortInUseIsRefused) {
  Launched first(cohort_run_sh({}, "echo $MASTER_PORT; exec sleep 1000"));
  std::string port = first.read_lines(1);
  port.pop_back();
  Launched second(cohort_run_sh({}, "echo $MASTER_PORT"));
  EXPECT_NE(second.wait().out, port + "\n");
  for (const Lines& more : {Lines{}, Lines{"--nnodes", "2", "--master-addr", "127.0.0.1"}}) {
    Lines flags{"--master-port", port};
    flags.insert(flags.end(), more.begin(), more.end());
    Launched third(cohort_run_sh(flags, "echo started"));
    const Ended refused = third.wait();
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_EQ(refused.out, "");
    EXPECT_EQ(refused.err, "cohort run: error: --master-port " + port +
                               ": expected a port that can be listened on, got Address already in "
                               "use\n");
  }
  first.send(SIGTERM);
  EXPECT_EQ(first.wait().exit_code, 143);
}

TEST(RunTest, AProgramThatCannotBeExecutedIsOneLine) {
  for (const char* name : {"no-such-program-here", "/no/such/program", "/etc/passwd", "/etc"}) {
    Launched run(cohort_run({"--nproc-per-node", "2"}, {name}));
    const Ended ended = run.wait();
    EXPECT_EQ(ended.exit_code, 2);
    EXPECT_EQ(ended.err.find(std::string("cohort run: error: ") + name + ": expected a program"),
              0U)
        << ended.err;
    EXPECT_EQ(sorted_lines(ended.err).size(), 1U);
    EXPECT_EQ(run.temporary().names(), Lines{});
  }
}

TEST(RunTest, TheProgramsOwnFlagsAreLeftAlone) {
  Launched run({cohort_program(), "run", "--nproc-per-node", "1", "echo", "--nnodes", "--", "-x"});
  EXPECT_EQ(run.wait().out, "--nnodes -- -x\n");
}

TEST(RunTest, Rank0HasATerminalWhereTheLauncherHas) {
  const std::string script =
      "if test -t 1; then echo terminal $RANK; stty size <&1; fi; if test -t 2; then echo also; fi";
  const std::string inner = "stty rows 31 cols 77; " + cohort_program() +
                            " run --nproc-per-node 2 -- /bin/sh -c '" + script + "'";
  Launched run({"script", "-qec", inner, "/dev/null"});
  EXPECT_EQ(run.wait().out, "terminal 0\r\n31 77\r\nalso\r\n");
}

TEST(DispatcherTest, AnUnknownCommandNamesTheKnownOnes) {
  Launched run({cohort_program(), "bogus"});
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_EQ(ended.err.find("cohort: error: unknown command 'bogus': expected one of run"), 0U)
      << ended.err;
}

TEST(DispatcherTest, NoCommandNamesTheKnownOnes) {
  Launched run({cohort_program()});
  const Ended ended = run.wait();
  EXPECT_EQ(ended.exit_code, 2);
  EXPECT_EQ(ended.err.find("cohort: error: no command: expected one of run"), 0U) << ended.err;
}

TEST(DispatcherTest, HelpAndVersionSucceed) {
  for (const Lines& words : {Lines{"--help"}, Lines{"--version"}, Lines{"run", "--help"}}) {
    Lines command{cohort_program()};
    command.insert(command.end(), words.begin(), words.end());
    Launched run(command);
    const Ended ended = run.wait();
    EXPECT_EQ(ended.exit_code, 0);
    EXPECT_NE(ended.out.find("cohort"), std::string::npos);
  }
}

}  // namespace run_test
}  // namespace cohort::launch
