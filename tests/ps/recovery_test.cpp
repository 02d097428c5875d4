// SPDX-License-Identifier: Apache-2.0
// What a server has acknowledged is there when it is started again; what is damaged is refused.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <stdexcept>
#include <thread>

#include "cohort/base/error.h"

#include "tests/ps/cluster.h"
#include "tests/ps/disk_calls.h"
#include "tests/ps/file_size_limit.h"
#include "tests/support/message_of.h"

namespace cohort::ps {
namespace recovery_test {

namespace fs = std::filesystem;
using cohort::test::message_of;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr uint64_t kIds = 200;

// Dense Adam in three blocks, rows under row-wise Adagrad: all have state.
JobOptions dense_job(int servers) {
  JobOptions job{.mode = Mode::kAsync,
                 .servers = servers,
                 .dense_rule = {.rule = Rule::kAdam, .learning_rate = 0.1f},
                 .tables = {{.name = "rows",
                             .width = 3,
                             .rule = {.rule = Rule::kRowwiseAdagrad, .learning_rate = 0.1f},
                             .initializer = {.scale = 1}}}};
  const std::vector<std::vector<int64_t>> cuts{{0, 50}, {0, 7, 50}, {0, 1, 33, 50}};
  const auto& cut = cuts[static_cast<size_t>(servers - 1)];
  for (size_t i = 0; i + 1 < cut.size(); ++i)
    job.blocks.push_back({"w", cut[i], cut[i + 1], static_cast<int>(i)});
  return job;
}

struct Model {
  std::vector<float> parameter = std::vector<float>(50);
  std::vector<uint64_t> ids = std::vector<uint64_t>(kIds);
  std::vector<float> rows = std::vector<float>(kIds * 3);

  Model() {
    for (uint64_t id = 0; id < kIds; ++id) ids[id] = id;
  }
  bool operator==(const Model&) const = default;
};

void train(Client& client, int steps) {
  Model gradients;
  for (int step = 0; step < steps; ++step) {
    for (size_t i = 0; i < 50; ++i)
      gradients.parameter[i] = static_cast<float>((i * 7 + static_cast<size_t>(step)) % 13) - 6;
    for (size_t i = 0; i < kIds * 3; ++i)
      gradients.rows[i] = static_cast<float>((i * 5 + static_cast<size_t>(step)) % 11) - 5;
    const PushRows rows{0, gradients.ids, gradients.rows};
    client.push(std::span(&rows, 1), {std::span<const float>(gradients.parameter)});
  }
  client.flush();
}

void initialise(Client& client) {
  if (!client.needs_initial_values()) return;
  const std::vector<float> zeros(50);
  const std::span<const float> view(zeros);
  client.initialise(std::span(&view, 1));
}

Model model_of(Client& client) {
  Model model;
  const PullRows rows{0, model.ids, model.rows};
  client.pull(std::span(&rows, 1), {std::span<float>(model.parameter)}).wait();
  return model;
}

std::vector<fs::path> entries_of(const fs::path& folder, const std::string& prefix) {
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename().string().starts_with(prefix) &&
        entry.path().extension() != ".unfinished")
      paths.push_back(entry.path());
  }
  return paths;
}

// For minutes: a snapshot is synced, which takes long on a busy disk.
void await(const Cluster& cluster, const std::function<bool()>& condition) {
  const auto until = steady_clock::now() + std::chrono::minutes(5);
  while (!condition()) {
    if (steady_clock::now() > until)
      throw std::runtime_error("waited 5 minutes; the servers' log:\n" + cluster.log());
    std::this_thread::sleep_for(milliseconds(10));
  }
}

