// SPDX-License-Identifier: Apache-2.0
// What is decided about a request before a server's own thread sees it.
#include "cohort/ps/server/arrival_check.h"

#include <chrono>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <utility>

#include "cohort/base/log.h"
#include "cohort/ps/server/request_handler.h"

#include "tests/support/message_of.h"

namespace cohort::ps {
namespace arrival_check_test {

using cohort::test::message_of;

const JobOptions kJob{.mode = Mode::kAsync, .tables = {{.name = "rows", .width = 2}}};

// As trainer 0's first process pushes to a server's first start. Wrong: of a table that is not
// there.
Request push_of(uint64_t sequence, bool is_wrong = false) {
  const SectionShape shape{.table = is_wrong ? 1u : 0u, .width = 2, .count = 1};
  MessageWriter writer({&shape, 1});
  writer.ids(0)[0] = 7;
  writer.values(0)[0] = writer.values(0)[1] = 1;
  return {.call = Call::kPush,
          .message = std::make_shared<const Buffer>(writer.finish({.job = kJob.fingerprint(),
                                                                   .trainer_incarnation = 1,
                                                                   .server_incarnation = 1,
                                                                   .sequence = sequence}))};
}

// A server without its thread.
class ArrivalCheckTest : public testing::Test {
 protected:
  Pending arrive(const Request& request) { return handler_.arrival_check().check(request); }
  Reply handle(Pending pending) {
    Reply answer{.code = Code::kLost, .text = "no answer"};
    pending.done = [&answer](Reply reply) { answer = std::move(reply); };
    handler_.handle(std::move(pending));
    handler_.finish_batch(std::chrono::steady_clock::now());
    return answer;
  }
  Reply ask(const Request& request) { return handle(arrive(request)); }
  void begin() {
    ASSERT_EQ(ask({.call = Call::kJob, .trainer = 0, .text = kJob.to_json()}).code, Code::kOk);
    ASSERT_EQ(ask({.call = Call::kJoin, .trainer = 0, .job = kJob.fingerprint()}).code, Code::kOk);
  }

 private:
  const Log log_{{.console = LogConsole::kNever}};
  RequestHandler handler_{{.durability = Durability::kApplied, .save_root = "/only/here"}, log_};
};

// Nothing has checked it: it must not be applied, however well its header fits.
TEST_F(ArrivalCheckTest, AMessageThatArrivedBeforeTheJobIsToBeSentAgain) {
  const Pending early = arrive(push_of(1)), wrong = arrive(push_of(1, /*is_wrong=*/true));
  EXPECT_EQ(early.job, nullptr);
  EXPECT_EQ(handle(early).text, "the server has no job yet");
  begin();
  for (const Pending& pending : {early, wrong}) {
    const Reply answer = handle(pending);
    EXPECT_EQ(answer.code, Code::kRestarted);
    EXPECT_EQ(answer.text, "the server had no job yet when the message arrived");
  }
  EXPECT_EQ(ask(push_of(1)).code, Code::kOk);
}

TEST_F(ArrivalCheckTest, WhoSentAMessageComesBeforeWhatIsWrongWithIt) {
  ASSERT_EQ(ask({.call = Call::kJob, .trainer = 0, .text = kJob.to_json()}).code, Code::kOk);
  const Request wrong = push_of(1, /*is_wrong=*/true);
  const std::string text = "message: the job has 1 tables, got number 1";
  EXPECT_EQ(arrive(wrong).mismatch, text);
  EXPECT_EQ(ask(wrong).text, "trainer 0 has not joined");
  begin();
  const Reply answer = ask(wrong);
  EXPECT_EQ(answer.code, Code::kInvalid);
  EXPECT_EQ(answer.text, text);
}

TEST_F(ArrivalCheckTest, ControlRequestsAreHeldToTheirForm) {
  begin();
  const auto mismatch = [&](const Request& request) { return arrive(request).mismatch; };
  EXPECT_EQ(mismatch({.call = Call::kStatus}), "");
  EXPECT_EQ(mismatch({.call = static_cast<Call>(99)}), "unknown call 99");
  EXPECT_NE(mismatch({.call = Call::kJob, .text = "{"}), "");
  EXPECT_EQ(mismatch({.call = Call::kSave, .text = "/only/here/a"}),
            "save: expected a folder and a nonce");
  EXPECT_EQ(mismatch({.call = Call::kSave, .nonce = 1, .text = "/only/here/a"}), "");
  for (const Call call : {Call::kSave, Call::kFinishSave}) {
    EXPECT_EQ(mismatch({.call = call, .nonce = 1, .text = "/only/here/../a"}),
              "save: /only/here/../a: expected a folder below /only/here (--save-root)");
  }
  const uint64_t job = kJob.fingerprint();
  EXPECT_EQ(mismatch({.call = Call::kRestore, .job = job, .text = "/a"}),
            "restore: /a: expected a folder below /only/here (--save-root)");
  EXPECT_EQ(mismatch({.call = Call::kRestore, .job = 1}), "restore: the job is another one");
  EXPECT_EQ(mismatch({.call = Call::kJoin, .trainer = 4096, .job = job}),
            "join: trainer 4096: expected a number below max_trainers, 4096");
  EXPECT_EQ(mismatch({.call = Call::kJoin, .trainer = 1, .job = 1}),
            "job: this server has another one");
  EXPECT_EQ(ask({.call = Call::kJoin, .trainer = 1, .job = 1}).code, Code::kInvalid);
}

// It would only take place in the queue.
TEST_F(ArrivalCheckTest, WhatIsNoMessageOfItsCallIsNotTaken) {
  const auto refusal = [&](const Request& request) {
    return message_of<c10::ValueError>([&] { arrive(request); });
  };
  EXPECT_EQ(refusal({.call = Call::kPush}), "message: there is none");
  Request pull = push_of(1);
  pull.call = Call::kPull;
  EXPECT_EQ(refusal(pull), "message: it is of another kind than its call");
}

}  // namespace arrival_check_test
}  // namespace cohort::ps
