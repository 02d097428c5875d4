// SPDX-License-Identifier: Apache-2.0
// What a trainer does with answers that do not fit what it asked for. Without gRPC.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cohort/ps/client/client.h"
#include "cohort/ps/id_hash.h"

#include "tests/ps/cluster.h"
#include "tests/support/message_of.h"

namespace cohort::ps {
namespace reply_test {

using cohort::test::message_of;

// Answers pulls with what `forge` makes of the server's answer, if there is a `forge`.
class ForgingChannel : public Channel {
 public:
  using Forge = std::function<void(Reply&)>;

  ForgingChannel(std::unique_ptr<Channel> channel, const Forge& forge)
      : channel_(std::move(channel)), forge_(forge) {}

  void send(const Request& request, int64_t timeout_ms, Done done) override {
    const bool forges = request.call == Call::kPull && forge_;
    channel_->send(request, timeout_ms,
                   [&forge = forge_, forges, done = std::move(done)](Reply reply) {
                     if (forges && reply.code == Code::kOk) forge(reply);
                     done(std::move(reply));
                   });
  }

 private:
  const std::unique_ptr<Channel> channel_;
  const Forge& forge_;
};

// A message of these sections, all values 9.
Buffer message_with(const std::vector<SectionShape>& shapes, const Header& header) {
  MessageWriter writer(shapes);
  for (size_t i = 0; i < shapes.size(); ++i)
    std::fill(writer.values(i).begin(), writer.values(i).end(), 9.0f);
  return writer.finish(header);
}

struct ForgedReply {
  const char* what;
  std::function<void(std::vector<SectionShape>&)> shapes;
  std::function<void(Reply&, const Header&)> reply{};
};

std::vector<ForgedReply> forged_replies() {
  using Shapes = std::vector<SectionShape>;
  const auto none = [](Shapes&) {};
  const auto cut_to = [](size_t bytes) {
    return [bytes](Reply& reply, const Header&) {
      Buffer left(bytes);
      std::memcpy(left.data(), reply.message.span().data(), bytes);
      reply.message = std::move(left);
    };
  };
  const auto with_header = [](const std::function<void(Header&)>& change) {
    return [change](Reply& reply, const Header& header) {
      Header other = header;
      change(other);
      reseal(reply.message.span(), other);
    };
  };
  return {
      {"wider rows", [](Shapes& shapes) { shapes[0].width = 4; }},
      {"much wider rows", [](Shapes& shapes) { shapes[0].width = 64; }},
      {"narrower rows", [](Shapes& shapes) { shapes[0].width = 1; }},
      {"a row less", [](Shapes& shapes) { --shapes[0].count; }},
      {"a row more", [](Shapes& shapes) { ++shapes[0].count; }},
      {"no rows", [](Shapes& shapes) { shapes[0].count = 0; }},
      {"rows without values", [](Shapes& shapes) { shapes[0].has_values = false; }},
      {"another table", [](Shapes& shapes) { shapes[0].table = 1; }},
      {"a block for rows",
       [](Shapes& shapes) {
         shapes[0].kind = SectionKind::kBlock;
         shapes[0].count *= shapes[0].width;
         shapes[0].width = 1;
       }},
      {"a shorter block", [](Shapes& shapes) { --shapes[1].count; }},
      {"a longer block", [](Shapes& shapes) { ++shapes[1].count; }},
      {"another block", [](Shapes& shapes) { ++shapes[1].table; }},
      {"a section less", [](Shapes& shapes) { shapes.pop_back(); }},
      {"a section more", [](Shapes& shapes) { shapes.push_back(shapes.back()); }},
      {"no section", [](Shapes& shapes) { shapes.clear(); }},
      {"no bytes", none, cut_to(0)},
      {"half a header", none, cut_to(40)},
      {"a header alone", none, cut_to(sizeof(Header))},
      {"no end", none, cut_to(sizeof(Header) + 24)},
      {"a damaged byte", none,
       [](Reply& reply, const Header&) { reply.message.data()[80] ^= std::byte{1}; }},
      {"a push", none, with_header([](Header& header) { header.kind = MessageKind::kPush; })},
      {"another job's", none, with_header([](Header& header) { ++header.job; })},
  };
}

// It is held against what was asked before any of it is copied.
TEST(ReplyTest, OneThatDoesNotFitIsRefusedAndWritesNothingBeyondTheBuffers) {
  for (const int servers : {1, 2}) {
    Cluster cluster(servers);
    JobOptions job = ledger_job(1, servers, Mode::kAsync);
    job.blocks = {{.parameter = "p", .begin = 0, .end = 3, .server = 0}};
    ForgingChannel::Forge forge;
    ClientOptions options{.trainer = 0, .link = quick_link()};
    for (int server = 0; server < servers; ++server) options.servers.push_back("forging");
    Client client(options, job, [&](int server) -> std::unique_ptr<Channel> {
      if (server > 0) return cluster.channel(server);
      return std::make_unique<ForgingChannel>(cluster.channel(server), forge);
    });
    const std::vector<float> initial{1, 2, 3};
    const std::span<const float> values(initial);
    client.initialise(std::span(&values, 1));
    std::vector<uint64_t> ids(8);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = i;
    const auto of_the_first =
        static_cast<uint64_t>(std::count_if(ids.begin(), ids.end(), [servers](uint64_t id) {
          return server_of(id, static_cast<uint32_t>(servers)) == 0;
        }));
    ASSERT_GE(of_the_first, 2U);
    // Both lie in front of memory that is somebody else's.
    constexpr float kElse = -7;
    constexpr size_t kRows = 16, kBlock = 3;
    std::vector<float> rows(2'000), block(2'000);
    const PullRows asked{0, ids, std::span(rows).first(kRows)};
    const auto pull = [&] {
      std::fill(rows.begin(), rows.end(), kElse);
      std::fill(block.begin(), block.end(), kElse);
      client.pull(std::span(&asked, 1), {std::span(block).first(kBlock)}).wait();
    };
    for (const ForgedReply& forged : forged_replies()) {
      forge = [&](Reply& reply) {
        Header header = parse_message(reply.message.span()).header;
        std::vector<SectionShape> shapes{
            {.table = 0, .width = 2, .count = of_the_first, .has_ids = false},
            {.kind = SectionKind::kBlock, .table = 0, .count = 3, .has_ids = false}};
        forged.shapes(shapes);
        header.num_sections = static_cast<uint32_t>(shapes.size());
        reply.message = message_with(shapes, header);
        if (forged.reply) forged.reply(reply, header);
      };
      const std::string text = message_of<c10::DistError>(pull);
      EXPECT_EQ(text.find("server 0 (forging): its answer to a pull "), 0U)
          << forged.what << ", " << servers << " servers: " << text;
      const auto is_else = [](float value) { return value == kElse; };
      EXPECT_TRUE(std::all_of(rows.begin() + kRows, rows.end(), is_else)) << forged.what;
      EXPECT_TRUE(std::all_of(block.begin() + kBlock, block.end(), is_else)) << forged.what;
    }
    forge = {};
    EXPECT_EQ(message_of<c10::Error>(pull), "nothing was thrown");
    EXPECT_EQ(block[2], 3);
    EXPECT_EQ(rows[kRows - 1], 0);
  }
}

// Refuses pushes as long as `refuses` is set.
class RefusingChannel : public Channel {
 public:
  RefusingChannel(std::unique_ptr<Channel> channel, const std::atomic<bool>& refuses)
      : channel_(std::move(channel)), refuses_(refuses) {}