TEST(RecoveryTest, TheLogAloneGivesTheStateBack) {
  Cluster cluster(1);
  const auto client = cluster.client(0, dense_job(1));
  initialise(*client);
  train(*client, 20);
  const Model before = model_of(*client);
  cluster.restart(0);
  EXPECT_EQ(model_of(*client), before);
  train(*client, 5);

  Cluster undisturbed(1);
  // The same steps without a restart: state that no pull shows came back, too.
  const auto other = undisturbed.client(0, dense_job(1));
  initialise(*other);
  train(*other, 20);
  train(*other, 5);
  EXPECT_EQ(model_of(*client), model_of(*other));
}

// 20 pushes to server 0, until it has a snapshot and no log before it; it makes no other.
void train_to_the_last_snapshot(Cluster& cluster, Client& client) {
  initialise(client);
  train(client, 20);
  await(cluster, [&] { return !entries_of(cluster.folder(0), "snapshot.").empty(); });
  await(cluster, [&] { return entries_of(cluster.folder(0) + "/log", "0").size() == 1; });
  cluster.options(0).snapshot_log_bytes = 0;
}

TEST(RecoveryTest, ASnapshotAndTheLogBehindItGiveTheStateBack) {
  Cluster cluster(1, {.snapshot_log_bytes = 20'000});
  const auto client = cluster.client(0, dense_job(1));
  train_to_the_last_snapshot(cluster, *client);
  cluster.restart(0);
  train(*client, 3);
  const Model before = model_of(*client);
  const auto snapshots = entries_of(cluster.folder(0), "snapshot.");
  cluster.restart(0);
  EXPECT_EQ(model_of(*client), before);
  EXPECT_EQ(entries_of(cluster.folder(0), "snapshot."), snapshots);
  train(*client, 3);
}

TEST(RecoveryTest, PushesOfAnOpenStepAreInTheSnapshot) {
  Cluster cluster(1, {.on_trainer_loss = OnTrainerLoss::kWait, .snapshot_log_bytes = 1});
  const JobOptions job = ledger_job(2, 1, Mode::kSync);
  RawTrainer first(cluster, job, 0, 1);
  RawTrainer second(cluster, job, 1, 2);
  ASSERT_EQ(cluster.ask(0, first.push(1)).code, Code::kOk);
  ASSERT_EQ(cluster.ask(0, first.push(2)).code, Code::kOk);
  await(cluster, [&] { return !entries_of(cluster.folder(0), "snapshot.5").empty(); });
  cluster.restart(0);
  first.header.server_incarnation = second.header.server_incarnation = 2;
  EXPECT_EQ(cluster.ask(0, first.push(2)).code, Code::kOk) << "it is there already";
  ASSERT_EQ(cluster.ask(0, second.push(1)).code, Code::kOk);
  EXPECT_EQ(first.weight(1), 2);
  ASSERT_EQ(cluster.ask(0, second.push(2)).code, Code::kOk);
  EXPECT_EQ(first.weight(1), 4);
}

TEST(RecoveryTest, WhenATrainerCameIsInTheSnapshot) {
  Cluster cluster(1, {.on_trainer_loss = OnTrainerLoss::kWait, .snapshot_log_bytes = 1});
  const JobOptions job = ledger_job(1, 1, Mode::kSync);
  RawTrainer first(cluster, job, 0, 1);
  ASSERT_EQ(cluster.ask(0, first.push(1)).code, Code::kOk);
  EXPECT_EQ(RawTrainer(cluster, job, 1, 2).joined.joined_after, 1U);
  await(cluster, [&] { return !entries_of(cluster.folder(0), "snapshot.5").empty(); });
  cluster.restart(0);
  EXPECT_EQ(RawTrainer(cluster, job, 1, 3).joined.joined_after, 1U);
}

class CheckpointTest : public testing::TestWithParam<int> {};

TEST_P(CheckpointTest, TwoServersCheckpointIsLoadedByAnyNumber) {
  const int servers = GetParam();
  Cluster two(2);
  const auto client = two.client(0, dense_job(2));
  initialise(*client);
  train(*client, 10);
  client->save(two.path("checkpoint"));
  const Model saved = model_of(*client);
  train(*client, 5);
  const Model later = model_of(*client);

  Cluster loaded(servers, {.load = two.path("checkpoint")});
  const auto other = loaded.client(0, dense_job(servers));
  EXPECT_FALSE(other->needs_initial_values());
  EXPECT_EQ(model_of(*other), saved);
  train(*other, 5);  // The optimizers' state came along.
  EXPECT_EQ(model_of(*other), later);
  for (int server = 0; server < servers; ++server) loaded.restart(server);
  EXPECT_EQ(model_of(*other), later);
}

INSTANTIATE_TEST_SUITE_P(Servers, CheckpointTest, testing::Values(1, 2, 3));

TEST(RecoveryTest, ACheckpointOfAParameterOfAnotherSizeIsRefused) {
  Cluster one(1);
  const auto client = one.client(0, dense_job(1));
  initialise(*client);
  const std::string folder = one.path("checkpoint");
  client->save(folder);
  for (const int64_t size : {20, 80}) {
    Cluster again(1, {.load = folder});
    JobOptions job = dense_job(1);
    job.blocks = {{"w", 0, size, 0}};
    const std::string text =
        again.ask(0, {.call = Call::kJob, .trainer = 0, .text = job.to_json()}).text;
    EXPECT_NE(text.find("parameter 'w': expected " + std::to_string(size) +
                        " elements as in the job, found 50"),
              std::string::npos)
        << text;
  }
}

// At a checkpoint of the size of a disk, that is what a load takes.
TEST(RecoveryTest, AServerReadsTheRowsOfThePartsThatHoldItsOwn) {
  Cluster two(2);
  const JobOptions job = ledger_job(1, 2, Mode::kAsync);
  const std::string folder = two.path("checkpoint");
  {
    const auto client = two.client(0, job);
    std::vector<uint64_t> ids(100);
    std::iota(ids.begin(), ids.end(), 0);
    const std::vector<float> gradients(2 * ids.size(), -1);
    const PushRows pushed{0, ids, gradients};
    client->push(std::span(&pushed, 1), {});
    client->save(folder);
  }
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string path = entry.path().string();
    if (path.find("server-1-of-2") == std::string::npos ||
        entry.path().filename().string().find("table") == std::string::npos)
      continue;
    fs::resize_file(path, fs::file_size(path) / 2);
  }
  Cluster again(2, {.load = folder});
  const Request set_job{.call = Call::kJob, .trainer = 0, .text = job.to_json()};
  EXPECT_EQ(again.ask(0, set_job).code, Code::kOk);
  EXPECT_NE(again.ask(1, set_job).code, Code::kOk);
}

// A checkpoint that takes longer than one sending of the request is written once, not for ever.
TEST(RecoveryTest, ACheckpointMayTakeLongerThanAnAttempt) {
  const disk_calls::ReplacedSyncs syncs(50'000);  // Of which each save makes several.
  Cluster cluster(1);
  LinkOptions link = quick_link();
  link.attempt_timeout = milliseconds(20);
  const auto client = cluster.client(0, ledger_job(1, 1, Mode::kAsync), link);
  const auto began = steady_clock::now();
  client->save(cluster.path("checkpoint"));
  EXPECT_GT(steady_clock::now() - began, 2 * link.attempt_timeout);
  client->save(cluster.path("checkpoint"));  // Over the first.
  EXPECT_LT(steady_clock::now() - began, std::chrono::seconds(15)) << "a server has 20 s";
  EXPECT_EQ(entries_of(cluster.path("checkpoint"), "").size(), 2U) << "one save and its name";
}

TEST(RecoveryTest, AnIncompleteCheckpointIsNamed) {
  Cluster two(2);
  const auto client = two.client(0, ledger_job(1, 2, Mode::kAsync));
  const std::string folder = two.path("checkpoint");
  client->save(folder);
  const fs::path save = entries_of(folder, "save-").at(0);
  fs::remove_all(save / "server-1-of-2");
  EXPECT_EQ(message_of<ConfigError>([&] { Cluster(1, {.load = folder}); }),
            save.string() + ": the part of server 1 is missing: server-1-of-2");
  EXPECT_EQ(message_of<ConfigError>([&] { Cluster(1, {.load = two.path("nothing")}); }),
            two.path("nothing") + ": expected a checkpoint of servers, found none");
  std::ofstream(folder + "/checkpoint") << "save-7\n";
  EXPECT_EQ(message_of<ConfigError>([&] { Cluster(1, {.load = folder}); }),
            folder + "/checkpoint: expected the name of a save, save-<16 digits>");
}

Model loaded_model(const std::string& checkpoint) {
  Cluster one(1, {.load = checkpoint});
  return model_of(*one.client(0, dense_job(1)));
}

// A trainer may be killed between the servers' parts of its second save.
TEST(RecoveryTest, UntilASaveIsWholeTheOneBeforeItLoads) {
  Cluster two(2);
  const auto client = two.client(0, dense_job(2));
  const std::string folder = two.path("checkpoint");
  initialise(*client);
  train(*client, 2);
  client->save(folder);
  const Model first = model_of(*client);
  train(*client, 3);
  const Model second = model_of(*client);
  const auto ask = [&](int server, Call call) {
    return two.ask(server, {.call = call, .trainer = 0, .nonce = 7, .text = folder});
  };

  ASSERT_EQ(ask(0, Call::kSave).code, Code::kOk);
  EXPECT_EQ(loaded_model(folder), first);
  const Reply refused = ask(0, Call::kFinishSave);
  EXPECT_EQ(refused.code, Code::kInvalid);
  EXPECT_EQ(refused.text, folder +
                              "/save-0000000000000007: the part of server 1 is missing: "
                              "server-1-of-2");
  ASSERT_EQ(ask(1, Call::kSave).code, Code::kOk);
  EXPECT_EQ(loaded_model(folder), first);
  ASSERT_EQ(ask(0, Call::kFinishSave).code, Code::kOk);
  EXPECT_EQ(loaded_model(folder), second);
  EXPECT_EQ(entries_of(folder, "save-").size(), 1U);
}

// A message may come twice, the second time late.
TEST(RecoveryTest, WhatIsSaidAgainOfAFinishedSaveChangesNeitherItNorTheNextOne) {
  Cluster cluster(1);
  const auto client = cluster.client(0, dense_job(1));
  initialise(*client);
  train(*client, 2);
  const Model first = model_of(*client);
  const std::string folder = cluster.path("checkpoint");
  const auto ask = [&](Call call, uint64_t nonce) {
    return cluster.ask(0, {.call = call, .trainer = 0, .nonce = nonce, .text = folder}).code;
  };
  ASSERT_EQ(ask(Call::kSave, 7), Code::kOk);
  ASSERT_EQ(ask(Call::kFinishSave, 7), Code::kOk);
  train(*client, 2);
  ASSERT_EQ(ask(Call::kSave, 9), Code::kOk);
  EXPECT_EQ(ask(Call::kSave, 7), Code::kOk);
  EXPECT_EQ(ask(Call::kFinishSave, 7), Code::kOk);
  EXPECT_EQ(loaded_model(folder), first);
  EXPECT_EQ(ask(Call::kFinishSave, 9), Code::kOk);
  EXPECT_EQ(ask(Call::kFinishSave, 7), Code::kInvalid);
  ASSERT_EQ(entries_of(folder, "save-").size(), 1U);
  EXPECT_EQ(entries_of(folder, "save-").front().filename(), "save-0000000000000009");
}

TEST(RecoveryTest, PartsOfDifferentStepsOfASyncJobAreRefused) {
  Cluster two(2);
  JobOptions job = ledger_job(1, 2, Mode::kSync);
  const auto client = two.client(0, job);
  const std::vector<uint64_t> ids{1};
  const std::vector<float> gradient(2, -1);
  const PushRows pushed{0, ids, gradient};
  std::vector<fs::path> saves;
  for (const std::string name : {"first", "second"}) {
    client->push(std::span(&pushed, 1), {});
    client->save(two.path(name));
    saves.push_back(entries_of(two.path(name), "save-").at(0));
  }
  fs::remove_all(saves[0] / "server-1-of-2");
  fs::rename(saves[1] / "server-1-of-2", saves[0] / "server-1-of-2");
  Cluster one(1, {.load = two.path("first")});
  job.servers = 1;
  EXPECT_EQ(message_of<c10::ValueError>([&] { one.client(0, job); }),
            "server 0 (in-process:0): " + (saves[0] / "server-1-of-2/state.records").string() +
                ": expected the state after step 1, like the parts before it, found that after "
                "step 2");
}

TEST(RecoveryTest, AJobThatBeganWithoutTheCheckpointIsRefused) {
  Cluster cluster(1);
  const std::string folder = cluster.path("checkpoint");
  const auto client = cluster.client(0, ledger_job(1, 1, Mode::kAsync));
  client->save(folder);
  cluster.end(0);
  cluster.options(0).load = folder;
  EXPECT_EQ(message_of<ConfigError>([&] { cluster.start(0); }),
            cluster.folder(0) + ": its job has continued without the checkpoint " + folder +
                ": expected an empty folder");
}

TEST(RecoveryTest, TheWrongFolderIsRefused) {
  Cluster cluster(2);
  const Log log({.console = LogConsole::kNever});
  EXPECT_EQ(message_of<ConfigError>(
                [&] { Server({.server = 0, .servers = 2, .folder = cluster.folder(0)}, log); }),
            cluster.folder(0) + ": another server is running in this folder");
  cluster.end(0);
  EXPECT_EQ(message_of<ConfigError>(
                [&] { Server({.server = 1, .servers = 2, .folder = cluster.folder(0)}, log); }),
            cluster.folder(0) + ": it is the folder of server 0 of 2, this is server 1 of 2");
  EXPECT_EQ(message_of<ConfigError>([&] {
              Server({.server = 0,
                      .servers = 2,
                      .folder = cluster.folder(0),
                      .durability = Durability::kApplied},
                     log);
            }),
            cluster.folder(0) +
                ": it has a log, which a server that acknowledges what is applied would forget");
}

TEST(RecoveryTest, SomebodyElsesFolderIsLeftAsItIs) {
  const ScratchFolder scratch;
  const Log log({.console = LogConsole::kNever});
  const std::string kept = scratch.path("mine/cold/rows");
  std::filesystem::create_directories(scratch.path("mine/cold"));
  std::ofstream(kept) << "rows";
  EXPECT_EQ(message_of<ConfigError>([&] { Server({.folder = scratch.path("mine")}, log); }),
            scratch.path("mine") + ": expected an empty folder, or a server's");
  EXPECT_TRUE(std::filesystem::exists(kept));
  EXPECT_FALSE(std::filesystem::exists(scratch.path("mine/lock")));
}

TEST(RecoveryTest, ASecondServerTakesNoRowsFromTheFirst) {
  Cluster cluster(1);
  const Log log({.console = LogConsole::kNever});
  std::filesystem::create_directories(cluster.folder(0) + "/cold/0");
  EXPECT_THROW(Server({.folder = cluster.folder(0)}, log), ConfigError);
  EXPECT_TRUE(std::filesystem::exists(cluster.folder(0) + "/cold/0"));
}

TEST(RecoveryTest, AFolderWhoseLogIsGoneIsNoNewOne) {
  Cluster cluster(1);
  { const auto client = cluster.client(0, ledger_job(1, 1, Mode::kSync)); }
  cluster.end(0);
  const Log log({.console = LogConsole::kNever});
  const auto refusal = [&] {
    return message_of<ConfigError>([&] { Server({.folder = cluster.folder(0)}, log); });
  };
  const std::string gone = cluster.folder(0) + ": its log is gone: expected the job that " +
                           cluster.folder(0) + "/job.json is of; an empty folder starts a new job";
  for (const auto& entry : std::filesystem::directory_iterator(cluster.folder(0) + "/log"))
    std::filesystem::resize_file(entry.path(), 0);
  EXPECT_EQ(refusal(), gone);
  std::filesystem::remove_all(cluster.folder(0) + "/log");
  EXPECT_EQ(refusal(), gone);
}

TEST(RecoveryTest, ADamagedSnapshotIsRefusedByFile) {
  Cluster cluster(1, {.snapshot_log_bytes = 20'000});
  const auto client = cluster.client(0, dense_job(1));
  train_to_the_last_snapshot(cluster, *client);
  cluster.end(0);
  const fs::path snapshot = entries_of(cluster.folder(0), "snapshot.").back();
  size_t files = 0;
  for (const fs::path& path : entries_of(snapshot, "")) {
    ++files;
    std::ifstream file(path, std::ios::binary);
    const std::string whole{std::istreambuf_iterator<char>(file), {}};
    const auto expect_refused = [&](const std::string& what, const std::string& bytes) {
      std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
      const std::string text = message_of<ConfigError>([&] { cluster.start(0); });
      EXPECT_EQ(text.find(path.string()), 0U) << what << ": " << text;
    };
    for (const size_t at : {size_t{0}, size_t{20}, whole.size() / 2, whole.size() - 1}) {
      std::string damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ 4);
      expect_refused("byte " + std::to_string(at), damaged);
    }
    for (const size_t size : {size_t{0}, size_t{10}, whole.size() / 2, whole.size() - 1})
      expect_refused("cut at " + std::to_string(size), whole.substr(0, size));
    fs::remove(path);
    EXPECT_NE(message_of<c10::Error>([&] { cluster.start(0); }).find(path.string()),
              std::string::npos);
    std::ofstream(path, std::ios::binary | std::ios::trunc) << whole;
  }
  EXPECT_EQ(files, 2U);
  cluster.start(0);
  model_of(*client);
}

TEST(RecoveryTest, ASnapshotWithoutItsLogIsRefused) {
  Cluster cluster(1, {.snapshot_log_bytes = 20'000});
  const auto client = cluster.client(0, dense_job(1));
  initialise(*client);
  train(*client, 20);
  await(cluster, [&] { return !entries_of(cluster.folder(0), "snapshot.").empty(); });
  cluster.end(0);
  fs::remove_all(cluster.folder(0) + "/log");
  const std::string text = message_of<ConfigError>([&] { cluster.start(0); });
  EXPECT_EQ(text.find(cluster.folder(0) + "/log: expected a log that continues with record "), 0U)
      << text;
}

TEST(RecoveryTest, OnAFullDiskTheServerWaitsAndGoesOn) {
  Cluster cluster(1, {.evict_period = milliseconds(100)});
  JobOptions job = ledger_job(1, 1, Mode::kAsync);
  job.tables[0].eviction.time_to_live_s = 1'000'000;  // Nothing goes, but the server logs that.
  const auto client = cluster.client(0, job);
  const auto reader = cluster.client(kNoTrainer, job);
  std::vector<uint64_t> ids{1};
  const std::vector<float> gradient(2, -1);
  std::vector<float> row(2);
  const PushRows pushed{0, ids, gradient};
  const PullRows asked{0, ids, row};
  client->push(std::span(&pushed, 1), {});
  client->flush();
  {
    const FileSizeLimit full(1);
    client->push(std::span(&pushed, 1), {});
    std::this_thread::sleep_for(milliseconds(500));  // Evictions want to be logged.
    reader->pull(std::span(&asked, 1), {}).wait();
    EXPECT_EQ(row[0], 1) << "not logged, not applied";
  }
  client->flush();
  client->pull(std::span(&asked, 1), {}).wait();
  EXPECT_EQ(row[0], 2);
  cluster.restart(0);
  client->pull(std::span(&asked, 1), {}).wait();
  EXPECT_EQ(row[0], 2);
}

size_t unfinished_in(const std::string& folder) {
  std::error_code ignored;  // Of what goes meanwhile.
  size_t count = 0;
  for (fs::recursive_directory_iterator entry(folder, ignored), end; entry != end;
       entry.increment(ignored))
    count += entry->path().extension() == ".unfinished";
  return count;
}

// Whether the error that `call` throws names the place where it was raised: a launcher prints that.
template <class Call>
bool has_stack(const Call& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.backtrace() && !error.backtrace()->get().empty();
  }
  return true;
}

TEST(RecoveryTest, WhatFoundNoRoomIsRemovedAndTriedAgain) {
  Cluster cluster(1, {.snapshot_log_bytes = 20'000});
  JobOptions job = ledger_job(1, 1, Mode::kAsync);
  job.tables[0].rule.rule = Rule::kAdam;  // A row in a snapshot is larger than in a push.
  const auto client = cluster.client(0, job);
  std::vector<uint64_t> ids(2'000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = i;
  const std::vector<float> gradients(2 * ids.size(), -1);
  const PushRows pushed{0, ids, gradients};
  const std::string checkpoint = cluster.path("checkpoint");
  {
    const FileSizeLimit full(50'000);
    client->push(std::span(&pushed, 1), {});
    client->flush();
    await(cluster, [&] { return cluster.log().find("no snapshot") != std::string::npos; });
    await(cluster, [&] { return unfinished_in(cluster.folder(0)) == 0; });
    EXPECT_TRUE(entries_of(cluster.folder(0), "snapshot.").empty());
    const std::string text = message_of<c10::Error>([&] { client->save(checkpoint); });
    EXPECT_NE(text.find("File too large"), std::string::npos) << text;
    EXPECT_FALSE(has_stack([&] { client->save(checkpoint); }));
    EXPECT_EQ(unfinished_in(checkpoint), 0U);
  }
  // No push comes: the log is due as it is.
  await(cluster, [&] { return !entries_of(cluster.folder(0), "snapshot.").empty(); });
  client->save(checkpoint);
  EXPECT_EQ(entries_of(checkpoint, "save-").size(), 1U) << "the save that failed goes, too";
}

TEST(RecoveryTest, WhatEarlierStartsLoggedCountsTowardsASnapshot) {
  Cluster cluster(1, {.snapshot_log_bytes = 20'000});
  const auto client = cluster.client(0, dense_job(1));
  initialise(*client);
  for (int start = 0; start < 3; ++start) {
    EXPECT_TRUE(entries_of(cluster.folder(0), "snapshot.").empty());
    cluster.restart(0);
    train(*client, 2);  // 9 kB.
  }
  await(cluster, [&] { return !entries_of(cluster.folder(0), "snapshot.").empty(); });
}

TEST(RecoveryTest, AServerThatAcknowledgesWhatIsAppliedHasLostAllAndSaysSo) {
  Cluster cluster(1, {.durability = Durability::kApplied});
  const auto client = cluster.client(0, ledger_job(1, 1, Mode::kAsync));
  std::vector<uint64_t> ids{1};
  std::vector<float> row(2, -1);
  const PushRows pushed{0, ids, row};
  client->push(std::span(&pushed, 1), {});
  client->flush();
  cluster.restart(0);
  EXPECT_EQ(message_of<c10::DistError>([&] {
              client->push(std::span(&pushed, 1), {});
              client->flush();
            }),
            "server 0 (in-process:0): it restarted without its state");
}

}  // namespace recovery_test
}  // namespace cohort::ps
