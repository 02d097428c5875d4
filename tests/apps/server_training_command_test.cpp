// SPDX-License-Identifier: Apache-2.0
// `cohort nmt train --strategy ps-sync` as a user runs it.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <signal.h>
#include <thread>

#include "tests/apps/nmt_command.h"

namespace server_training_command_test {

using cohort::test::bin;
using cohort::test::contents;
using cohort::test::Ended;
using cohort::test::lines_of;
using cohort::test::shell;
using cohort::test::workers_of;
using Clock = std::chrono::steady_clock;

class ServerTrainingCommandTest : public cohort::test::NmtCommand {
 protected:
  Ended run(const std::string& launch, const std::string& flags) const {
    return shell(bin("cohort") + " run " + launch + " -- " + bin("cohort-nmt") + " " + flags +
                 "--precision float32 --clip-norm 0 ");
  }
  Ended train(const std::string& launch, const std::string& name, const std::string& more) const {
    return run(launch, train_flags(name) + more + " ");
  }
  // Those of the record whose lines are whole.
  std::vector<nlohmann::json> rows(const std::string& name, const std::string& type) const {
    std::vector<nlohmann::json> found;
    for (const std::string& line : lines_of(contents(path(name + "/history.jsonl")))) {
      auto row = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (!row.is_discarded() && row["type"] == type) found.push_back(std::move(row));
    }
    return found;
  }
  nlohmann::json last_valid(const std::string& name) const {
    const auto lines = rows(name, "valid");
    return lines.at(lines.size() - 1);
  }
  double valid_loss(const std::string& name) const { return last_valid(name).at("valid_loss"); }
  // Rank 0's last update in the record; 0: none.
  int64_t updates(const std::string& name) const {
    const auto lines = rows(name, "train");
    return lines.empty() ? 0 : lines.back().at("update").get<int64_t>();
  }
  // Whether the record comes to that update in a minute.
  bool comes_to(const std::string& name, int64_t update) const {
    const auto deadline = Clock::now() + std::chrono::seconds(60);
    while (updates(name) < update) {
      if (Clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return true;
  }
  // Whether the run has saved what it can resume from, as it soon does.
  bool saves(const std::string& name) const {
    const auto deadline = Clock::now() + std::chrono::seconds(60);
    while (!std::filesystem::exists(path(name) + "/last")) {
      if (Clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return true;
  }
  // The trainer of that rank; 0: there is none.
  pid_t trainer(const std::string& rank) const {
    for (const auto& [pid, found] : workers_of(path("logs"))) {
      const std::string command = contents("/proc/" + std::to_string(pid) + "/cmdline");
      if (found == rank && command.find("cohort-nmt") != std::string::npos &&
          command.find("--strategy") != std::string::npos)
        return pid;
    }
    return 0;
  }
  void expect_refused(const Ended& ended, const std::string& text) const {
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_NE(ended.output.find(text), std::string::npos) << ended.output << "expected: " << text;
  }
};

TEST_F(ServerTrainingCommandTest, TrainsThroughServersAsDdpDoes) {
  const std::string servers = "--servers 1 --trainers 2";
  const std::string updates = "--after-batches 8 ";
  const Ended ddp = train("--nproc-per-node 2", "ddp", updates);
  ASSERT_EQ(ddp.code, 0) << ddp.output;
  const Ended sync = train(servers, "sync", updates + "--strategy ps-sync");
  ASSERT_EQ(sync.code, 0) << sync.output;
  // Float32, rounded otherwise in 8 updates: tests/translate/server_updater_test.cpp.
  EXPECT_NEAR(valid_loss("sync"), valid_loss("ddp"), 1.2e-4);
  EXPECT_EQ(nlohmann::json::parse(contents(path("sync/config.json")))["strategy"], "ps-sync");

  // Such a run does not resume without servers: last/ has no moments.
  expect_refused(train("--nproc-per-node 2", "sync", updates), "a run through parameter servers");
}

// Gradients come late and in any order: it learns most of what ddp learns in as many updates.
TEST_F(ServerTrainingCommandTest, AsyncLearnsNearlyAsMuchAsDdp) {
  const std::string flags = "--valid-on-start --valid-freq 50u --after-batches 100 ";
  const Ended ddp = train("--nproc-per-node 2", "ddp", flags);
  ASSERT_EQ(ddp.code, 0) << ddp.output;
  const Ended async = train("--servers 1 --trainers 2", "async", flags + "--strategy ps-async");
  ASSERT_EQ(async.code, 0) << async.output;
  const double untrained = rows("async", "valid").at(0).at("valid_loss");
  EXPECT_LT(valid_loss("ddp"), 0.7 * untrained);
  EXPECT_NEAR(valid_loss("async"), valid_loss("ddp"), 0.3 * (untrained - valid_loss("ddp")));
  EXPECT_EQ(rows("async", "valid").size(), 3U) << "of all trainers at updates 0, 50 and 100";
  const auto train_loss = [&](const std::string& name) {
    return last_valid(name).at("train_loss").get<double>();
  };
  EXPECT_NEAR(train_loss("async"), train_loss("ddp"), 0.3 * train_loss("ddp"));
}

// Where the score stands still, and at the ends of epochs.
TEST_F(ServerTrainingCommandTest, AsyncTrainersValidateAndStopTogether) {
  const std::string servers = "--servers 1 --trainers 3";
  const Ended early = run(servers, standing_still("early") +
                                       "--strategy ps-async --valid-freq 3u --early-stopping 2 "
                                       "--after-epochs 50 ");
  EXPECT_EQ(early.code, 0) << early.output;
  EXPECT_NE(early.output.find("no better bleu in 2 validations"), std::string::npos)
      << early.output;
  EXPECT_EQ(last_valid("early").at("update"), 9);
  const Ended epochs =
      train(servers, "epochs", "--strategy ps-async --valid-freq 2e --after-epochs 5");
  EXPECT_EQ(epochs.code, 0) << epochs.output;
  std::vector<int64_t> validated;
  for (const auto& row : rows("epochs", "valid")) validated.push_back(row.at("epoch"));
  EXPECT_EQ(validated, (std::vector<int64_t>{2, 4, 5}));
}

// A third of its rate before, for the machine may have other work.
TEST_F(ServerTrainingCommandTest, AStoppedTrainerDoesNotHoldUpTheOther) {
  Ended ended;
  std::thread running([&] {
    ended = train("--servers 1 --trainers 2 --stall-timeout 5 --log-dir " + path("logs"), "run",
                  "--strategy ps-async --time-limit 0.5 --valid-freq 1000000u --early-stopping 0 "
                  "--disp-freq 1u");
  });
  const bool begun = comes_to("run", 40);
  const pid_t stopped = begun ? trainer("1") : 0;
  bool goes_on = false;
  if (stopped != 0) {
    kill(stopped, SIGSTOP);
    // Longer than --stall-timeout, and more updates than can wait for an answer.
    std::this_thread::sleep_for(std::chrono::seconds(10));
    goes_on = comes_to("run", updates("run") + 40);
    kill(stopped, SIGCONT);
  }
  running.join();
  ASSERT_NE(stopped, 0) << ended.output;
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find("reached the time limit"), std::string::npos) << ended.output;
  EXPECT_EQ(ended.output.find("stalled"), std::string::npos) << ended.output;
  EXPECT_TRUE(goes_on) << ended.output;
  EXPECT_EQ(rows("run", "valid").size(), 1U) << "all trainers validate at the end";
}

TEST_F(ServerTrainingCommandTest, AnAsyncTrainerThatIsAskedToStopTellsTheOthers) {
  Ended ended;
  std::thread running([&] {
    ended = train("--servers 1 --trainers 2 --log-dir " + path("logs"), "run",
                  "--strategy ps-async --after-batches 1000000 --valid-freq 1000000u "
                  "--early-stopping 0 --disp-freq 1u");
  });
  const bool begun = comes_to("run", 20);
  const pid_t asked = begun ? trainer("1") : 0;
  if (asked != 0) {
    kill(asked, SIGTERM);
  } else {
    for (const auto& [pid, rank] : workers_of(path("logs"))) kill(pid, SIGKILL);
  }
  running.join();
  ASSERT_NE(asked, 0) << ended.output;
  EXPECT_EQ(ended.code, 4) << ended.output;
  EXPECT_NE(ended.output.find("asked to stop by a signal"), std::string::npos) << ended.output;
  EXPECT_FALSE(rows("run", "end").empty());
}

// Of all trainers' last checkpoint, whose bits they are.
std::string weights_of(const std::string& run) {
  std::string all;
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(run + "/last"))
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path().string());
  std::sort(files.begin(), files.end());
  for (const std::string& file : files) all += contents(file);
  EXPECT_FALSE(all.empty()) << run;
  return all;
}

// Killed twice, at updates that no checkpoint is of.
TEST_F(ServerTrainingCommandTest, KilledTrainersGoOnWithTheSameBits) {
  const std::string flags =
      "--strategy ps-sync --after-batches 160 --valid-freq 60u --save-freq 0.005 --disp-freq 1u "
      "--early-stopping 0 --exponential-smoothing 0.1 ";
  const Ended calm = train("--servers 2 --trainers 2", "calm", flags);
  ASSERT_EQ(calm.code, 0) << calm.output;
  Ended ended;
  std::thread running([&] {
    ended =
        train("--servers 2 --trainers 2 --max-restarts 2 --log-dir " + path("logs"), "run", flags);
  });
  int64_t update = 7;
  for (const char* rank : {"1", "0"}) {
    const pid_t killed = comes_to("run", update) && saves("run") ? trainer(rank) : 0;
    EXPECT_NE(killed, 0) << rank;
    if (killed != 0) kill(killed, SIGKILL);
    update = updates("run") + 10;  // To which no trainer comes without the one that was killed.
  }
  running.join();
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_NE(ended.output.find("restart 2 of 2"), std::string::npos) << ended.output;
  EXPECT_TRUE(weights_of(path("run")) == weights_of(path("calm")));
  EXPECT_EQ(last_valid("run").at("valid_loss"), last_valid("calm").at("valid_loss"));
}

// Other servers, which hold nothing: a number of their own, too.
TEST_F(ServerTrainingCommandTest, TheSameCommandGoesOnWithTheSameBits) {
  const std::string flags =
      "--strategy ps-sync --valid-freq 15u --disp-freq 1u --early-stopping 0 --after-batches ";
  const Ended calm = train("--servers 2 --trainers 2", "calm", flags + "30 ");
  ASSERT_EQ(calm.code, 0) << calm.output;
  const Ended begun = train("--servers 2 --trainers 2", "run", flags + "11 ");
  ASSERT_EQ(begun.code, 0) << begun.output;
  const Ended goes_on = train("--servers 3 --trainers 2", "run", flags + "30 ");
  ASSERT_EQ(goes_on.code, 0) << goes_on.output;
  EXPECT_TRUE(weights_of(path("run")) == weights_of(path("calm")));
  expect_refused(train("--nproc-per-node 2", "run", "--after-batches 40 "),
                 "a run through parameter servers, which have its moments: expected --strategy");
}

// A file in the way of the servers' checkpoint.
TEST_F(ServerTrainingCommandTest, ALastSaveThatServersCannotMakeIsAnError) {
  for (const std::string strategy : {"ps-sync", "ps-async"}) {
    const std::string flags = "--strategy " + strategy + " --save-freq 0 --after-batches ";
    ASSERT_EQ(train("--servers 1 --trainers 2", strategy, flags + "2").code, 0);
    for (const int update : {3, 4, 5})
      std::ofstream(path(strategy + "/servers/update-" + std::to_string(update))) << "in the way";
    const Ended ended = train("--servers 1 --trainers 2", strategy, flags + "4");
    EXPECT_EQ(ended.code, 1) << strategy << ended.output;
    EXPECT_NE(ended.output.find("a checkpoint was not written"), std::string::npos) << ended.output;
    const auto manifest = nlohmann::json::parse(contents(path(strategy + "/last/manifest.json")));
    EXPECT_EQ(manifest["facts"]["update"], "2") << strategy;
  }
}

TEST_F(ServerTrainingCommandTest, AnAsyncRunGoesOn) {
  const std::string flags =
      "--strategy ps-async --valid-freq 10u --disp-freq 1u --early-stopping 0 --after-batches ";
  const Ended begun = train("--servers 1 --trainers 2", "run", flags + "10 ");
  ASSERT_EQ(begun.code, 0) << begun.output;
  const double before = valid_loss("run");
  const Ended goes_on = train("--servers 1 --trainers 2", "run", flags + "40 ");
  ASSERT_EQ(goes_on.code, 0) << goes_on.output;
  EXPECT_EQ(last_valid("run").at("update"), 40);
  EXPECT_LT(valid_loss("run"), before);
}

TEST_F(ServerTrainingCommandTest, WhatServersCannotDoIsRefused) {
  const std::string servers = "--servers 1 --trainers 2";
  for (const std::string alone : {" --restart-policy single", " --on-trainer-loss continue"})
    expect_refused(train(servers + alone, "r", "--strategy ps-sync"),
                   "are for trainers of servers without a process group");
  expect_refused(train(servers, "r", "--strategy ps-sync --cpu-offload"),
                 "--cpu-offload: this run computes");
  expect_refused(train(servers, "r", "--strategy ps-sync --tensor-parallel 2"),
                 "--tensor-parallel: expected none with --strategy ps-sync");
  expect_refused(train(servers, "r", "--strategy ps-async --exponential-smoothing 0.1"),
                 "--exponential-smoothing: expected none with --strategy ps-async");
  const std::string authority = "--tls-authority " + path("missing.pem");
  expect_refused(train(servers, "r", "--strategy ps-sync " + authority),
                 "missing.pem: expected the authority's certificate in PEM form");
  expect_refused(train("--nproc-per-node 1", "r", authority),
                 "expected --strategy ps-sync or ps-async");
  expect_refused(train("--nproc-per-node 2", "r", "--strategy ps-sync"),
                 "cohort run --servers N --trainers M");
}

}  // namespace server_training_command_test
