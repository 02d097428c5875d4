// SPDX-License-Identifier: Apache-2.0
// What ends a server and what does not: jobs it cannot serve, requests it cannot answer, memory and
// disks that are full. Whatever happens, every request gets a reply.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/ps/server/server.h"
#include "cohort/ps/server/status.h"

#include "tests/ps/cluster.h"
#include "tests/ps/file_size_limit.h"

namespace cohort::ps {
namespace server_failure_test {

using nlohmann::json;
using std::chrono::milliseconds;

json status_of(Cluster& cluster) {
  return json::parse(cluster.ask(0, {.call = Call::kStatus}).text);
}

// Four dense elements in one block beside the table of the ledger.
JobOptions block_job(int trainers, Mode mode) {
  JobOptions job = ledger_job(trainers, 1, mode);
  job.blocks = {{.parameter = "p", .begin = 0, .end = 4, .server = 0}};
  return job;
}

// A push of that block, or with `kInitialValues` its first values; without values a pull.
Request block_request(Header header, Call call, uint64_t number, uint32_t flags = 0) {
  const bool is_push = call == Call::kPush;
  const std::array<SectionShape, 1> shapes{
      SectionShape{.kind = SectionKind::kBlock, .count = 4, .has_values = is_push}};
  MessageWriter writer(shapes);
  if (is_push) std::fill(writer.values(0).begin(), writer.values(0).end(), -1.0f);
  header.kind = is_push ? MessageKind::kPush : MessageKind::kPull;
  header.flags = flags;
  (is_push ? header.sequence : header.step) = number;
  return {.call = call,
          .trainer = header.trainer,
          .message = std::make_shared<const Buffer>(writer.finish(header))};
}

// A block whose memory is gone once `broken` is set.
class BreakingBlock final : public BlockStore {
 public:
  BreakingBlock(int64_t elements, const std::atomic<bool>& broken)
      : weights_(static_cast<size_t>(elements)), broken_(broken) {}
  std::span<const float> weights() const override {
    if (broken_) throw 1;  // Not even an exception of the library.
    return weights_;
  }
  std::span<const float> state() const override { return {}; }
  void set_weights(std::span<const float> weights) override {
    weights_.assign(weights.begin(), weights.end());
  }
  void set_state(std::span<const float> /*state*/) override {}
  void update(int64_t step, std::span<const float> /*gradient*/) override {
    if (step == 2) throw std::bad_alloc();
  }

