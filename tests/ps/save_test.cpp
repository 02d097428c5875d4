// SPDX-License-Identifier: Apache-2.0
// What a save must not do: mix steps, hold its trainer up for ever, lose the rows on disk.
#include <algorithm>
#include <atomic>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <future>
#include <gtest/gtest.h>
#include <memory>
#include <numeric>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/fd.h"
#include "cohort/ps/client/local_channel.h"
#include "cohort/ps/table/pages.h"

#include "tests/ps/cluster.h"
#include "tests/ps/disk_calls.h"
#include "tests/ps/file_size_limit.h"
#include "tests/support/eventually.h"
#include "tests/support/message_of.h"
#include "tests/support/resident.h"

namespace cohort::ps {
namespace save_test {

namespace fs = std::filesystem;
using cohort::test::message_of;

Request save_request(Call call, uint64_t nonce, const std::string& folder, uint64_t step = 0) {
  return {.call = call, .trainer = 0, .step = step, .nonce = nonce, .text = folder};
}

// The last word on a request that a busy machine may make a server put off.
Reply final_answer(Cluster& cluster, int server, const Request& request) {
  Reply reply = cluster.ask(server, request);
  for (int i = 0; i < 60 && reply.code == Code::kNotYet; ++i) reply = cluster.ask(server, request);
  return reply;
}

void push_a_step(Client& client) {
  const std::vector<uint64_t> ids{1, 2, 3, 4, 5, 6, 7, 8};
  const std::vector<float> gradients(2 * ids.size(), -1);
  const PushRows pushed{0, ids, gradients};
  client.push(std::span(&pushed, 1), {});
  client.flush();
}

std::string first_line_of(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  return paths;
}

// Its trainer was declared lost, say, and the steps continued.
TEST(SaveTest, AStepThatIsOverIsNotSavedAsALaterOne) {
  Cluster cluster(1);
  const auto client = cluster.client(0, ledger_job(1, 1, Mode::kSync));
  const std::string folder = cluster.path("checkpoint");
  push_a_step(*client);
  ASSERT_EQ(final_answer(cluster, 0, save_request(Call::kSave, 7, folder, 1)).code, Code::kOk);
  push_a_step(*client);
  const Reply reply = final_answer(cluster, 0, save_request(Call::kSave, 9, folder, 1));
  EXPECT_EQ(reply.code, Code::kFailed);
  EXPECT_EQ(reply.text, "save: expected the state after step 1, it is that after step 2");
  EXPECT_EQ(final_answer(cluster, 0, save_request(Call::kSave, 7, folder, 1)).code, Code::kOk)
      << "it was saved in time";
}

TEST(SaveTest, PartsOfDifferentStepsReplaceNoCheckpoint) {
  Cluster two(2);
  const auto client = two.client(0, ledger_job(1, 2, Mode::kSync));
  const std::string folder = two.path("checkpoint");
  push_a_step(*client);
  client->save(folder);
  const std::string good = first_line_of(folder + "/checkpoint");
  ASSERT_EQ(final_answer(two, 0, save_request(Call::kSave, 7, folder, 1)).code, Code::kOk);
  push_a_step(*client);
  ASSERT_EQ(final_answer(two, 1, save_request(Call::kSave, 7, folder, 2)).code, Code::kOk);
  const Reply reply = two.ask(0, save_request(Call::kFinishSave, 7, folder));
  EXPECT_EQ(reply.code, Code::kInvalid);
  EXPECT_EQ(reply.text, folder +
                            "/save-0000000000000007: server-0-of-2 is the state after step 1, "
                            "server-1-of-2 that after step 2");
  EXPECT_EQ(first_line_of(folder + "/checkpoint"), good);
}

// Stands for what the forked child of a snapshot or a save does to the block's `weights`.
class BlockOfAChild final : public BlockStore {
 public:
  BlockOfAChild(int64_t elements, void (*in_child)())
      : weights_(static_cast<size_t>(elements)), in_child_(in_child) {}
  std::span<const float> weights() const override {
    if (::getpid() != parent_) in_child_();
    return weights_;
  }
  std::span<const float> state() const override { return {}; }
  void set_weights(std::span<const float> weights) override {
    weights_.assign(weights.begin(), weights.end());
  }
  void set_state(std::span<const float> /*state*/) override {}
  void update(int64_t /*step*/, std::span<const float> /*gradient*/) override {}