  void send(const Request& request, int64_t timeout_ms, Done done) override {
    if (request.call == Call::kPush && refuses_)
      return done({.code = Code::kInvalid, .text = "not this one"});
    channel_->send(request, timeout_ms, std::move(done));
  }

 private:
  const std::unique_ptr<Channel> channel_;
  const std::atomic<bool>& refuses_;
};

// Two servers, of which the second refuses pushes at first, and a batch with rows of both.
class RefusedPushTest : public testing::Test {
 protected:
  RefusedPushTest() {
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = i;
  }

  void expect_one_push_on_the_first_server_alone() {
    client.pull(std::span(&asked, 1), {}, /*is_prediction=*/true).wait();
    for (size_t i = 0; i < ids.size(); ++i)
      EXPECT_EQ(rows[2 * i], server_of(ids[i], 2) == 0 ? 1 : 0) << "row " << ids[i];
  }

  Cluster cluster{2};
  std::atomic<bool> refuses{true};
  Client client{{.servers = {"first", "second"}, .trainer = 0, .link = quick_link()},
                ledger_job(1, 2, Mode::kAsync),
                [&](int server) -> std::unique_ptr<Channel> {
                  if (server == 0) return cluster.channel(server);
                  return std::make_unique<RefusingChannel>(cluster.channel(server), refuses);
                }};
  std::vector<uint64_t> ids = std::vector<uint64_t>(8);
  const std::vector<float> gradients = std::vector<float>(16, -1);
  const PushRows pushed{0, ids, gradients};
  std::vector<float> rows = std::vector<float>(16);
  const PullRows asked{0, ids, rows};
};

// A program that catches the error and pushes the batch again would update the other server twice.
TEST_F(RefusedPushTest, AfterAPushThatOneServerRefusedNoServerGetsAnother) {
  const auto push = [&] {
    client.push(std::span(&pushed, 1), {});
    client.flush();
  };
  EXPECT_EQ(message_of<c10::ValueError>(push), "server 1 (second): not this one");
  refuses = false;
  EXPECT_THROW(push(), c10::DistError);
  EXPECT_THROW(client.flush(), c10::DistError);
  expect_one_push_on_the_first_server_alone();
}

// The usual loop pushes and pulls, and never flushes: the refusal comes out of the pull.
TEST_F(RefusedPushTest, AfterARefusalThatAPullTellsNoServerGetsAnotherPush) {
  client.push(std::span(&pushed, 1), {});
  EXPECT_THROW(client.pull(std::span(&asked, 1), {}).wait(), c10::Error);
  refuses = false;
  EXPECT_THROW(client.push(std::span(&pushed, 1), {}), c10::Error);
  expect_one_push_on_the_first_server_alone();
}

TEST(ReplyTest, InitialValuesThatOneServerWouldRefuseReachNone) {
  Cluster cluster(2);
  JobOptions job = ledger_job(1, 2, Mode::kAsync);
  job.blocks = {{.parameter = "net.bias", .begin = 0, .end = 4, .server = 0},
                {.parameter = "net.bias", .begin = 4, .end = 8, .server = 1}};
  Client client({.servers = {"first", "second"}, .trainer = 0, .link = quick_link()}, job,
                [&](int server) { return cluster.channel(server); });
  std::vector<float> values{1, 2, 3, 4, 5, 6, std::nanf(""), 8};
  const auto initialise = [&] {
    const std::span<const float> parameter = values;
    client.initialise(std::span(&parameter, 1));
  };
  EXPECT_EQ(
      message_of<c10::ValueError>(initialise),
      "initialise: net.bias: expected finite values, got nan at element 6 (error_if_nonfinite)");
  values = {8, 7, 6, 5, 4, 3, 2, 1};
  initialise();
  std::vector<float> found(8);
  client.pull({}, {std::span(found)}).wait();
  EXPECT_EQ(found, values);
}

}  // namespace reply_test
}  // namespace cohort::ps
