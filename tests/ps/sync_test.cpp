// SPDX-License-Identifier: Apache-2.0
// Synchronous training: the bits of any number of servers and trainers are those of one of each.
#include <algorithm>
#include <atomic>
#include <gtest/gtest.h>
#include <map>
#include <random>
#include <span>
#include <thread>

#include "cohort/ps/id_hash.h"
#include "cohort/ps/row_merger.h"

#include "tests/ps/cluster.h"

namespace cohort::ps {
namespace sync_test {

constexpr uint64_t kIds = 120;
constexpr int kSteps = 12;
constexpr std::array<size_t, 2> kSizes{1000, 37};
constexpr std::array<size_t, 2> kWidths{5, 3};

// Two dense parameters under Adam, cut at odd places; a table under row-wise Adagrad, one under
// Adam.
JobOptions job_of(int trainers, int servers, WireDtype dtype = WireDtype::kFloat32) {
  JobOptions job{.mode = Mode::kSync,
                 .reduce = Reduce::kMean,
                 .trainers = trainers,
                 .servers = servers,
                 .dense_rule = {.rule = Rule::kAdam, .learning_rate = 0.01f},
                 .dense_wire_dtype = dtype};
  const std::array<std::vector<int64_t>, 3> cuts{std::vector<int64_t>{}, std::vector<int64_t>{333},
                                                 std::vector<int64_t>{1, 17, 510, 511}};
  const auto& inner = cuts[static_cast<size_t>(servers - 1)];
  int64_t begin = 0;
  int server = 0;
  for (size_t i = 0; i <= inner.size(); ++i) {
    const int64_t end = i < inner.size() ? inner[i] : static_cast<int64_t>(kSizes[0]);
    job.blocks.push_back({"large", begin, end, server++ % servers});
    begin = end;
  }
  job.blocks.push_back({"small", 0, static_cast<int64_t>(kSizes[1]), servers - 1});
  job.tables = {{.name = "adagrad",
                 .width = kWidths[0],
                 .rule = {.rule = Rule::kRowwiseAdagrad, .learning_rate = 0.05f},
                 .initializer = {.scale = 0.5f}},
                {.name = "adam",
                 .width = kWidths[1],
                 .rule = {.rule = Rule::kAdam, .learning_rate = 0.02f},
                 .initializer = {.kind = Initializer::Kind::kNormal, .scale = 0.5f}}};
  for (TableOptions& table : job.tables) table.wire_dtype = dtype;
  return job;
}

// A model's values at one place: parameters, and rows for some ids.
struct Values {
  std::array<std::vector<float>, 2> parameters;
  std::array<std::vector<uint64_t>, 2> ids;
  std::array<std::vector<float>, 2> rows;