 private:
  std::vector<float> weights_;
  const std::atomic<bool>& broken_;
};

// The code of an answer that must come within 20 seconds; one that never comes is kReplaced here.
Code code_of(std::future<Reply>& answer) {
  try {
    if (answer.wait_for(std::chrono::seconds(20)) == std::future_status::ready)
      return answer.get().code;
  } catch (const std::future_error&) {  // It was dropped.
  }
  return Code::kReplaced;
}

TEST(ServerFailureTest, AServerThatBreaksInTheMiddleOfABatchAnswersTheRest) {
  const std::atomic<bool> broken{false};
  Cluster cluster(1, {.make_block = [&](const RuleOptions&, int64_t elements) {
                    return std::make_unique<BreakingBlock>(elements, broken);
                  }});
  RawTrainer trainer(cluster, block_job(1, Mode::kAsync), 0);
  const auto push = [&](uint64_t sequence, uint32_t flags = 0) {
    return block_request(trainer.header, Call::kPush, sequence, flags);
  };
  ASSERT_EQ(cluster.ask(0, push(0, kInitialValues)).code, Code::kOk);
  ASSERT_EQ(cluster.ask(0, push(1)).code, Code::kOk);
  // One that holds the server's thread, so that the others are one batch.
  std::promise<void> go_on;
  cluster.slot(0).get()->submit({.call = Call::kStatus},
                                [wait = go_on.get_future().share()](const Reply&) { wait.wait(); });
  std::vector<std::future<Reply>> answers;
  answers.push_back(cluster.send(0, push(2)));
  for (int i = 0; i < 3; ++i) answers.push_back(cluster.send(0, {.call = Call::kStatus}));
  go_on.set_value();
  for (auto& answer : answers) EXPECT_EQ(code_of(answer), Code::kLost);
  EXPECT_THROW(cluster.slot(0).get()->wait(), std::bad_alloc);
}

TEST(ServerFailureTest, AServerThatBreaksAtAPullThatWaitedAnswersTheOthers) {
  const std::vector<Code> codes = in_less_than_a_second([] {
    std::atomic<bool> broken{false};
    Cluster cluster(1, {.make_block = [&](const RuleOptions&, int64_t elements) {
                      return std::make_unique<BreakingBlock>(elements, broken);
                    }});
    RawTrainer trainer(cluster, block_job(1, Mode::kSync), 0);
    EXPECT_EQ(cluster.ask(0, block_request(trainer.header, Call::kPush, 0, kInitialValues)).code,
              Code::kOk);
    std::vector<std::future<Reply>> answers;
    for (int i = 0; i < 3; ++i)
      answers.push_back(cluster.send(0, block_request(trainer.header, Call::kPull, 1)));
    status_of(cluster);  // They are there: answered in the order of asking.
    broken = true;
    EXPECT_EQ(cluster.ask(0, trainer.push(1)).code, Code::kOk);
    std::vector<Code> given;
    for (auto& answer : answers) given.push_back(code_of(answer));
    if (given.front() == Code::kLost) {
      EXPECT_THROW(cluster.slot(0).get()->wait(), int);
    }
    return given;
  });
  EXPECT_EQ(codes, std::vector<Code>(3, Code::kLost));
}

TEST(ServerFailureTest, WhatIsTakenFromTheQueueCountsUntilItIsHandled) {
  Cluster cluster(1, {.max_queue_bytes = 20'000});
  RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kAsync), 0);
  const std::vector<uint64_t> ids(1'000, 1);  // 16 kB.
  const auto hold = [&](std::promise<void>& held, std::promise<void>& go_on) {
    cluster.slot(0).get()->submit({.call = Call::kStatus},
                                  [&held, wait = go_on.get_future().share()](const Reply&) {
                                    held.set_value();
                                    wait.wait();
                                  });
  };
  std::promise<void> first_held, first_goes_on, second_held, second_goes_on;
  hold(first_held, first_goes_on);
  first_held.get_future().wait();
  // These two are one batch, and the first of them holds it up.
  hold(second_held, second_goes_on);
  auto taken = cluster.send(0, trainer.push(1, ids));
  first_goes_on.set_value();
  second_held.get_future().wait();
  EXPECT_EQ(cluster.ask(0, trainer.push(2, ids)).code, Code::kBusy);
  second_goes_on.set_value();
  EXPECT_EQ(code_of(taken), Code::kOk);
  EXPECT_EQ(cluster.ask(0, trainer.push(2, ids)).code, Code::kOk);
}

TEST(ServerFailureTest, AJobThatNoTableCanServeIsRefusedBeforeItIsLogged) {
  Cluster cluster(1, {.make_block = [](const RuleOptions& rule, int64_t elements) {
                    TORCH_CHECK_VALUE(rule.rule != Rule::kRowwiseAdagrad, "no such rule here");
                    return make_host_block(rule, elements);
                  }});
  const JobOptions good = block_job(1, Mode::kAsync);
  const auto refused = [&](const std::function<void(JobOptions&)>& spoil, const std::string& text) {
    JobOptions job = good;
    spoil(job);
    const Reply reply = cluster.ask(0, {.call = Call::kJob, .trainer = 0, .text = job.to_json()});
    EXPECT_EQ(reply.code, Code::kInvalid) << text;
    EXPECT_NE(reply.text.find(text), std::string::npos) << reply.text;
  };
  refused([](JobOptions& job) { job.dense_rule.rule = Rule::kRowwiseAdagrad; }, "no such rule");
  refused([](JobOptions& job) { job.tables[0].entry.pushes = 300; }, "entry.pushes");
  refused([](JobOptions& job) { job.tables[0].memory_cap_bytes = 100; }, "memory_cap_bytes");
  refused([](JobOptions& job) { job.tables[0].at_cap = AtCap::kSpill; }, "at_cap");
  refused([](JobOptions& job) { job.tables[0].eviction.decay = 2; }, "eviction.decay");
  refused([](JobOptions& job) { job.tables[0].initializer.scale = -1; }, "initializer.scale");
  for (const char* name : {"../rows", "a/b", ".rows", "", "two words", "dense"})
    refused([&](JobOptions& job) { job.tables[0].name = name; }, "name");
  cluster.restart(0);
  RawTrainer trainer(cluster, good, 0);
  EXPECT_EQ(trainer.joined.code, Code::kOk) << trainer.joined.text;

  // Where rows can go nowhere, because the server has no folder.
  const Log log(LogOptions{.console = LogConsole::kNever});
  Server homeless({.durability = Durability::kApplied}, log);
  JobOptions job = ledger_job(1, 1, Mode::kAsync);
  job.tables[0].memory_cap_bytes = 1 << 20;
  job.tables[0].at_cap = AtCap::kSpill;
  for (const Code expected : {Code::kInvalid, Code::kOk}) {
    auto promise = std::make_shared<std::promise<Reply>>();
    auto answer = promise->get_future();
    homeless.submit({.call = Call::kJob, .trainer = 0, .text = job.to_json()},
                    [promise](Reply reply) { promise->set_value(std::move(reply)); });
    EXPECT_EQ(code_of(answer), expected);
    job.tables[0].at_cap = AtCap::kRefuse;
  }
}

TEST(ServerFailureTest, ARequestThatCannotBeAnsweredEndsNoServer) {
  Cluster cluster(1);
  const JobOptions job = ledger_job(1, 1, Mode::kAsync, 65'536);
  RawTrainer trainer(cluster, job, 0);
  // 10,000 rows of 256 KiB.
  const Reply large = cluster.ask(0, trainer.pull(std::vector<uint64_t>(10'000, 1)));
  EXPECT_EQ(large.code, Code::kInvalid);
  EXPECT_EQ(large.text,
            "pull: its answer would have 2621440000 bytes, a message has 2147483647 at "
            "most: ask for fewer rows at once");
  std::string path = cluster.path("long");
  while (path.size() < 4'060)
    path += "/" + std::string(std::min<size_t>(199, 4'075 - path.size()), 'a');
  const Reply saved = cluster.ask(0, {.call = Call::kSave, .trainer = 0, .nonce = 7, .text = path});
  EXPECT_EQ(saved.code, Code::kInvalid);
  EXPECT_NE(saved.text.find("File name too long"), std::string::npos) << saved.text;
  EXPECT_EQ(cluster.ask(0, trainer.push(1)).code, Code::kOk);
}

TEST(ServerFailureTest, AFullDiskIsLoggedOnceAndNamedToThoseWhoWaitForOthersOrAsk) {
  Cluster cluster(1);
  const JobOptions job = ledger_job(2, 1, Mode::kSync);
  RawTrainer first(cluster, job, 0), second(cluster, job, 1);
  const std::vector<uint64_t> ids(1'000, 1);  // 16 kB.
  ASSERT_EQ(cluster.ask(0, first.push(1, ids)).code, Code::kOk);
  {
    const FileSizeLimit full(20'000);
    for (int i = 0; i < 20; ++i) ASSERT_EQ(cluster.ask(0, second.push(1, ids)).code, Code::kBusy);
    const Reply waited = cluster.ask(0, first.pull({1}, 1));
    EXPECT_EQ(waited.code, Code::kNotYet);
    EXPECT_EQ(waited.text.find("step 1 waits for trainer 1; server 0 cannot log: "), 0U)
        << waited.text;
    EXPECT_NE(waited.text.find("File too large"), std::string::npos) << waited.text;
    const std::string shown = status_of(cluster)["log_failure"];
    EXPECT_NE(shown.find("cannot write: File too large"), std::string::npos) << shown;
  }
  const std::string log = cluster.log();
  const size_t said = log.find("cannot log");
  ASSERT_NE(said, std::string::npos) << log;
  EXPECT_EQ(log.find("cannot log", said + 1), std::string::npos) << log;
  ASSERT_EQ(cluster.ask(0, second.push(1, ids)).code, Code::kOk);
  EXPECT_EQ(status_of(cluster)["log_failure"], "");
  EXPECT_EQ(cluster.ask(0, first.pull({1}, 2)).text, "step 2 waits for trainer 0, 1");
}

TEST(ServerFailureTest, AStatusIsGivenWhateverTheNameOfTheFolder) {
  const ParameterState state(0, "");
  const Activity activity;
  const std::map<uint32_t, Activity::Time> last_message;
  const std::string failure, log_failure = "/\xff/log: cannot write";
  const json status = json::parse(status_text({.state = state,
                                               .activity = activity,
                                               .last_message = last_message,
                                               .failure = failure,
                                               .log_failure = log_failure}));
  EXPECT_EQ(status["log_failure"], "/\xef\xbf\xbd/log: cannot write");
}

// Of the pushes behind the one that cannot be logged, too: they wait for it.
TEST(ServerFailureTest, ATrainerSaysThatTheDiskIsFull) {
  Cluster cluster(1);
  LinkOptions link = quick_link();
  link.attempt_timeout = milliseconds(20'000);
  link.notice_period = milliseconds(300);
  std::mutex mutex;
  std::vector<std::string> said;
  link.on_wait = [&](const std::string& line) {
    if (line.ends_with(": waiting: no reply yet")) return;  // The server has not run yet.
    const std::lock_guard lock(mutex);
    said.push_back(line);
  };
  const auto lines = [&] {
    const std::lock_guard lock(mutex);
    return said;
  };
  const auto client = cluster.client(0, ledger_job(1, 1, Mode::kAsync), link);
  const std::vector<uint64_t> ids{1};
  const std::vector<float> gradient(2, -1);
  const PushRows pushed{0, ids, gradient};
  {
    const FileSizeLimit full(1);
    for (int i = 0; i < 20; ++i) client->push(std::span(&pushed, 1), {});
    // Longer than a push waits at a server: by then each has been answered.
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (lines().size() < 10 && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(milliseconds(10));
  }
  client->flush();
  ASSERT_GE(lines().size(), 10U);
  const std::string reason = "server 0 (in-process:0): waiting: " + cluster.folder(0) +
                             "/log/00000000000000000001.log: cannot write: File too large";
  EXPECT_EQ(lines().front().find(reason + ": expected a limit of file sizes (ulimit -f) of "), 0U)
      << lines().front();
  for (const std::string& line : lines()) EXPECT_EQ(line, lines().front());
}

TEST(ServerFailureTest, ACheckpointThatIsNotLoadedWholeEndsTheJobAndIsLoadedByTheNextStart) {
  JobOptions job = ledger_job(1, 1, Mode::kAsync, 4);
  job.tables[0].eviction.time_to_live_s = 1'000'000;
  std::vector<uint64_t> ids(20'000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = i;
  Cluster saved(1);
  {
    const auto client = saved.client(0, job);
    const std::vector<float> gradients(4 * ids.size(), -5);
    const PushRows pushed{0, ids, gradients};
    client->push(std::span(&pushed, 1), {});
    client->save(saved.path("checkpoint"));
  }
  // Evictions come often, and are records of the log.
  Cluster cluster(1, {.load = saved.path("checkpoint"), .evict_period = milliseconds(20)});
  const Request set_job{.call = Call::kJob, .trainer = 0, .text = job.to_json()};
  {
    const FileSizeLimit full(100'000);
    const Reply reply = cluster.ask(0, set_job);
    EXPECT_EQ(reply.code, Code::kFailed) << reply.text;
    EXPECT_NE(reply.text.find("File too large"), std::string::npos) << reply.text;
  }
  EXPECT_EQ(cluster.ask(0, set_job).code, Code::kFailed);
  while (status_of(cluster)["up_s"] < 0.5) std::this_thread::yield();
  cluster.restart(0);
  RawTrainer trainer(cluster, job, 0);
  EXPECT_EQ(trainer.weight(3), 5);
  EXPECT_EQ(trainer.weight(19'999), 5);
}

TEST(ServerFailureTest, ACheckpointOfMoreRowsThanATableMayHaveIsRefusedEachTime) {
  JobOptions job = ledger_job(1, 1, Mode::kAsync, 4);
  Cluster saved(1);
  {
    const auto client = saved.client(0, job);
    std::vector<uint64_t> ids(1'000);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = i;
    const std::vector<float> gradients(4 * ids.size(), -5);
    const PushRows pushed{0, ids, gradients};
    client->push(std::span(&pushed, 1), {});
    client->save(saved.path("checkpoint"));
  }
  job.tables[0].memory_cap_bytes = 10'000;
  Cluster cluster(1, {.load = saved.path("checkpoint")});
  const Request set_job{.call = Call::kJob, .trainer = 0, .text = job.to_json()};
  EXPECT_EQ(cluster.ask(0, set_job).code, Code::kInvalid);
  EXPECT_EQ(cluster.ask(0, set_job).code, Code::kFailed);
  EXPECT_THROW(cluster.restart(0), c10::ValueError);
}

}  // namespace server_failure_test
}  // namespace cohort::ps
