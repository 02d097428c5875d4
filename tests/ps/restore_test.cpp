// SPDX-License-Identifier: Apache-2.0
// A job that goes back to a checkpoint while its servers live.
#include <filesystem>
#include <fstream>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/error.h"

#include "tests/ps/cluster.h"
#include "tests/support/message_of.h"

namespace cohort::ps {
namespace restore_test {

namespace fs = std::filesystem;
using cohort::test::message_of;

// Two servers and one trainer; rows have Adam's moments, so that values alone are not the state.
class RestoreTest : public testing::TestWithParam<Mode> {
 protected:
  RestoreTest() {
    job_ = ledger_job(1, 2, GetParam());
    job_.tables[0].rule = {.rule = Rule::kAdam, .learning_rate = 0.1f};
    for (uint64_t id = 0; id < 20; ++id) ids_.push_back(id);
  }

  std::unique_ptr<Client> join(const std::optional<std::string>& restore = std::nullopt) {
    return cluster_.client(0, job_, quick_link(), restore);
  }
  void train(Client& client, int steps) const {
    std::vector<float> gradients(ids_.size() * 2);
    for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = 1.0f + static_cast<float>(i % 7);
    const PushRows pushed{0, ids_, gradients};
    for (int step = 0; step < steps; ++step) client.push(std::span(&pushed, 1), {});
    client.flush();
  }
  std::vector<float> rows(Client& client) const {
    std::vector<float> weights(ids_.size() * 2);
    const PullRows asked{0, ids_, weights};
    client.pull(std::span(&asked, 1), {}).wait();
    return weights;
  }
  int times_gone_back() const {
    const std::string log = cluster_.log();
    int times = 0;
    for (size_t at = 0; (at = log.find("rolled back", at)) != std::string::npos; ++at) ++times;
    return times;
  }

