// SPDX-License-Identifier: Apache-2.0
// Trainers restart while their servers stay: the step that was open is repeated, with the
// same bits.
#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <future>
#include <gtest/gtest.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
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
  // Trainer 0 does that, which comes later here.
  void set_job() {
    for (const int server : {0, 1})
      cluster_.ask(server, {.call = Call::kJob, .trainer = 0, .text = job_.to_json()});
  }
  uint64_t steps(int server) {
    return json::parse(cluster_.ask(server, {.call = Call::kStatus}).text)["steps"];
  }
  uint64_t last_push(int server) {
    return json::parse(
        cluster_.ask(server, {.call = Call::kStatus}).text)["trainers"][0]["last_push"];
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
  // It has confirmed the push when it is gone.
  void push_of_trainer_1() {
    const auto second = join(1);
    push(*second);
    second->flush();
  }
  // A step closes when both have confirmed it, which their pulls do.
  void expect_pulled(Client& first, Client& second, float weight) const {
    auto pulled = std::async(std::launch::async, [&] { return pull(first); });
    EXPECT_EQ(pull(second), weight);
    EXPECT_EQ(pulled.get(), weight);
  }
  // Both train on, at the same steps.
  void expect_to_go_on(Client& first, Client& second, float weight) {
    expect_pulled(first, second, weight);
    for (int step = 0; step < 3; ++step) {
      push(first);
      push(second);
      EXPECT_EQ(first.step(), second.step());
      expect_pulled(first, second, weight + 2 * static_cast<float>(step + 1));
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

TEST_F(RestartTest, TheOpenStepIsMadeAgain) {
  leave_a_step_open();
  const auto first = join(0);
  EXPECT_EQ(first->step(), 1U);
  const auto second = join(1);
  EXPECT_EQ(second->step(), 1U);
  EXPECT_EQ(second->pushed_before(), 1U);
  expect_to_go_on(*first, *second, 2);
  // Also of one that had left: its program is done, and need not begin once more.
  second->leave();
  EXPECT_EQ(join(1)->pushed_before(), 4U);
}

TEST_F(RestartTest, AnAsyncTrainerGoesOnBehindItsOwnPushes) {
  job_ = ledger_job(2, 2, Mode::kAsync);
  {
    const auto first = join(0), second = join(1);
    for (int i = 0; i < 3; ++i) push(*first);
    push(*second);
    first->flush();
    second->flush();
    first->leave();
  }
  EXPECT_EQ(join(0)->pushed_before(), 3U);
  EXPECT_EQ(join(1)->pushed_before(), 1U);
}

// Killed while one of two servers has its second push and the other does not have it.
TEST_F(RestartTest, AnAsyncTrainerRepeatsWhatNotAllServersHave) {
  job_ = ledger_job(1, 2, Mode::kAsync);
  ClientOptions options{.servers = {"0", "1"}, .repeats_pushes = true, .link = impatient_link()};
  const auto join_again = [&] {
    return std::make_unique<Client>(options, job_,
                                    [this](int server) { return cluster_.channel(server); });
  };
  const auto leave_a_push_half_way = [&](const std::unique_ptr<Client>& trainer) {
    push(*trainer);
    trainer->flush();
    cluster_.end(1);
    const auto pushed = last_push(0);
    push(*trainer);
    while (last_push(0) == pushed) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  leave_a_push_half_way(join_again());
  cluster_.start(1);
  {
    const auto trainer = join_again();
    ASSERT_EQ(trainer->pushed_before(), 1U);
    EXPECT_EQ(pull(*trainer), -1) << "one server has the second push";
    push(*trainer);
    push(*trainer);
    trainer->flush();
    EXPECT_EQ(pull(*trainer), 3);
    leave_a_push_half_way(trainer);
  }
  cluster_.start(1);
  // Pushes of one that does not repeat them are new.
  options.repeats_pushes = false;
  const auto trainer = join_again();
  EXPECT_EQ(trainer->pushed_before(), 4U);
  push(*trainer);
  trainer->flush();
  EXPECT_EQ(pull(*trainer), -1);
}

TEST_F(RestartTest, OneThatSavesFirstSavesWhatIsClosed) {
  leave_a_step_open();
  const auto first = join(0);
  first->save(cluster_.path("saved"));
  const auto second = join(1);
  expect_to_go_on(*first, *second, 2);
}

TEST_F(RestartTest, ServersThatEndBetweenTheTrainersForgetNothing) {
  leave_a_step_open();
  const auto second = join(1);
  cluster_.restart(0);
  EXPECT_EQ(pull(*second), 2);
  const auto first = join(0);
  cluster_.restart(1);
  expect_to_go_on(*first, *second, 2);
}

TEST_F(RestartTest, ATrainerThatComesBackAloneWaitsForTheOthersPush) {
  set_job();
  const auto second = join(1);  // It lives, and has not pushed yet.
  {
    const auto first = join(0);
    push(*first);
    first->flush();
  }
  const auto first = join(0);
  EXPECT_EQ(first->step(), 0U);
  push(*first);
  for (const int server : {0, 1}) EXPECT_EQ(steps(server), 0U);
  push(*second);
  expect_to_go_on(*first, *second, 2);
}

// A step that all have confirmed needs none of them any more.
TEST_F(RestartTest, AStepThatAllHaveConfirmedClosesWithoutThem) {
  leave_a_step_open();
  push_of_trainer_1();
  for (const int server : {0, 1}) EXPECT_EQ(steps(server), 2U);
  const auto second = join(1), first = join(0);
  expect_to_go_on(*first, *second, 4);
}

// Trainer 0 died between the servers: server 0 alone has its push. No server applies it before the
// other one can.
TEST_F(RestartTest, AStepThatOneServerHasWholeStaysOpenOnBoth) {
  set_job();
  for (const uint32_t comes_first : {0, 1}) {
    const uint64_t closed = steps(0);
    {
      push_of_trainer_1();
      RawTrainer half(cluster_, job_, 0);
      ASSERT_EQ(cluster_.ask(0, half.push(closed + 1, ids_[0])).code, Code::kOk);
    }
    for (const int server : {0, 1}) EXPECT_EQ(steps(server), closed);
    const auto one = join(comes_first), other = join(1 - comes_first);
    expect_to_go_on(*one, *other, 2 * static_cast<float>(closed));
  }
}

// Trainer 0 died when it had told server 0 alone that all servers have its push.
TEST_F(RestartTest, AStepThatIsClosedOnOneServerClosesOnTheOther) {
  set_job();
  for (const uint32_t comes_first : {0, 1}) {
    const uint64_t closed = steps(0);
    {
      push_of_trainer_1();
      for (const int server : {1, 0}) {
        RawTrainer first(cluster_, job_, 0, 0, server);
        const auto push = first.push(closed + 1, ids_[static_cast<size_t>(server)]);
        ASSERT_EQ(cluster_.ask(server, push).code, Code::kOk);
        if (server == 0) {
          ASSERT_EQ(cluster_.ask(0, first.confirm(closed + 1)).code, Code::kOk);
        }
      }
    }
    EXPECT_EQ(steps(0), closed + 1);
    EXPECT_EQ(steps(1), closed);
    const auto one = join(comes_first), other = join(1 - comes_first);
    EXPECT_EQ(one->step(), closed + 1);
    EXPECT_EQ(other->step(), closed + 1);
    expect_to_go_on(*one, *other, 2 * static_cast<float>(closed + 1));
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
  std::unique_ptr<Client> first;
  Client second({.servers = {"a", "b"}, .trainer = 1, .link = impatient_link()}, job_,
                [&](int server) -> std::unique_ptr<Channel> {
                  const auto come = [&] { first = join(0); };
                  return std::make_unique<JoinHook>(cluster_.channel(server),
                                                    server == 1 ? come : std::function<void()>());
                });
  EXPECT_EQ(first->step(), second.step());
  expect_to_go_on(*first, second, 2);
}

// What an earlier process of a trainer knew does not count for the new one.
TEST_F(RestartTest, AConfirmationEndsWithItsProcess) {
  set_job();
  const auto second = join(1);
  RawTrainer old(cluster_, job_, 0);
  ASSERT_EQ(cluster_.ask(0, old.confirm(1)).code, Code::kOk);
  RawTrainer again(cluster_, job_, 0);
  EXPECT_EQ(cluster_.ask(0, old.confirm(1)).code, Code::kReplaced);
  ASSERT_EQ(cluster_.ask(0, again.push(1, ids_[0])).code, Code::kOk);
  push(*second);
  EXPECT_EQ(steps(0), 0U);
}

// Under `continue`, when the time that silent ones have is over, from when the job is known.
TEST(RestartAbsentTest, StepsCloseWithoutATrainerThatNeverCame) {
  Cluster cluster(2, {.on_trainer_loss = OnTrainerLoss::kContinue,
                      .trainer_timeout = std::chrono::milliseconds(3'000)});
  const JobOptions job = ledger_job(2, 2, Mode::kSync);
  const auto first = cluster.client(0, job);
  const std::vector<uint64_t> ids{1, 2, 3, 4};
  const std::vector<float> gradients(8, -1);
  const PushRows pushed{0, ids, gradients};
  std::vector<float> weights(8);
  const PullRows asked{0, ids, weights};
  first->push(std::span(&pushed, 1), {});
  EXPECT_EQ(first->pull(std::span(&asked, 1), {}).wait(), 1U);
  // It may still come: its first step is the next one.
  const auto second = cluster.client(1, job);
  EXPECT_EQ(second->step(), 1U);
}

// One that comes late and does not ask how far the steps are: not dropped in silence.
TEST_F(RestartTest, APushOfAStepThatClosedWithoutItIsRefused) {
  job_ = ledger_job(1, 2, Mode::kSync);
  const auto first = join(0);
  push(*first);
  EXPECT_EQ(pull(*first), 1);
  RawTrainer second(cluster_, job_, 1);
  const Reply reply = cluster_.ask(0, second.push(1, ids_[0]));
  EXPECT_EQ(reply.code, Code::kInvalid);
  EXPECT_EQ(reply.text, "push: step 1 was closed without this trainer, which joined after step 1");
  EXPECT_EQ(cluster_.ask(0, second.push(2, ids_[0])).code, Code::kOk);
}

// Records as a server logs them; the state behind some of them is saved and loaded on the way.
TEST(RestartStateTest, ReplayAndSnapshotGiveTheSameState) {
  const JobOptions job = ledger_job(2, 2, Mode::kSync);
  const std::string text = job.to_json();
  uint64_t id = 7;
  while (server_of(id, 2) != 0) ++id;
  const auto bytes = [](const auto& payload) {
    const auto span = std::as_bytes(std::span(&payload, 1));
    return std::vector<std::byte>(span.begin(), span.end());
  };
  const auto push = [&](uint32_t trainer, uint64_t incarnation, uint64_t step) {
    const std::array<SectionShape, 1> shapes{SectionShape{.table = 0, .width = 2, .count = 1}};
    MessageWriter writer(shapes);
    writer.ids(0)[0] = id;
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
      {RecordKind::kPush, push(1, 2, 1)},
      {RecordKind::kClose, {}},
      {RecordKind::kPush, push(1, 2, 2)},
      {RecordKind::kClose, {}}};
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
        EXPECT_EQ(state->steps(), i == 9 ? 2U : i >= 7 ? 1U : 0U) << "record " << i;
      }
    }
    for (const ParameterState* state : {&live, &loaded}) {
      EXPECT_EQ(state->steps(), 2U);
      EXPECT_EQ(state->pending_bytes(), 0);
      EXPECT_EQ(state->trainer(1)->last_sequence, 2U);
      const std::array<SectionShape, 1> shapes{
          SectionShape{.table = 0, .width = 2, .count = 1, .has_values = false}};
      MessageWriter writer(shapes);
      writer.ids(0)[0] = id;
      const Buffer asked = writer.finish({.kind = MessageKind::kPull});
      const Buffer reply = state->pull(parse_message(asked.span()));
      EXPECT_EQ(parse_message(reply.span()).sections[0].values[0], 4) << "no push was dropped";
    }
  }
}

// Server 1 has neither blocks nor tables: every push to it is without sections, as abstentions are.
TEST(RestartBlocklessTest, AServerWithoutPartsClosesItsStepsToo) {
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
  EXPECT_EQ(pull(*first), 2);
  push(*first);
  push(*second);
  auto pulled = std::async(std::launch::async, [&] { return pull(*first); });
  EXPECT_EQ(pull(*second), 4);
  EXPECT_EQ(pulled.get(), 4);
}

// A push of trainer 1's killed process that is handled after trainer 0's new one joined.
TEST(RestartLateTest, ALatePushOfAnEarlierProcessHoldsNobodyUp) {
  Cluster cluster(1, {.trainer_timeout = std::chrono::seconds(60)});
  const JobOptions job = ledger_job(2, 1, Mode::kSync);
  { RawTrainer zero(cluster, job, 0); }
  RawTrainer old(cluster, job, 1);
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
