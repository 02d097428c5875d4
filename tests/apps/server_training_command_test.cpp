// `cohort nmt train --strategy ps-sync` as a user runs it.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/apps/nmt_command.h"

namespace {

using cohort::test::bin;
using cohort::test::contents;
using cohort::test::Ended;
using cohort::test::lines_of;
using cohort::test::shell;

class ServerTrainingCommandTest : public cohort::test::NmtCommand {
 protected:
  Ended train(const std::string& launch, const std::string& name, const std::string& more) const {
    return shell(bin("cohort") + " run " + launch + " -- " + bin("cohort-nmt") + " " +
                 train_flags(name) + "--precision float32 --clip-norm 0 --after-batches 8 " + more);
  }
  double valid_loss(const std::string& name) const {
    nlohmann::json found;
    for (const std::string& line : lines_of(contents(path(name + "/history.jsonl")))) {
      const auto row = nlohmann::json::parse(line);
      if (row["type"] == "valid") found = row;
    }
    return found.at("valid_loss");
  }
  void expect_refused(const Ended& ended, const std::string& text) const {
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_NE(ended.output.find(text), std::string::npos) << ended.output << "expected: " << text;
  }
};

TEST_F(ServerTrainingCommandTest, TrainsThroughServersAsDdpDoes) {
  const std::string servers = "--servers 1 --trainers 2";
  const Ended ddp = train("--nproc-per-node 2", "ddp", "");
  ASSERT_EQ(ddp.code, 0) << ddp.output;
  const Ended sync = train(servers, "sync", "--strategy ps-sync");
  ASSERT_EQ(sync.code, 0) << sync.output;
  // Float32, rounded otherwise in 8 updates: tests/translate/server_updater_test.cpp.
  EXPECT_NEAR(valid_loss("sync"), valid_loss("ddp"), 1.2e-4);
  EXPECT_EQ(nlohmann::json::parse(contents(path("sync/config.json")))["strategy"], "ps-sync");

  const Ended async = train(servers, "async", "--strategy ps-async");
  ASSERT_EQ(async.code, 0) << async.output;
  EXPECT_NEAR(valid_loss("async"), valid_loss("ddp"), 0.5) << "it learns, by another way";

  // The moments went with the servers: nobody goes on with such a run.
  expect_refused(train(servers, "sync", "--strategy ps-sync"), "--overwrite");
  expect_refused(train("--nproc-per-node 2", "sync", ""), "a run through parameter servers");
}

TEST_F(ServerTrainingCommandTest, WhatServersCannotDoIsRefused) {
  const std::string servers = "--servers 1 --trainers 2";
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

}  // namespace