  JobOptions job_;
  Cluster cluster_{2, {.trainer_timeout = std::chrono::seconds(60)}};
  std::vector<uint64_t> ids_;
  const std::string saved_ = cluster_.path("saved");
};

INSTANTIATE_TEST_SUITE_P(Modes, RestoreTest, testing::Values(Mode::kSync, Mode::kAsync));

// After a restart of the servers, too: what they wrote down is the state that they went back to.
TEST_P(RestoreTest, GoesOnFromTheCheckpointAsItDidTheFirstTime) {
  std::vector<float> then, later;
  {
    const auto client = join();
    train(*client, 3);
    client->save(saved_);
    then = rows(*client);
    train(*client, 4);
    later = rows(*client);
  }
  for (const bool servers_end : {false, true}) {
    auto client = join(saved_);
    EXPECT_EQ(rows(*client), then);
    if (servers_end) {
      for (const int server : {0, 1}) cluster_.restart(server);
      client = join();
      EXPECT_EQ(rows(*client), then);
    }
    train(*client, 4);
    EXPECT_EQ(rows(*client), later);
  }
  for (const int server : {0, 1}) cluster_.restart(server);
  EXPECT_EQ(rows(*join()), later);
}

TEST_P(RestoreTest, ToTheBeginning) {
  const auto first = join();
  const std::vector<float> begin = rows(*first);
  train(*first, 2);
  const std::vector<float> later = rows(*first);
  const auto again = join("");
  EXPECT_EQ(rows(*again), begin);
  for (const int server : {0, 1}) cluster_.restart(server);
  EXPECT_EQ(rows(*again), begin);
  train(*again, 2);
  EXPECT_EQ(rows(*again), later);
}

// What a job began with by --load is its beginning, from the first start on.
TEST_P(RestoreTest, ToTheCheckpointThatItBeganWith) {
  const std::string saved = saved_;
  std::vector<float> loaded;
  {
    const auto before = join();
    train(*before, 3);
    before->save(saved);
    loaded = rows(*before);
  }
  Cluster next(2, {.load = saved, .trainer_timeout = std::chrono::seconds(60)});
  const auto begin = [&] { return next.client(0, job_, quick_link(), ""); };
  EXPECT_EQ(rows(*begin()), loaded);
  EXPECT_EQ(next.log().find("rolled back"), std::string::npos) << "they hold it";
  const auto first = begin();
  train(*first, 2);
  const std::vector<float> later = rows(*first);
  first->save(next.path("own"));
  for (const bool servers_end : {false, true}) {
    for (const int server : {0, 1})
      if (servers_end) next.restart(server);
    const auto again = begin();
    EXPECT_EQ(rows(*again), loaded);
    train(*again, 2);
    EXPECT_EQ(rows(*again), later);
  }
}

// The servers have given the job up, and hold the state to go back to.
TEST_P(RestoreTest, AFailedJobGoesBackToTheStateThatItHas) {
  Cluster cluster(2, {.trainer_timeout = std::chrono::milliseconds(2'000)});
  const auto join_again = [&](const std::optional<std::string>& restore = std::nullopt) {
    return cluster.client(0, job_, quick_link(), restore);
  };
  std::vector<float> then;
  {
    const auto client = join_again();
    train(*client, 3);
    then = rows(*client);
    client->save(cluster.path("saved"));
  }
  const auto given_up = [&](int server) {
    return cluster.ask(server, {.call = Call::kStatus}).text.find("sent nothing for") !=
           std::string::npos;
  };
  for (int i = 0; i < 600 && !(given_up(0) && given_up(1)); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_THROW(join_again(), c10::DistError);
  EXPECT_EQ(rows(*join_again(cluster.path("saved"))), then);
}

// They are asked before a file is read.
TEST_P(RestoreTest, ServersThatHoldItKeepIt) {
  {
    const auto client = join();
    train(*client, 3);
    client->save(saved_);
  }
  const auto client = join(saved_);
  EXPECT_EQ(times_gone_back(), 0);
  train(*client, 1);
  const auto again = join(saved_);
  EXPECT_EQ(times_gone_back(), 2);
  const std::vector<float> then = rows(*again);
  EXPECT_EQ(rows(*join(saved_)), then);
  EXPECT_EQ(times_gone_back(), 2);
}

TEST_P(RestoreTest, AProcessThatHadJoinedIsRefused) {
  const auto old = join();
  train(*old, 1);
  old->save(saved_);
  train(*old, 1);
  const auto again = join(saved_);
  const std::vector<float> then = rows(*again);
  EXPECT_THROW(train(*old, 1), c10::DistError);
  EXPECT_EQ(rows(*again), then);
}

// In memory there is half of it: nobody trains on that, nor on servers of which one alone went
// back.
TEST_P(RestoreTest, ADamagedCheckpointIsRefusedByFile) {
  const std::string good = cluster_.path("good");
  std::vector<float> then;
  {
    const auto client = join();
    train(*client, 3);
    then = rows(*client);
    client->save(good);
    client->save(saved_);
    train(*client, 2);
  }
  std::string damaged;
  for (const auto& entry : fs::recursive_directory_iterator(saved_)) {
    if (entry.path().filename() != "table.0" ||
        entry.path().parent_path().filename() != "server-1-of-2")
      continue;
    damaged = entry.path().string();
    std::fstream file(damaged, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(fs::file_size(entry.path()) / 2));
    file.write("damage", 6);
  }
  ASSERT_NE(damaged, "");
  const std::string refused = message_of<ConfigError>([&] { join(saved_); });
  EXPECT_NE(refused.find("cannot roll back: " + damaged), std::string::npos) << refused;
  EXPECT_THROW(join(), c10::DistError);
  for (const int server : {0, 1}) cluster_.restart(server);
  if (GetParam() == Mode::kSync) {
    EXPECT_EQ(message_of<c10::ValueError>([&] { join(); }),
              "client: in-process:0 is at step 3, in-process:1 at step 5: expected one step of all "
              "servers, which may go back to a checkpoint");
  }
  EXPECT_THROW(join(cluster_.path("none")), ConfigError);
  EXPECT_EQ(rows(*join(good)), then);
}

// With one server a push confirms its step, in the server's memory alone. The step must close although
// the server restarts and trainer 0 pushes nothing more.
TEST(RestartedServerTest, AStepThatIsOpenThenCloses) {
  const JobOptions job = ledger_job(2, 1, Mode::kSync);
  Cluster cluster(1, {.trainer_timeout = std::chrono::seconds(60)});
  const auto first = cluster.client(0, job), second = cluster.client(1, job);
  const std::vector<uint64_t> ids{1, 2};
  const std::vector<float> gradients(4, 1);
  const PushRows pushed{0, ids, gradients};
  const auto push = [&](Client& client) {
    client.push(std::span(&pushed, 1), {});
    client.flush();
  };
  push(*first);
  cluster.restart(0);
  push(*second);
  std::vector<float> rows(4);
  const PullRows asked{0, ids, rows};
  second->pull(std::span(&asked, 1), {}).wait();
  EXPECT_EQ(rows, std::vector<float>(4, -2));
}

// It rejects trainers until a rollback succeeds, also after the trainer timeout has passed.
TEST(RestartedServerTest, AServerThatCouldNotGoBackAnswers) {
  const JobOptions job = ledger_job(1, 1, Mode::kAsync);
  Cluster cluster(1, {.on_trainer_loss = OnTrainerLoss::kContinue,
                      .trainer_timeout = std::chrono::milliseconds(2'000)});
  const std::string saved = cluster.path("saved"), good = cluster.path("good");
  const std::vector<uint64_t> ids{1, 2};
  const std::vector<float> gradients(4, 1);
  const PushRows pushed{0, ids, gradients};
  auto client = cluster.client(0, job);
  for (const std::string& folder : {good, saved}) {
    client->push(std::span(&pushed, 1), {});
    client->flush();
    client->save(folder);
  }
  for (const auto& entry : fs::recursive_directory_iterator(saved))
    if (entry.path().filename() == "table.0") fs::resize_file(entry.path(), 10);
  client->push(std::span(&pushed, 1), {});
  client->flush();
  EXPECT_THROW(cluster.client(0, job, quick_link(), saved), ConfigError);
  std::this_thread::sleep_for(std::chrono::seconds(3));
  EXPECT_EQ(cluster.ask(0, {.call = Call::kStatus}).code, Code::kOk);
  std::vector<float> rows(4);
  const PullRows asked{0, ids, rows};
  cluster.client(0, job, quick_link(), good)->pull(std::span(&asked, 1), {}).wait();
  EXPECT_EQ(rows, std::vector<float>(4, -1));
}

}  // namespace restore_test
}  // namespace cohort::ps
