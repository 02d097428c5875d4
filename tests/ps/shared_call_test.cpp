// SPDX-License-Identifier: Apache-2.0
// Calls about shared memory by callers that mean harm, and answers of servers that do.
#include <cstring>
#include <fcntl.h>
#include <future>
#include <gtest/gtest.h>
#include <memory>
#include <span>
#include <string>
#include <thread>
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
  // One that holds the server's thread, and one that fills the queue.
  std::promise<void> held, go_on;
  cluster.slot(0).get()->submit({.call = Call::kStatus},
                                [&held, wait = go_on.get_future().share()](const Reply&) {
                                  held.set_value();
                                  wait.wait();
                                });
  held.get_future().wait();
  auto pushed = cluster.send(0, trainer.push(1, std::vector<uint64_t>(1'000, 1)));
  // Zeros: who reads them says that they are no message.
  const SharedMessage zeros{.area = area_.name().number, .offset = 64, .bytes = 8'000};
  EXPECT_EQ(pull(zeros, *channel).code, Code::kBusy);
  go_on.set_value();
  EXPECT_EQ(pushed.get().code, Code::kOk);
  EXPECT_EQ(pull(zeros, *channel).code, Code::kInvalid);
}

TEST_F(SharedCallTest, TrainersAndServersOfOtherFormatsAreRefusedAtJoin) {
  EXPECT_EQ(
      join_with_format(unix_endpoint(), 0),
      "join: this server's messages are of format 1, the trainer's of format 0: expected both "
      "of one version of Cohort");
  EXPECT_EQ(join_with_format(unix_endpoint(), kFormat).find("format"), std::string::npos);
  const std::string endpoint = "unix:" + cluster_.path("older");
  const FalseServer older(endpoint, "");
  const auto channel = make_rpc_channel({.endpoint = endpoint});
  const Reply reply = ask(*channel, {.call = Call::kJoin});
  EXPECT_EQ(reply.code, Code::kInvalid);
  EXPECT_EQ(
      reply.text,
      "join: this trainer's messages are of format 1, the server's of format 0: expected both "
      "of one version of Cohort");
  EXPECT_EQ(ask(*channel, {.call = Call::kStatus}).code, Code::kOk) << "of any version";
}

}  // namespace shared_call_test
}  // namespace cohort::ps
