// SPDX-License-Identifier: Apache-2.0
// Calls about shared memory by callers that mean harm, and answers of servers that do.
#include <cstddef>
#include <cstring>
#include <future>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cohort/ps/rpc/hot_reply.h"
#include "cohort/ps/rpc/rpc_channel.h"
#include "cohort/ps/rpc/rpc_server.h"
#include "cohort/ps/rpc/shared_area.h"

#include "tests/ps/cluster.h"
#include "tests/ps/shared_calls.h"

namespace cohort::ps {
namespace shared_call_test {

constexpr uint64_t kBytes = 1 << 16;
constexpr uint64_t kChannel = 7;

Reply ask(Channel& channel, const Request& request) {
  auto promise = std::make_shared<std::promise<Reply>>();
  auto answer = promise->get_future();
  channel.send(request, 20'000, [promise](Reply reply) { promise->set_value(std::move(reply)); });
  return answer.get();
}

// A pull of a few rows, which goes through a socket.
Request small_pull(const RawTrainer& trainer) {
  return trainer.pull(std::vector<uint64_t>{1, 2, 3}, 0);
}

// A server at a unix socket and at a port, and a trainer that offers memory of its own.
class SharedCallTest : public testing::Test {
 protected:
  std::string unix_endpoint() const { return "unix:" + cluster_.path("socket"); }
  std::string tcp_endpoint() const { return "127.0.0.1:" + std::to_string(tcp_.port()); }

  // Writes `request`'s message to the area, at its first part.
  SharedMessage write(const Request& request) {
    const auto bytes = request.message->span();
    std::memcpy(area_.part(64, bytes.size())->data(), bytes.data(), bytes.size());
    return {.area = area_.name().number, .offset = 64, .bytes = bytes.size()};
  }
  // What a pull is answered that says where its message is.
  static Reply pull(const SharedMessage& shared, Channel& channel) {
    Buffer bytes(sizeof(shared));
    std::memcpy(bytes.data(), &shared, sizeof(shared));
    return ask(channel,
               {.call = Call::kPull, .message = std::make_shared<const Buffer>(std::move(bytes))});
  }
  Reply pull(const SharedMessage& shared) { return pull(shared, *channel_); }
  // The trainer's rows, which a server has that continues.
  void expect_it_continues() {
    EXPECT_EQ(ask(*channel_, small_pull(trainer_)).code, Code::kOk) << "it continues";
  }

  Cluster cluster_{1};
  const RpcServer rpc_{*cluster_.slot(0).get(), {.endpoint = unix_endpoint()}};
  const RpcServer tcp_{*cluster_.slot(0).get(), {}};
  RawTrainer trainer_{cluster_, ledger_job(1, 1, Mode::kAsync), 0};
  const std::unique_ptr<Channel> channel_ = make_rpc_channel({.endpoint = unix_endpoint()});
  const SharedArea area_{kBytes};
};

TEST_F(SharedCallTest, MemoryIsTakenOverAUnixSocketAlone) {
  EXPECT_EQ(offer(tcp_endpoint(), kChannel, area_.name()),
            "memory is shared over a unix socket without TLS alone");
  EXPECT_EQ(offer(unix_endpoint(), kChannel, area_.name()), "");
}

TEST_F(SharedCallTest, WhoHasNotTheSecretSharesNothing) {
  const std::string endpoint = "unix:" + cluster_.path("secret");
  const RpcServer rpc(*cluster_.slot(0).get(),
                      {.endpoint = endpoint, .security = {.job_secret = "one"}});
  for (const char* secret : {"", "two"})
    EXPECT_EQ(offer(endpoint, kChannel, area_.name(), secret),
              "the caller does not have the job's secret (--job-secret-file, COHORT_JOB_SECRET)");
  EXPECT_EQ(offer(endpoint, kChannel, area_.name(), "one"), "");
}

TEST_F(SharedCallTest, AMessageThatIsTooLargeIsNotCopied) {
  const std::string endpoint = "unix:" + cluster_.path("small");
  const RpcServer rpc(*cluster_.slot(0).get(), {.endpoint = endpoint, .max_message_bytes = 1000});
  ASSERT_EQ(offer(endpoint, kChannel, area_.name()), "");
  const auto channel = make_rpc_channel({.endpoint = endpoint});
  const Reply reply = pull({.area = area_.name().number, .offset = 64, .bytes = 1008}, *channel);
  EXPECT_EQ(reply.code, Code::kFailed);
  EXPECT_EQ(reply.text, "message in shared memory larger than max (1008 vs. 1000)");
}

TEST_F(SharedCallTest, AMessageForAFullQueueIsNotCopied) {
  Cluster cluster(1, {.max_queue_bytes = 20'000});
  const std::string endpoint = "unix:" + cluster.path("socket");
  const RpcServer rpc(*cluster.slot(0).get(), {.endpoint = endpoint});
  RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kAsync), 0);
  ASSERT_EQ(offer(endpoint, kChannel, area_.name()), "");
  const auto channel = make_rpc_channel({.endpoint = endpoint});
  HeldServer held(*cluster.slot(0).get());
  // Fills the queue.
  auto pushed = cluster.send(0, trainer.push(1, std::vector<uint64_t>(1'000, 1)));
  // Zeros: who reads them says that they are no message.
  const SharedMessage zeros{.area = area_.name().number, .offset = 64, .bytes = 8'000};
  EXPECT_EQ(pull(zeros, *channel).code, Code::kBusy);
  held.release();
  EXPECT_EQ(pushed.get().code, Code::kOk);
  EXPECT_EQ(pull(zeros, *channel).code, Code::kInvalid);
}

TEST_F(SharedCallTest, TrainersAndServersOfOtherFormatsAreRefusedAtJoin) {
  EXPECT_EQ(
      join_with_format(unix_endpoint(), 0),
      "join: this server's messages are of format 2, the trainer's of format 0: expected both "
      "of one version of Cohort");
  EXPECT_EQ(join_with_format(unix_endpoint(), kFormat).find("format"), std::string::npos);
  const std::string endpoint = "unix:" + cluster_.path("older");
  const FalseServer older(endpoint, "");
  const auto channel = make_rpc_channel({.endpoint = endpoint});
  const Reply reply = ask(*channel, {.call = Call::kJoin});
  EXPECT_EQ(reply.code, Code::kInvalid);
  EXPECT_EQ(
      reply.text,
      "join: this trainer's messages are of format 2, the server's of format 0: expected both "
      "of one version of Cohort");
  EXPECT_EQ(ask(*channel, {.call = Call::kStatus}).code, Code::kOk) << "of any version";
}

TEST_F(SharedCallTest, AMessageOutsideItsAreaIsRefused) {
  const Request request = small_pull(trainer_);
  const SharedMessage right = write(request);
  ASSERT_EQ(offer(unix_endpoint(), kChannel, area_.name()), "");
  EXPECT_EQ(pull(right).code, Code::kOk);
  const SharedArea foreign(kBytes);
  const auto refusal = [&](const auto& change) {
    SharedMessage wrong = right;
    change(wrong);
    const Reply reply = pull(wrong);
    EXPECT_EQ(reply.code, Code::kLost);
    return reply.text;
  };
  const char* const kNone = "no such shared memory";
  EXPECT_EQ(refusal([&](auto& wrong) { wrong.area = foreign.name().number; }), kNone);
  EXPECT_EQ(refusal([](auto& wrong) { wrong.area = 0; }), kNone);
  EXPECT_EQ(refusal([](auto& wrong) { wrong.offset = 0; }), kNone);
  EXPECT_EQ(refusal([](auto& wrong) { wrong.offset = 68; }), kNone);
  EXPECT_EQ(refusal([](auto& wrong) { wrong.offset = kBytes; }), kNone);
  EXPECT_EQ(refusal([](auto& wrong) { wrong.offset = UINT64_MAX - 7; }), kNone);
  EXPECT_EQ(refusal([](auto& wrong) { wrong.bytes = kBytes; }), kNone);
  EXPECT_EQ(refusal([](auto& wrong) { wrong.bytes = UINT64_MAX - 7; }), kNone);
  expect_it_continues();
}

TEST_F(SharedCallTest, AnAnswerThatHasNoPlaceGoesThroughTheSocket) {
  const Request request = small_pull(trainer_);
  ASSERT_EQ(offer(unix_endpoint(), kChannel, area_.name()), "");
  const auto bytes = pull(write(request)).message.size();
  ASSERT_GT(bytes, 0U);
  // Outside, over the area's number, too small: nothing is written there.
  for (const auto& [offset, room] :
       std::vector<std::pair<uint64_t, uint64_t>>{{kBytes, 4096}, {0, 4096}, {4096, 8}, {8, 0}}) {
    SharedMessage shared = write(request);
    shared.answer_offset = offset;
    shared.answer_bytes = room;
    const Reply reply = pull(shared);
    EXPECT_EQ(reply.code, Code::kOk) << offset;
    EXPECT_EQ(reply.message.size(), bytes) << offset;
  }
  EXPECT_EQ(std::memcmp(area_.part(4096, 8)->data(), "\0\0\0\0\0\0\0", 8), 0);
  const SharedArea same(area_.name());  // Its number is still there.
}

TEST_F(SharedCallTest, ADamagedMessageInSharedMemoryIsRefused) {
  const Request request = small_pull(trainer_);
  ASSERT_EQ(offer(unix_endpoint(), kChannel, area_.name()), "");
  const size_t bytes = request.message->size();
  for (size_t at = 0; at < bytes; at += 5) {
    const SharedMessage shared = write(request);
    (*area_.part(64, bytes))[at] ^= std::byte{0x40};
    const Reply reply = pull(shared);
    EXPECT_EQ(reply.code, Code::kInvalid) << at;
    EXPECT_EQ(reply.text.find("message: "), 0U) << reply.text;
  }
  SharedMessage cut = write(request);
  cut.bytes -= 8;
  EXPECT_EQ(pull(cut).code, Code::kInvalid);
  cut.bytes = 0;
  EXPECT_EQ(pull(cut).code, Code::kInvalid);
  expect_it_continues();
}

// By what it says of bytes that it has written, which the trainer would read.
TEST_F(SharedCallTest, AnAnswerThatIsNotInItsPlaceIsRefused) {
  for (const uint64_t bytes : {(uint64_t{1} << 17) + 64, UINT64_MAX}) {
    const std::string endpoint = "unix:" + cluster_.path("false-" + std::to_string(bytes));
    const HotReply head{.shared_bytes = bytes};
    const FalseServer server(endpoint, {reinterpret_cast<const char*>(&head), sizeof(head)});
    const auto channel = make_rpc_channel({.endpoint = endpoint});
    Request request = small_pull(trainer_);
    for (int i = 0; i < 50; ++i) {
      request.answer_bytes = i == 0 ? 0 : size_t{1} << 17;  // The first has no place at all.
      const Reply reply = ask(*channel, request);
      EXPECT_EQ(reply.code, Code::kLost);
      EXPECT_EQ(reply.text, "its answer is damaged");
    }
  }
}

}  // namespace shared_call_test
}  // namespace cohort::ps
