// All trainers start afresh while their servers stay: what becomes of the step that was open.
#include <algorithm>
#include <array>
#include <functional>
#include <future>
#include <gtest/gtest.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cohort/ps/id_hash.h"
#include "cohort/ps/server/parameter_state.h"

#include "tests/ps/cluster.h"

namespace cohort::ps {
namespace restart_test {

using nlohmann::json;

// Waits end soon: a trainer that waits here waits for ever.
LinkOptions impatient_link() {
  LinkOptions link = quick_link();
  link.trainer_timeout = std::chrono::milliseconds(3'000);
  return link;
}

// Two servers and two trainers that add 1 to rows of both.
class RestartTest : public testing::Test {
 protected:
  RestartTest() {
    for (uint64_t id = 0; id < 20; ++id) ids_[server_of(id, 2)].push_back(id);
    all_ = ids_[0];
    all_.insert(all_.end(), ids_[1].begin(), ids_[1].end());
  }

  std::unique_ptr<Client> join(uint32_t trainer) {
    return cluster_.client(trainer, job_, impatient_link());
  }
  void push(Client& client) const {
    const std::vector<float> gradients(all_.size() * 2, -1);
    const PushRows pushed{0, all_, gradients};
    client.push(std::span(&pushed, 1), {});
  }
  // The weight of all rows, which must be one; -1 if they differ.
  float pull(Client& client) const {
    std::vector<float> weights(all_.size() * 2);
    const PullRows asked{0, all_, weights};
    client.pull(std::span(&asked, 1), {}).wait();
    for (const float weight : weights) {
      if (weight != weights.front()) return -1;
    }
    return weights.front();
  }
  uint64_t steps(int server) {
    return json::parse(cluster_.ask(server, {.call = Call::kStatus}).text)["steps"];
  }
  // Two steps of trainer 0, one of trainer 1; then both are gone.
  void leave_a_step_open() {
    const auto first = join(0), second = join(1);
    push(*first);
    push(*second);
    push(*first);
    first->flush();
    second->flush();
  }
  // Both train on, at the same steps.
  void expect_to_go_on(Client& first, Client& second, float weight) {
    EXPECT_EQ(pull(first), weight);
    EXPECT_EQ(pull(second), weight);
    for (int step = 0; step < 3; ++step) {
      push(first);
      push(second);
      EXPECT_EQ(first.step(), second.step());
      EXPECT_EQ(pull(first), weight + 2 * static_cast<float>(step + 1));
      EXPECT_EQ(pull(second), weight + 2 * static_cast<float>(step + 1));
    }
    for (const int server : {0, 1}) {
      const uint64_t before = steps(server);
      cluster_.restart(server);
      EXPECT_EQ(steps(server), before) << "the log has it";
    }
    EXPECT_EQ(pull(first), weight + 6);
  }

  JobOptions job_ = ledger_job(2, 2, Mode::kSync);
  Cluster cluster_{2, {.trainer_timeout = std::chrono::seconds(60)}};
  std::array<std::vector<uint64_t>, 2> ids_;  // By server.
  std::vector<uint64_t> all_;
};

TEST_F(RestartTest, TheOpenStepClosesWithThePushesItHas) {
  leave_a_step_open();
  const auto first = join(0);
  EXPECT_EQ(steps(0), 1U) << "trainer 1 may live";
  const auto second = join(1);
  EXPECT_EQ(steps(0), 2U);
  expect_to_go_on(*first, *second, 3);
}

// Its number is of the time before: it learns the new one before its first push.
TEST_F(RestartTest, OneThatCameBeforeTheStepClosedGoesOnWithTheOthers) {
  leave_a_step_open();
  const auto second = join(1);
  EXPECT_EQ(pull(*second), 2);
  const auto first = join(0);
  expect_to_go_on(*first, *second, 3);
}

// The other one may be waiting behind the save.
TEST_F(RestartTest, OneThatSavesFirstWaitsUntilTheOtherHasJoined) {
  leave_a_step_open();
  const auto first = join(0);
  auto saved = std::async(std::launch::async, [&] { first->save(cluster_.path("saved")); });
  EXPECT_EQ(saved.wait_for(std::chrono::milliseconds(300)), std::future_status::timeout);
  const auto second = join(1);
  saved.get();
  EXPECT_EQ(steps(0), 2U);
}

TEST_F(RestartTest, ServersThatEndBetweenTheTrainersForgetNothing) {
  leave_a_step_open();
  const auto second = join(1);
  cluster_.restart(0);
  EXPECT_EQ(pull(*second), 2);
  const auto first = join(0);
  cluster_.restart(1);
  expect_to_go_on(*first, *second, 3);
}

TEST_F(RestartTest, ATrainerThatComesBackAloneWaitsForTheOthersPush) {
  for (const int server : {0, 1})
    cluster_.ask(server, {.call = Call::kJob, .trainer = 0, .text = job_.to_json()});
  const auto second = join(1);  // It lives, and has not pushed yet.
  {
    const auto first = join(0);
    push(*first);
    first->flush();
  }
  const auto first = join(0);
  EXPECT_EQ(first->step(), 1U);
  for (const int server : {0, 1}) EXPECT_EQ(steps(server), 0U);
  push(*second);
  EXPECT_EQ(pull(*first), 2);
  expect_to_go_on(*first, *second, 2);
}

// Nobody knows yet that the other one died, too: the step is of both.
TEST_F(RestartTest, AStepThatOneAliveHasPushedIsOfBoth) {
  leave_a_step_open();
  const auto second = join(1);
  push(*second);
  second->flush();
  const auto first = join(0);
  expect_to_go_on(*first, *second, 4);
}

// Trainer 0 died between the servers: server 0 alone had its push.
TEST_F(RestartTest, AStepThatIsClosedOnOneServerPassesOnTheOther) {
  for (const uint32_t comes_first : {0, 1}) {
    const auto before = static_cast<float>(steps(0));
    {
      const auto first = join(0), second = join(1);
      push(*first);
      push(*second);
    }
    { const auto first = join(0), second = join(1); }
    RawTrainer half(cluster_, job_, 0);
    ASSERT_EQ(cluster_.ask(0, half.push(half.joined.last_sequence + 1, ids_[0])).code, Code::kOk);
    auto one = join(comes_first), other = join(1 - comes_first);
    pull(*one);
    pull(*other);
    push(*one);
    push(*other);
    EXPECT_EQ(one->step(), other->step());
    pull(*one);
    pull(*other);
    EXPECT_EQ(steps(0), steps(1));
    EXPECT_GE(static_cast<float>(steps(0)), before + 3);
  }
}

// Calls `before` when it is asked to join.
class JoinHook : public Channel {
 public:
  JoinHook(std::unique_ptr<Channel> channel, std::function<void()> before)
      : channel_(std::move(channel)), before_(std::move(before)) {}
  void send(const Request& request, int64_t timeout_ms, Done done) override {
    if (request.call == Call::kJoin && before_) std::exchange(before_, nullptr)();
    channel_->send(request, timeout_ms, std::move(done));
  }

 private:
  std::unique_ptr<Channel> channel_;
  std::function<void()> before_;
};

// Trainer 0 comes to both servers while trainer 1 is between them.
TEST_F(RestartTest, OneThatOvertakesAnotherBetweenTheServersDoesNotWaitForIt) {
  leave_a_step_open();
  { const auto first = join(0), second = join(1); }
  RawTrainer half(cluster_, job_, 0);
  ASSERT_EQ(cluster_.ask(0, half.push(half.joined.last_sequence + 1, ids_[0])).code, Code::kOk);
  std::unique_ptr<Client> first;
  Client second({.servers = {"a", "b"}, .trainer = 1, .link = impatient_link()}, job_,
                [&](int server) -> std::unique_ptr<Channel> {
                  const auto come = [&] { first = join(0); };
                  return std::make_unique<JoinHook>(cluster_.channel(server),
                                                    server == 1 ? come : std::function<void()>());
                });
  pull(*first);
  pull(second);
  push(*first);
  push(second);
  EXPECT_EQ(first->step(), second.step());
  pull(*first);
  EXPECT_EQ(steps(0), steps(1));
}

// One that does not ask how far the steps are before it pushes: not dropped in silence.
TEST_F(RestartTest, APushOfAStepThatClosedWithoutItIsRefused) {
  leave_a_step_open();
  RawTrainer second(cluster_, job_, 1);
  const auto first = join(0);
  const Reply reply = cluster_.ask(0, second.push(2, ids_[0]));
  EXPECT_EQ(reply.code, Code::kInvalid);
  EXPECT_EQ(reply.text, "push: step 2 was closed without this trainer, which came at step 2");
  EXPECT_EQ(cluster_.ask(0, second.push(3, ids_[0])).code, Code::kOk);
}

TEST_F(RestartTest, NobodyIsAheadOfOthersThatAreNewToo) {
  job_ = ledger_job(2, 2, Mode::kAsync);
  job_.max_staleness = 1;
  {
    const auto first = join(0), second = join(1);
    for (int i = 0; i < 2; ++i) push(*first);
    first->flush();
  }
  const auto first = join(0);
  EXPECT_EQ(cluster_.ask(0, RawTrainer(cluster_, job_, 0).pull({ids_[0]})).code, Code::kNotYet)
      << "trainer 1 may live";
  const auto second = join(1), again = join(0);
  EXPECT_EQ(pull(*again), 2);
}

// Records as a server logs them; the state behind some of them is saved and loaded on the way.
TEST(RestartStateTest, ReplayAndSnapshotGiveTheSameState) {
  const JobOptions job = ledger_job(2, 1, Mode::kSync);
  const std::string text = job.to_json();
  const auto bytes = [](const auto& payload) {
    const auto span = std::as_bytes(std::span(&payload, 1));
    return std::vector<std::byte>(span.begin(), span.end());
  };
  const auto push = [&](uint32_t trainer, uint64_t incarnation, uint64_t step) {
    const std::array<SectionShape, 1> shapes{SectionShape{.table = 0, .width = 2, .count = 1}};
    MessageWriter writer(shapes);
    writer.ids(0)[0] = 7;
    std::fill(writer.values(0).begin(), writer.values(0).end(), -1.0f);
    const Buffer message = writer.finish({.kind = MessageKind::kPush,
                                          .job = job.fingerprint(),
                                          .trainer = trainer,
                                          .trainer_incarnation = incarnation,
                                          .sequence = step});
    return std::vector<std::byte>(message.span().begin(), message.span().end());
  };
  const std::vector<std::pair<RecordKind, std::vector<std::byte>>> records{
      {RecordKind::kJoin, bytes(JoinRecord{.trainer = 0, .incarnation = 1})},
      {RecordKind::kJoin, bytes(JoinRecord{.trainer = 1, .incarnation = 1})},
      {RecordKind::kPush, push(0, 1, 1)},
      {RecordKind::kPush, push(0, 1, 2)},
      {RecordKind::kJoin, bytes(JoinRecord{.trainer = 0, .incarnation = 2})},
      {RecordKind::kJoin, bytes(JoinRecord{.trainer = 1, .incarnation = 2})},
      {RecordKind::kPush, push(1, 2, 3)},
      {RecordKind::kPush, push(0, 2, 3)}};
  for (size_t saved_after = 0; saved_after <= records.size(); ++saved_after) {
    const ScratchFolder scratch;
    ParameterState live(0, ""), loaded(0, "");
    const auto apply = [](ParameterState& state, size_t i, const auto& record) {
      state.apply({.number = i + 2, .kind = record.first, .payload = record.second});
    };
    live.apply({.number = 1, .kind = RecordKind::kJob, .payload = std::as_bytes(std::span(text))});
    for (size_t i = 0; i < saved_after; ++i) apply(live, i, records[i]);
    live.begin_save(scratch.path("saved"));
    live.save(scratch.path("saved"));
    loaded.load(scratch.path("saved"));
    for (size_t i = saved_after; i < records.size(); ++i) {
      for (ParameterState* state : {&live, &loaded}) {
        apply(*state, i, records[i]);
        const bool all_came_anew = i >= 5;
        EXPECT_EQ(state->steps(), i == 7 ? 3U : all_came_anew ? 2U : 0U) << "record " << i;
      }
    }
    for (const ParameterState* state : {&live, &loaded}) {
      EXPECT_EQ(state->steps(), 3U);
      EXPECT_EQ(state->pending_bytes(), 0);
      EXPECT_EQ(state->trainer(1)->last_sequence, 3U);
      const std::array<SectionShape, 1> shapes{
          SectionShape{.table = 0, .width = 2, .count = 1, .has_values = false}};
      MessageWriter writer(shapes);
      writer.ids(0)[0] = 7;
      const Buffer asked = writer.finish({.kind = MessageKind::kPull});
      const Buffer reply = state->pull(parse_message(asked.span()));
      EXPECT_EQ(parse_message(reply.span()).sections[0].values[0], 4) << "no push was dropped";
    }
  }
}

// Server 1 has neither blocks nor tables: every push to it is without sections, as abstentions are.
// The one behind joins first; the one ahead joins last and has nothing to abstain from.
TEST(RestartBlocklessTest, AServerWithoutPartsClosesTheOpenStepToo) {
  Cluster cluster(2, {.trainer_timeout = std::chrono::seconds(60)});
  JobOptions job = ledger_job(2, 2, Mode::kSync);
  job.tables.clear();
  job.blocks = {{.parameter = "p", .begin = 0, .end = 4, .server = 0}};
  const std::vector<float> gradient(4, -1), initial(4, 0);
  const auto join = [&](uint32_t trainer) {
    return cluster.client(trainer, job, impatient_link());
  };
  const auto push = [&](Client& client) { client.push({}, {std::span<const float>(gradient)}); };
  const auto pull = [&](Client& client) {
    std::vector<float> weights(4);
    client.pull({}, {std::span<float>(weights)}).wait();
    return weights[0];
  };
  {
    const auto first = join(0), second = join(1);
    const std::vector<std::span<const float>> values{initial};
    first->initialise(values);
    push(*first);
    push(*second);
    push(*first);  // Step 2: trainer 0 alone, on both servers.
    first->flush();
    second->flush();
  }
  const auto second = join(1);
  EXPECT_EQ(pull(*second), 2);
  const auto first = join(0);
  EXPECT_EQ(pull(*first), 3);
  push(*first);
  push(*second);
  EXPECT_EQ(first->step(), second->step());
}

// A push of trainer 1's killed process that is handled after trainer 0's new one joined.
TEST(RestartLateTest, ALatePushOfAnEarlierProcessHoldsNobodyUp) {
  Cluster cluster(1, {.trainer_timeout = std::chrono::seconds(60)});
  const JobOptions job = ledger_job(2, 1, Mode::kSync);
  { RawTrainer zero(cluster, job, 0); }
  RawTrainer old(cluster, job, 1);
  const Request begin{
      .call = Call::kBegin, .trainer = 1, .incarnation = old.header.trainer_incarnation};
  ASSERT_EQ(cluster.ask(0, begin).code, Code::kOk);
  const auto first = cluster.client(0, job, impatient_link());
  ASSERT_EQ(cluster.ask(0, old.push(1)).code, Code::kOk);  // Late.
  const auto second = cluster.client(1, job, impatient_link());
  const std::vector<uint64_t> ids{1};
  std::vector<float> weights(2);
  const PullRows asked{0, ids, weights};
  first->pull(std::span(&asked, 1), {}).wait();
  second->pull(std::span(&asked, 1), {}).wait();
}

}  // namespace restart_test
}  // namespace cohort::ps