  std::vector<std::span<float>> parameter_spans() { return {parameters[0], parameters[1]}; }
  std::vector<std::span<const float>> parameter_views() const {
    return {parameters[0], parameters[1]};
  }
};

Values sized(const std::array<std::vector<uint64_t>, 2>& ids) {
  Values values;
  values.ids = ids;
  for (size_t i = 0; i < 2; ++i) {
    values.parameters[i].resize(kSizes[i]);
    values.rows[i].resize(ids[i].size() * kWidths[i]);
  }
  return values;
}

// What trainer `trainer` looks up in step `step`: each id once.
std::array<std::vector<uint64_t>, 2> batch_of(uint64_t step, uint32_t trainer) {
  std::mt19937_64 random(1000 * step + trainer);
  std::array<std::vector<uint64_t>, 2> ids;
  for (auto& part : ids) {
    for (uint64_t id = 0; id < kIds; ++id) {
      if (random() % 4 == 0) part.push_back(id * 0x9e3779b97f4a7c15);
    }
    std::shuffle(part.begin(), part.end(), random);
  }
  return ids;
}

void pull(Client& client, Values& values) {
  std::vector<PullRows> rows;
  for (uint32_t table = 0; table < 2; ++table)
    rows.push_back({table, values.ids[table], values.rows[table]});
  client.pull(rows, values.parameter_spans()).wait();
}

void push(Client& client, const Values& gradients) {
  std::vector<PushRows> rows;
  for (uint32_t table = 0; table < 2; ++table)
    rows.push_back({table, gradients.ids[table], gradients.rows[table]});
  client.push(rows, gradients.parameter_views());
}

// Gradients hang on the step, the trainer and the values: a pull that is a step too old or too new
// shows.
Values gradients_at(const Values& values, uint64_t step, uint32_t trainer) {
  std::mt19937_64 random(77 * step + trainer);
  std::uniform_real_distribution<float> noise(-1, 1);
  Values gradients = values;
  const auto change = [&](std::vector<float>& numbers) {
    for (float& number : numbers) number = noise(random) + 0.1f * number;
  };
  for (auto& part : gradients.parameters) change(part);
  for (auto& part : gradients.rows) change(part);
  return gradients;
}

void initialise(Client& client) {
  if (!client.needs_initial_values()) return;
  Values values = sized({});
  std::mt19937_64 random(5);
  for (auto& part : values.parameters) {
    for (float& number : part) number = std::uniform_real_distribution<float>(-1, 1)(random);
  }
  const auto views = values.parameter_views();
  client.initialise(views);
}

// All parameters and all rows, as bytes.
std::string state_of(Client& client) {
  std::vector<uint64_t> all;
  for (uint64_t id = 0; id < kIds; ++id) all.push_back(id * 0x9e3779b97f4a7c15);
  Values values = sized({all, all});
  pull(client, values);
  std::string bytes;
  for (const auto* parts : {&values.parameters, &values.rows}) {
    for (const auto& part : *parts)
      bytes.append(reinterpret_cast<const char*>(part.data()), part.size() * sizeof(float));
  }
  return bytes;
}

// One trainer that computes all trainers' batches in turn and sums in their order.
std::string one_process(uint32_t trainers) {
  Cluster cluster(1);
  const auto client = cluster.client(0, job_of(1, 1));
  initialise(*client);
  for (uint64_t step = 0; step < kSteps; ++step) {
    Values sum = sized({});
    std::array<RowMerger, 2> mergers;
    for (size_t table = 0; table < 2; ++table)
      mergers[table].begin(static_cast<int64_t>(kWidths[table]), 10);
    for (uint32_t trainer = 0; trainer < trainers; ++trainer) {
      Values values = sized(batch_of(step, trainer));
      pull(*client, values);
      const Values gradients = gradients_at(values, step, trainer);
      for (size_t i = 0; i < 2; ++i) {
        for (size_t j = 0; j < kSizes[i]; ++j) {
          // The first is taken as it is: 0 + -0 would be another number.
          auto& number = sum.parameters[i][j];
          number = trainer == 0 ? gradients.parameters[i][j] : number + gradients.parameters[i][j];
        }
        mergers[i].add(gradients.ids[i], gradients.rows[i]);
      }
    }
    const auto divisor = static_cast<float>(trainers);
    for (size_t i = 0; i < 2; ++i) {
      for (float& number : sum.parameters[i]) number /= divisor;
      mergers[i].divide(divisor);
      sum.ids[i].assign(mergers[i].ids().begin(), mergers[i].ids().end());
      sum.rows[i].assign(mergers[i].gradients().begin(), mergers[i].gradients().end());
    }
    push(*client, sum);
  }
  return state_of(*client);
}

struct Disturbances {
  std::function<void(uint64_t)> between{};  // Called by trainer 0 before each step.
  bool replaces_trainer = false;            // After each fifth push trainer 1 is another process.
};

// As many trainers, each a thread. Returns the state, which all of them pull alike.
std::string many(Cluster& cluster, int servers, uint32_t trainers,
                 const Disturbances& disturbances = {}, WireDtype dtype = WireDtype::kFloat32) {
  const JobOptions job = job_of(static_cast<int>(trainers), servers, dtype);
  std::vector<std::string> states(trainers);
  std::vector<std::thread> threads;
  std::atomic<uint32_t> done{0};
  for (uint32_t trainer = 0; trainer < trainers; ++trainer) {
    threads.emplace_back([&, trainer] {
      auto client = cluster.client(trainer, job);
      if (trainer == 0) initialise(*client);
      uint64_t pushes = 0;
      while (client->step() < kSteps) {
        const uint64_t step = client->step();
        if (trainer == 0 && disturbances.between) disturbances.between(step);
        Values values = sized(batch_of(step, trainer));
        pull(*client, values);
        push(*client, gradients_at(values, step, trainer));
        if (trainer == 1 && disturbances.replaces_trainer && ++pushes % 5 == 0) {
          client.reset();  // The push may have come or not, on one server or both.
          client = cluster.client(trainer, job);
        }
      }
      client->flush();
      states[trainer] = state_of(*client);
      ++done;
      while (done < trainers) std::this_thread::yield();  // Nobody is lost while others read.
    });
  }
  for (auto& thread : threads) thread.join();
  for (const std::string& state : states) EXPECT_EQ(state, states.front());
  return states.front();
}

TEST(SyncTest, TwoServersAndTwoTrainersGiveTheBitsOfOneOfEach) {
  Cluster cluster(2);
  EXPECT_EQ(many(cluster, 2, 2), one_process(2));
}

TEST(SyncTest, ThreeServersAndThreeTrainersGiveTheBitsOfOneOfEach) {
  Cluster cluster(3);
  const std::string state = many(cluster, 3, 3);
  EXPECT_EQ(state, one_process(3));
  EXPECT_NE(state, one_process(2));  // The comparison sees a difference.
}

TEST(SyncTest, ABadNetworkChangesNoBit) {
  Cluster cluster(2, {}, {.seed = 3, .lose = 0.05, .twice = 0.2, .late = 0.3});
  EXPECT_EQ(many(cluster, 2, 2), one_process(2));
}

TEST(SyncTest, ServersThatEndAtAnyMomentChangeNoBit) {
  Cluster cluster(2, {.snapshot_log_bytes = 100'000}, {.seed = 4, .twice = 0.1, .late = 0.2});
  std::mt19937 random(9);
  std::thread killer;
  const auto kill_one_soon = [&](uint64_t step) {
    if (killer.joinable()) killer.join();
    killer = std::thread([&cluster, step, pause = random() % 20] {
      std::this_thread::sleep_for(std::chrono::milliseconds(pause));
      cluster.restart(static_cast<int>(step % 2));
    });
  };
  const std::string state = many(cluster, 2, 2, {.between = kill_one_soon});
  killer.join();
  EXPECT_EQ(state, one_process(2));
}

// What a push is rounded to does not depend on servers, on the run, or on how often it is sent or
// made.
TEST(SyncTest, Bfloat16OnTheWireGivesTheSameBitsWhateverEndsAndOnAnyServers) {
  const auto run = [](int servers, const Disturbances& disturbances, const ChaosOptions& chaos) {
    Cluster cluster(servers, {.snapshot_log_bytes = 50'000}, chaos);
    const auto between = [&](uint64_t step) {
      if (disturbances.between) cluster.restart(static_cast<int>(step % 2));
    };
    Disturbances its = disturbances;
    its.between = between;
    return many(cluster, servers, 2, its, WireDtype::kBfloat16);
  };
  const std::string state = run(1, {}, {});
  EXPECT_EQ(run(1, {}, {}), state) << "two runs";
  EXPECT_EQ(run(3, {}, {}), state) << "servers";
  EXPECT_EQ(run(2, {.between = [](uint64_t) {}}, {.seed = 4, .twice = 0.1, .late = 0.2}), state)
      << "servers that end, pushes sent again";
  EXPECT_EQ(run(2, {.replaces_trainer = true}, {}), state) << "a trainer that ends";
  Cluster cluster(1);
  EXPECT_NE(many(cluster, 1, 2), state);
}

// A step is its trainers' at that moment: who comes later has no part in closed ones, who leaves
// none in later ones.
TEST(SyncTest, TrainersComeAndGoBetweenSteps) {
  Cluster cluster(2);
  JobOptions job = ledger_job(1, 2, Mode::kSync);
  const std::vector<uint64_t> ids{1, 2, 3, 4, 5, 6, 7, 8};
  const std::vector<float> gradients(ids.size() * 2, -1);
  const PushRows pushed{0, ids, gradients};
  std::vector<float> weights(gradients.size());
  const PullRows asked{0, ids, weights};

  const auto first = cluster.client(0, job);
  for (int step = 0; step < 3; ++step) first->push(std::span(&pushed, 1), {});
  first->flush();
  const auto second = cluster.client(1, job);
  EXPECT_EQ(second->step(), 3U);
  first->push(std::span(&pushed, 1), {});
  EXPECT_EQ(first->pull(std::span(&asked, 1), {}, /*is_prediction=*/true).wait(), 3U)
      << "the step waits for the one that came";
  second->push(std::span(&pushed, 1), {});
  second->flush();
  EXPECT_EQ(first->pull(std::span(&asked, 1), {}).wait(), 4U);
  for (const float weight : weights) EXPECT_EQ(weight, 5);
  first->push(std::span(&pushed, 1), {});
  second->leave();
  EXPECT_EQ(first->pull(std::span(&asked, 1), {}).wait(), 5U) << "nobody waits for one that left";
  for (const float weight : weights) EXPECT_EQ(weight, 6);
  // It comes back as a new process.
  const auto third = cluster.client(1, job);
  EXPECT_EQ(third->step(), 5U);
  third->push(std::span(&pushed, 1), {});
  first->push(std::span(&pushed, 1), {});
  first->flush();
  EXPECT_EQ(third->pull(std::span(&asked, 1), {}).wait(), 6U);
  for (const float weight : weights) EXPECT_EQ(weight, 8);
}

// One server had the step's push and the other did not when it came: the step is open on both, and
// it takes part in it on both.
TEST(SyncTest, OneThatComesWhileAServerIsAwayTakesPartInTheSameStepsOnBoth) {
  Cluster cluster(2);
  const JobOptions job = ledger_job(1, 2, Mode::kSync);
  const auto first = cluster.client(0, job);
  std::vector<uint64_t> ids;  // Of server 0 and of server 1, alternately.
  for (uint64_t id = 0; ids.size() < 8; ++id) {
    if (server_of(id, 2) == ids.size() % 2) ids.push_back(id);
  }
  const std::vector<float> gradients(ids.size() * 2, -1);
  const PushRows pushed{0, ids, gradients};
  first->push(std::span(&pushed, 1), {});
  first->flush();
  cluster.end(1);
  first->push(std::span(&pushed, 1), {});  // Server 1 is away.
  cluster.start(1);
  const auto second = cluster.client(1, job);
  first->flush();
  EXPECT_EQ(second->step(), 1U);
  for (int step = 0; step < 2; ++step) second->push(std::span(&pushed, 1), {});
  second->flush();
  first->push(std::span(&pushed, 1), {});
  std::vector<float> weights(gradients.size());
  const PullRows asked{0, ids, weights};
  first->pull(std::span(&asked, 1), {}).wait();
  for (const float weight : weights) EXPECT_EQ(weight, 5) << "of five gradients";
}

// Step 1 of trainer 0 is closed on server 0, and open on server 1, which has its push.
void close_on_one(Cluster& cluster, const JobOptions& job,
                  const std::array<std::vector<uint64_t>, 2>& ids) {
  for (const int server : {1, 0}) {
    const RawTrainer first(cluster, job, 0, 0, server);
    const auto push = first.push(1, ids[static_cast<size_t>(server)]);
    ASSERT_EQ(cluster.ask(server, push).code, Code::kOk);
    if (server == 0) {
      ASSERT_EQ(cluster.ask(0, first.confirm(1)).code, Code::kOk);
    }
  }
}

// So does one whose first process died on the way: between its joins (server 1 alone knows it), or
// when it had joined everywhere and not abstained yet.
TEST(SyncTest, OneThatDiedWhileItCameTakesPartInTheSameStepsOnBoth) {
  for (const int joined : {1, 2}) {
    Cluster cluster(2, {.trainer_timeout = std::chrono::seconds(60)});
    const JobOptions job = ledger_job(1, 2, Mode::kSync);
    std::array<std::vector<uint64_t>, 2> ids;  // By server.
    for (uint64_t id = 0; id < 20; ++id) ids[server_of(id, 2)].push_back(id);
    close_on_one(cluster, job, ids);
    for (int server = 2 - joined; server < 2; ++server) {
      const Reply reply = cluster.ask(
          server, {.call = Call::kJoin, .trainer = 1, .job = job.fingerprint(), .nonce = 7});
      ASSERT_EQ(reply.code, Code::kOk);
      ASSERT_EQ(reply.steps, server == 0 ? 1U : 0U);
    }
    const auto second = cluster.client(1, job);
    ASSERT_EQ(second->step(), 1U);

    std::vector<uint64_t> all = ids[0];
    all.insert(all.end(), ids[1].begin(), ids[1].end());
    const std::vector<float> gradients(all.size() * 2, -1);
    const PushRows pushed{0, all, gradients};
    const auto first = cluster.client(0, job);
    ASSERT_EQ(first->step(), 1U);
    first->push(std::span(&pushed, 1), {});
    second->push(std::span(&pushed, 1), {});
    first->flush();
    std::vector<float> weights(gradients.size());
    const PullRows asked{0, all, weights};
    EXPECT_EQ(second->pull(std::span(&asked, 1), {}).wait(), 2U);
    EXPECT_EQ(weights, std::vector<float>(weights.size(), 3)) << "of three gradients";
  }
}

// It had pushed a step to server 0 alone, where it has come for good, and had abstained before on
// server 1: what is open is repeated, no more and no less.
TEST(SyncTest, OneThatCameLateAndDiesRepeatsWhatItHadNotPushedEverywhere) {
  Cluster cluster(2, {.trainer_timeout = std::chrono::seconds(60)});
  const JobOptions job = ledger_job(1, 2, Mode::kSync);
  std::array<std::vector<uint64_t>, 2> ids;  // By server.
  for (uint64_t id = 0; id < 20; ++id) ids[server_of(id, 2)].push_back(id);
  close_on_one(cluster, job, ids);
  {
    const auto second = cluster.client(1, job);
    ASSERT_EQ(second->step(), 1U);
    second->flush();  // It has abstained from step 1 on server 1.
  }
  ASSERT_EQ(cluster.ask(0, RawTrainer(cluster, job, 1).push(2, ids[0])).code, Code::kOk);
  EXPECT_EQ(cluster.client(1, job)->step(), 1U);
}

}  // namespace sync_test
}  // namespace cohort::ps