 private:
  const pid_t parent_ = ::getpid();
  std::vector<float> weights_;
  void (*const in_child_)();
};

JobOptions job_with_a_block(Mode mode) {
  JobOptions job = ledger_job(1, 1, mode);
  job.blocks = {{.parameter = "p", .begin = 0, .end = 4, .server = 0}};
  return job;
}

void initialise(Client& client) {
  const std::vector<float> zeros(4);
  const std::span<const float> view(zeros);
  client.initialise(std::span(&view, 1));
}

TEST(SaveTest, AChildThatEndsWellWithoutAResultCostsNothing) {
  Cluster cluster(1, {.make_block =
                          [](const RuleOptions&, int64_t elements) {
                            return std::make_unique<BlockOfAChild>(elements, [] { ::_exit(0); });
                          },
                      .snapshot_log_bytes = 1});
  const auto client = cluster.client(0, job_with_a_block(Mode::kAsync));
  initialise(*client);
  push_a_step(*client);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (entries_of(cluster.folder(0) + "/log").size() < 2 &&
         std::chrono::steady_clock::now() < until)
    std::this_thread::yield();
  ASSERT_GE(entries_of(cluster.folder(0) + "/log").size(), 2U) << "no snapshot was begun";
  // A save waits for the snapshot's end, and ends the same way.
  const std::string folder = cluster.path("checkpoint");
  const Reply reply = final_answer(cluster, 0, save_request(Call::kSave, 7, folder));
  EXPECT_EQ(reply.code, Code::kNotWritten);
  EXPECT_EQ(reply.text, folder + "/save-0000000000000007/server-0-of-1: it was not written");
  cluster.restart(0);
  push_a_step(*client);
  const std::vector<uint64_t> ids{1};
  std::vector<float> row(2);
  const PullRows asked{0, ids, row};
  client->pull(std::span(&asked, 1), {}).wait();
  EXPECT_EQ(row[0], 2);
}

// What a test and the forked child of its server say to each other.
struct SharedFlags {
  std::atomic<bool> is_forked, may_end;
};
SharedFlags& flags_of_child() {
  static auto* const flags = new (::mmap(nullptr, sizeof(SharedFlags), PROT_READ | PROT_WRITE,
                                         MAP_SHARED | MAP_ANONYMOUS, -1, 0)) SharedFlags{};
  return *flags;
}

// Where the system has huge pages for it at all.
TEST(SaveTest, ATableIsInHugePagesAgainAfterASave) {
  constexpr auto kLimit = std::chrono::seconds(10);  // The kernel's own thread would take 30.
  flags_of_child();
  const auto hold_child = [] {
    flags_of_child().is_forked = true;
    while (!flags_of_child().may_end) ::usleep(1000);
  };
  Cluster cluster(1, {.make_block =
                          [&](const RuleOptions&, int64_t elements) {
                            return std::make_unique<BlockOfAChild>(elements, hold_child);
                          },
                      .durability = Durability::kApplied});
  LinkOptions link = quick_link();  // A push takes seconds under the thread sanitizer.
  link.attempt_timeout = link.server_timeout = std::chrono::milliseconds(120'000);
  const auto client = cluster.client(0, job_with_a_block(Mode::kAsync), link);
  initialise(*client);
  std::vector<uint64_t> ids(1 << 21);
  std::iota(ids.begin(), ids.end(), 0);
  const std::vector<float> gradients(2 * ids.size(), -1);
  const auto push_all_rows = [&] {
    const PushRows pushed{0, ids, gradients};
    client->push(std::span(&pushed, 1), {});
    client->flush();
  };
  push_all_rows();
  const int64_t before = test::huge_bytes();
  auto saved = std::async(std::launch::async, [&] {
    return final_answer(cluster, 0, save_request(Call::kSave, 7, cluster.path("checkpoint")));
  });
  while (!flags_of_child().is_forked &&
         saved.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
  }
  push_all_rows();
  EXPECT_TRUE(before == 0 || test::huge_bytes() < before)
      << "the fork splits no pages: is this still needed?";
  flags_of_child().may_end = true;
  EXPECT_EQ(saved.get().code, Code::kOk);
  // The kernel may find a page in use.
  const int64_t enough = before - 2 * static_cast<int64_t>(kHugePage);
  EXPECT_TRUE(test::eventually([&] { return test::huge_bytes() >= enough; }, kLimit))
      << test::huge_bytes() << " of " << before;
}

// What the system refuses once it may refuse for ever: the trainer hears of it.
// A client that may ask a server for a save chooses the folder.
TEST(SaveTest, NothingIsWrittenOutsideOfTheRoot) {
  const ScratchFolder scratch;
  const std::string root = scratch.path("root"), outside = scratch.path("outside");
  fs::create_directories(root);
  fs::create_directories(outside);
  fs::create_symlink(outside, root + "/link");
  Cluster cluster(1, {.save_root = root});
  const auto client = cluster.client(0, ledger_job(1, 1, Mode::kAsync));
  push_a_step(*client);
  for (const std::string& folder :
       {outside, root + "/../outside", root + "/link/below", root + "beside", std::string("/")}) {
    for (const Call call : {Call::kSave, Call::kFinishSave}) {
      const Reply reply = cluster.ask(0, save_request(call, 7, folder));
      EXPECT_EQ(reply.code, Code::kInvalid) << folder;
      EXPECT_EQ(reply.text.find("save: " + folder + ": expected a folder below "), 0U)
          << reply.text;
    }
  }
  EXPECT_TRUE(fs::is_empty(outside));
  // Of the server's working folder; nothing of it is there.
  const Reply relative = cluster.ask(0, save_request(Call::kSave, 7, "not-there/deep"));
  EXPECT_EQ(relative.code, Code::kInvalid);
  Cluster here(1, {.save_root = fs::current_path().string()});
  const auto neighbour = here.client(0, ledger_job(1, 1, Mode::kAsync));
  push_a_step(*neighbour);
  const std::string name = "save_test-" + std::to_string(::getpid());
  neighbour->save(name + "/deep");
  EXPECT_TRUE(fs::exists(name + "/deep/checkpoint"));
  fs::remove_all(name);
  client->save(root + "/not/there/yet");
  EXPECT_TRUE(fs::exists(root + "/not/there/yet/checkpoint"));
}

// Of a trainer that waits this long for others.
LinkOptions impatient_link(std::chrono::milliseconds trainer_timeout) {
  LinkOptions link = quick_link();
  link.trainer_timeout = trainer_timeout;
  return link;
}

// What a save does for two seconds, and twice: it writes. Or it stands still until it is killed.
void write_slowly() {
  const Fd file(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  for (int i = 0; i < 20; ++i) {
    if (::write(file.get(), "x", 1) != 1) ::_exit(1);
    ::usleep(100'000);
  }
}

void stand_still() {
  ::sleep(300);
}

ServerOptions with_child(void (*in_child)()) {
  return {.make_block = [in_child](const RuleOptions&, int64_t elements) {
    return std::make_unique<BlockOfAChild>(elements, in_child);
  }};
}

// Nor do the pulls that wait for the step of the trainer that saves.
TEST(SaveTest, WhileACheckpointGrowsNobodyIsGivenUp) {
  const disk_calls::ReplacedSyncs syncs(0);
  Cluster cluster(1, with_child(write_slowly));
  JobOptions job = job_with_a_block(Mode::kSync);
  job.trainers = 2;
  const auto link = impatient_link(std::chrono::milliseconds(2'500));
  const auto saver = cluster.client(0, job, link), other = cluster.client(1, job, link);
  initialise(*saver);
  const auto step = [](Client& client) {
    const std::vector<uint64_t> ids{1};
    const std::vector<float> gradients(2, -1);
    const PushRows pushed{0, ids, gradients};
    const std::vector<float> zeros(4);
    const std::span<const float> block(zeros);
    client.push(std::span(&pushed, 1), {block});
  };
  std::thread first([&] { step(*saver); });
  step(*other);
  first.join();
  saver->flush();
  other->flush();
  auto saved = std::async(std::launch::async, [&] {
    const auto began = std::chrono::steady_clock::now();
    saver->save(cluster.path("checkpoint"));
    const auto took = std::chrono::steady_clock::now() - began;
    step(*saver);
    saver->flush();
    return took;
  });
  step(*other);
  const std::vector<uint64_t> ids{1};
  std::vector<float> weights(2);
  const PullRows rows{.table = 0, .ids = ids, .weights = weights};
  EXPECT_NO_THROW(other->pull(std::span(&rows, 1), {}).wait());
  EXPECT_EQ(weights[0], 4);
  EXPECT_GT(saved.get(), std::chrono::milliseconds(3'500));
}

TEST(SaveTest, ACheckpointThatDoesNotGrowIsGivenUp) {
  Cluster cluster(1, with_child(stand_still));
  const auto client = cluster.client(0, job_with_a_block(Mode::kAsync),
                                     impatient_link(std::chrono::milliseconds(2'500)));
  initialise(*client);
  const std::string text =
      message_of<c10::DistError>([&] { client->save(cluster.path("checkpoint")); });
  EXPECT_NE(text.find(" s: a checkpoint is being written"), std::string::npos) << text;
}

TEST(SaveTest, WhatCannotBeginOrBeFinishedIsAnError) {
  std::atomic<bool> broken{false};
  class Block final : public BlockStore {
   public:
    explicit Block(const std::atomic<bool>& is_broken) : broken_(is_broken) {}
    std::span<const float> weights() const override {
      TORCH_CHECK(!broken_, "fork: Cannot allocate memory");
      return weights_;
    }
    std::span<const float> state() const override { return {}; }
    void set_weights(std::span<const float> /*weights*/) override {}
    void set_state(std::span<const float> /*state*/) override {}
    void update(int64_t /*step*/, std::span<const float> /*gradient*/) override {}

   private:
    const std::atomic<bool>& broken_;
    const std::vector<float> weights_ = std::vector<float>(4);
  };
  Cluster cluster(1, {.make_block = [&](const RuleOptions&, int64_t) {
                    return std::make_unique<Block>(broken);
                  }});
  const auto client = cluster.client(0, job_with_a_block(Mode::kAsync));
  initialise(*client);
  const std::string folder = cluster.path("checkpoint");
  broken = true;
  const Reply save = final_answer(cluster, 0, save_request(Call::kSave, 7, folder));
  EXPECT_EQ(save.code, Code::kNotWritten);
  EXPECT_NE(save.text.find("fork: Cannot allocate memory"), std::string::npos) << save.text;
  broken = false;
  ASSERT_EQ(final_answer(cluster, 0, save_request(Call::kSave, 7, folder)).code, Code::kOk);
  {
    const FileSizeLimit full(1);
    const Reply finish = cluster.ask(0, save_request(Call::kFinishSave, 7, folder));
    EXPECT_EQ(finish.code, Code::kNotWritten);
    EXPECT_NE(finish.text.find("File too large"), std::string::npos) << finish.text;
  }
  EXPECT_EQ(cluster.ask(0, save_request(Call::kFinishSave, 7, folder)).code, Code::kOk);
}

// Brings no request to save before `others` is ready (20 seconds).
class PatientChannel : public Channel {
 public:
  PatientChannel(std::unique_ptr<Channel> channel, std::shared_future<void> others)
      : channel_(std::move(channel)), others_(std::move(others)) {}

  void send(const Request& request, int64_t timeout_ms, Done done) override {
    if (request.call != Call::kSave) return channel_->send(request, timeout_ms, std::move(done));
    call_ = std::jthread([this, request, timeout_ms, done = std::move(done)] {
      if (others_.wait_for(std::chrono::seconds(20)) == std::future_status::ready)
        return channel_->send(request, timeout_ms, done);
      done({.code = Code::kFailed, .text = "no other server was asked"});
    });
  }

 private:
  const std::unique_ptr<Channel> channel_;
  const std::shared_future<void> others_;
  std::jthread call_;
};

class NotingChannel : public Channel {
 public:
  NotingChannel(std::unique_ptr<Channel> channel, std::promise<void>& noted)
      : channel_(std::move(channel)), noted_(noted) {}

  void send(const Request& request, int64_t timeout_ms, Done done) override {
    if (request.call == Call::kSave && !was_noted_.exchange(true)) noted_.set_value();
    channel_->send(request, timeout_ms, std::move(done));
  }

 private:
  const std::unique_ptr<Channel> channel_;
  std::promise<void>& noted_;
  std::atomic<bool> was_noted_ = false;
};

TEST(SaveTest, AllServersWriteTheirPartsAtOnce) {
  Cluster two(2);
  std::promise<void> noted;
  const auto others = noted.get_future().share();
  const JobOptions job = ledger_job(1, 2, Mode::kAsync);
  Client client({.servers = {"first", "second"}, .trainer = 0, .link = quick_link()}, job,
                [&](int server) -> std::unique_ptr<Channel> {
                  if (server == 0) return std::make_unique<PatientChannel>(two.channel(0), others);
                  return std::make_unique<NotingChannel>(two.channel(1), noted);
                });
  EXPECT_EQ(message_of<c10::Error>([&] { client.save(two.path("checkpoint")); }),
            "nothing was thrown");
}

// Half a megabyte in memory, the others on disk.
JobOptions spilling_job(int servers) {
  JobOptions job = ledger_job(1, servers, Mode::kAsync);
  job.tables[0].memory_cap_bytes = 1 << 19;
  job.tables[0].at_cap = AtCap::kSpill;
  return job;
}

void push_many_rows(Client& client) {
  std::vector<uint64_t> ids(40'000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = i;
  const std::vector<float> gradients(2 * ids.size(), -1);
  const PushRows pushed{0, ids, gradients};
  client.push(std::span(&pushed, 1), {});
  client.flush();
}

TEST(SaveTest, ACheckpointWithoutItsRowsOnDiskIsRefused) {
  Cluster saved(1);
  const std::string folder = saved.path("checkpoint");
  {
    const auto client = saved.client(0, spilling_job(1));
    push_many_rows(*client);
    client->save(folder);
  }
  fs::path part;
  for (const fs::path& path : entries_of(folder)) {
    if (fs::is_directory(path)) part = path / "server-0-of-1";
  }
  fs::rename(part / "cold.0", saved.path("elsewhere"));
  {
    Cluster loaded(1, {.load = folder});
    EXPECT_EQ(message_of<c10::Error>([&] { loaded.client(0, spilling_job(1)); }),
              "server 0 (in-process:0): spill store: expected a checkpoint, found no folder " +
                  (part / "cold.0").string());
  }
  // There, but empty.
  fs::create_directory(part / "cold.0");
  Cluster loaded(1, {.load = folder});
  EXPECT_NE(message_of<c10::Error>([&] { loaded.client(0, spilling_job(1)); }),
            "nothing was thrown");
}

TEST(SaveTest, ASnapshotWithoutItsRowsOnDiskIsRefused) {
  Cluster cluster(1, {.snapshot_log_bytes = 1});
  const auto client = cluster.client(0, spilling_job(1));
  push_many_rows(*client);
  fs::path snapshot;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  // Of the push, whose number is 3.
  while (!fs::exists(snapshot) && std::chrono::steady_clock::now() < until)
    snapshot = cluster.folder(0) + "/snapshot.3";
  ASSERT_TRUE(fs::exists(snapshot));
  cluster.end(0);
  fs::rename(snapshot / "cold.0", cluster.path("elsewhere"));
  EXPECT_EQ(
      message_of<ConfigError>([&] { cluster.start(0); }),
      "spill store: expected a checkpoint, found no folder " + (snapshot / "cold.0").string());
  fs::rename(cluster.path("elsewhere"), snapshot / "cold.0");
  cluster.start(0);
  const std::vector<uint64_t> ids{39'999};
  std::vector<float> row(2);
  const PullRows asked{0, ids, row};
  client->pull(std::span(&asked, 1), {}).wait();
  EXPECT_EQ(row[0], 1);
}

}  // namespace save_test
}  // namespace cohort::ps
