// SPDX-License-Identifier: Apache-2.0
// Servers that lose power: pages that were not synced are gone, or there without those before them.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <gtest/gtest.h>
#include <iterator>
#include <linux/magic.h>
#include <map>
#include <memory>
#include <random>
#include <signal.h>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/ps/server/server.h"
#include "cohort/ps/server/update_log.h"
#include "cohort/ps/server/write_behind.h"

#include "tests/ps/cluster.h"
#include "tests/ps/disk_calls.h"
#include "tests/ps/scratch_folder.h"
#include "tests/support/message_of.h"

namespace cohort::ps {
namespace power_cut_test {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr size_t kPage = 4096;
// What `logged` may lose: a sync each WriteBehind::kPeriod, and the time that it takes. Counted in
// looks at the server, which are at least a millisecond apart: while a busy machine runs neither
// this process nor the server's, no time passes.
constexpr size_t kWindow = 3000;

constexpr int64_t kRowBytes = 16;  // In a push: an id and two values.

std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// What a power cut leaves of a file whose first `synced` bytes the disk had been given: it may be
// as long as anything between; of each later page it has all or nothing.
std::string after_power_cut(const std::string& whole, size_t synced, std::mt19937_64& random) {
  std::string left = whole;
  for (size_t page = synced / kPage * kPage; page < left.size(); page += kPage) {
    if (random() % 2 == 0) continue;
    const size_t begin = std::max(page, synced);
    std::fill_n(left.begin() + static_cast<int64_t>(begin),
                std::min(page + kPage, left.size()) - begin, '\0');
  }
  const size_t more = whole.size() - synced;
  if (random() % 2 == 0) left.resize(synced + (more == 0 ? 0 : random() % (more + 1)));
  return left;
}

// `on_disk`: how long each file was after the last cut; what had come through it is on the disk.
void cut_power(const std::string& folder, std::map<std::string, int64_t>& on_disk,
               std::mt19937_64& random) {
  for (const auto& entry : fs::directory_iterator(folder + "/log")) {
    const std::string path = entry.path().string();
    const std::string whole = bytes_of(path);
    const int64_t known = std::max(disk_calls::synced_bytes(path), on_disk[path]);
    const auto synced = static_cast<size_t>(std::min(known, static_cast<int64_t>(whole.size())));
    const std::string left = after_power_cut(whole, synced, random);
    std::ofstream(path, std::ios::binary | std::ios::trunc) << left;
    on_disk[path] = static_cast<int64_t>(left.size());
  }
  std::ofstream(folder + "/boot") << "another-run-of-the-system\n";
}

// What a server's process tells the test.
struct Shared {
  std::atomic<bool> started{false};
  std::atomic<int64_t> recovered{-1};  // Pushes, when it had started.
  std::atomic<int64_t> sent{0};        // Pushes of all processes; likewise.
  std::atomic<int64_t> acknowledged{0};
  std::atomic<bool> failed{false};
};

std::future<Reply> send(Server& server, const Request& request) {
  auto promise = std::make_shared<std::promise<Reply>>();
  server.submit(request, [promise](Reply reply) { promise->set_value(std::move(reply)); });
  return promise->get_future();
}

Reply ask(Server& server, const Request& request) {
  return send(server, request).get();
}

Request message(const JobOptions& job, const Reply& joined, MessageKind kind, uint64_t sequence,
                const std::vector<uint64_t>& ids) {
  const bool is_push = kind == MessageKind::kPush;
  const std::array<SectionShape, 1> shapes{
      SectionShape{.table = 0,
                   .width = static_cast<uint32_t>(job.tables[0].width),
                   .count = ids.size(),
                   .has_values = is_push}};
  MessageWriter writer(shapes);
  std::copy(ids.begin(), ids.end(), writer.ids(0).begin());
  if (is_push) std::fill(writer.values(0).begin(), writer.values(0).end(), -1.0f);
  Header header{.job = job.fingerprint(),
                .trainer = 0,
                .trainer_incarnation = joined.trainer_incarnation,
                .server_incarnation = joined.server_incarnation};
  header.kind = kind;
  header.sequence = sequence;
  return {.call = is_push ? Call::kPush : Call::kPull,
          .trainer = 0,
          .message = std::make_shared<const Buffer>(writer.finish(header))};
}

// Row 0 counts pushes; other rows make records of all sizes.
void serve(const ServerOptions& options, const std::string& log_file, uint64_t seed,
           Shared& shared) {
  std::mt19937_64 random(seed);
  const Log log(LogOptions{.file = log_file, .console = LogConsole::kNever});
  Server server(options, log);
  const JobOptions job = ledger_job(1, 1, Mode::kAsync);
  ask(server, {.call = Call::kJob, .trainer = 0, .text = job.to_json()});
  const Reply joined =
      ask(server, {.call = Call::kJoin, .trainer = 0, .job = job.fingerprint(), .nonce = seed});
  const Reply row = ask(server, message(job, joined, MessageKind::kPull, 0, {0}));
  if (row.code != Code::kOk) throw std::runtime_error("the pull was refused: " + row.text);
  const float count = parse_message(row.message.span()).sections[0].values[0];
  shared.recovered = static_cast<int64_t>(count);
  shared.sent = shared.acknowledged = shared.recovered.load();
  shared.started = true;
  std::deque<std::future<Reply>> in_flight;
  for (uint64_t sequence = joined.last_sequence + 1;; ++sequence) {
    std::vector<uint64_t> ids{0};
    const uint64_t size = random() % 64;
    uint64_t more = random() % (size == 0 ? 10'000 : size < 4 ? 2000 : 20);
    // So large that the log writes it while it is applied, once it has reserved space for one of
    // this size.
    const bool is_large = size == 0 || sequence <= joined.last_sequence + 2;
    if (is_large) more = std::max<uint64_t>(more, UpdateLog::kLeastBeside / kRowBytes);
    for (; more > 0; --more) ids.push_back(1 + ids.size());
    ++shared.sent;
    in_flight.push_back(send(server, message(job, joined, MessageKind::kPush, sequence, ids)));
    if (in_flight.size() < 16) continue;
    const Reply reply = in_flight.front().get();
    in_flight.pop_front();
    if (reply.code != Code::kOk) throw std::runtime_error("a push was refused: " + reply.text);
    ++shared.acknowledged;
    if (options.durability == Durability::kLogged)  // As fast as syncs: many small tails.
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
  }
}

// Runs servers in processes of their own and cuts their power.
class PowerCutTest : public testing::Test {
 protected:
  PowerCutTest()
      : shared_(*new (::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                             MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared) {
    disk_calls::forget();  // And shares its notes with the processes.
    // Large pushes are written beside applying them on every file system.
    disk_calls::set_file_system(EXT4_SUPER_MAGIC);
  }

  ~PowerCutTest() override {
    if (process_ > 0) kill(process_);
    disk_calls::set_file_system(0);
  }

  void start(const ServerOptions& options, uint64_t seed) {
    shared_.started = false;
    const std::string log_file = folder_.path("server.log");
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::setpgid(0, 0);
      try {
        serve(options, log_file, seed, shared_);
      } catch (const std::exception& error) {
        std::ofstream(folder_.path("error")) << error.what();
        shared_.failed = true;
      }
      ::_exit(1);
    }
    ::setpgid(pid, pid);
    process_ = pid;
  }

  void wait_for_start() {
    const auto end = Clock::now() + std::chrono::seconds(60);
    while (!shared_.started && !shared_.failed && Clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ASSERT_TRUE(shared_.started) << "no server after a power cut: "
                                 << bytes_of(folder_.path("error"));
  }

  // With all that it has forked.
  static void kill(pid_t pid) {
    ::kill(-pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    while (::kill(-pid, 0) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  void run(Durability durability, int rounds, uint64_t seed) {
    std::mt19937_64 random(seed);
    const ServerOptions options{
        .folder = folder_.path("server"), .durability = durability, .snapshot_log_bytes = 1 << 20};
    int64_t safe = 0;  // What must be there after the cut.
    std::map<std::string, int64_t> on_disk;
    for (int round = 0; round < rounds; ++round) {
      start(options, random());
      wait_for_start();
      if (HasFatalFailure()) return;
      ASSERT_GE(shared_.recovered, safe) << "round " << round << " of seed " << seed;
      ASSERT_LE(shared_.recovered, shared_.sent) << "round " << round << " of seed " << seed;
      safe = shared_.recovered;
      std::vector<int64_t> acknowledged;
      const auto end = Clock::now() +
                       std::chrono::milliseconds(durability == Durability::kSynced
                                                     ? random() % 60
                                                     : random() % (random() % 8 == 0 ? 6000 : 200));
      while (Clock::now() < end) {
        acknowledged.push_back(shared_.acknowledged);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      // In `synced` all that was acknowledged before the process was gone.
      if (durability == Durability::kLogged && acknowledged.size() > kWindow)
        safe = std::max(safe, acknowledged[acknowledged.size() - 1 - kWindow]);
      kill(std::exchange(process_, -1));
      for (const auto& entry : fs::directory_iterator(options.folder + "/log"))
        wrote_beside_ |=
            disk_calls::count(disk_calls::Call::kWriteLarge, entry.path().string()) > 0;
      if (durability == Durability::kSynced) safe = shared_.acknowledged;
      cut_power(options.folder, on_disk, random);
      if (HasFailure()) return;
    }
    EXPECT_GT(safe, 0);
    EXPECT_TRUE(wrote_beside_) << "no push was written while it was applied";
    RecordProperty("rounds", rounds);
    RecordProperty("pushes", static_cast<int>(safe));
    const std::string log = bytes_of(folder_.path("server.log"));
    EXPECT_NE(log.find("a power cut damaged the end of the log"), std::string::npos)
        << "no round damaged anything: the test tests nothing";
  }

  const disk_calls::ReplacedSyncs syncs_{2'000};
  const ScratchFolder folder_;
  Shared& shared_;
  pid_t process_ = -1;
  bool wrote_beside_ = false;
};

// How many: COHORT_TEST_POWER_CUTS=500 for the long form.
int rounds() {
  const char* text = std::getenv("COHORT_TEST_POWER_CUTS");
  return text ? std::atoi(text) : 25;
}

uint64_t seed() {
  const char* text = std::getenv("COHORT_TEST_SEED");
  return text ? static_cast<uint64_t>(std::atoll(text)) : 1;
}

TEST_F(PowerCutTest, ASyncedServerStartsAgainWithAllThatItAcknowledged) {
  run(Durability::kSynced, rounds(), seed());
}

TEST_F(PowerCutTest, ALoggedServerStartsAgainWithAllButTheLastMoments) {
  run(Durability::kLogged, rounds(), seed());
}

void append(UpdateLog& log, size_t bytes) {
  const std::vector<std::byte> payload(bytes, std::byte{1});
  log.begin_append({.time = 5, .payload = payload});
}

uint64_t records_in(const std::string& folder, PowerCut power_cut, std::string* cut_off = nullptr) {
  uint64_t count = 0;
  const UpdateLog log(
      folder, 1, [&](const Record&) { ++count; }, power_cut);
  if (cut_off) *cut_off = log.cut_off_text();
  return count;
}

// Ten records, the first five of them synced; each has 40 bytes of header and 4056 of payload.
class DamagedLogTest : public testing::Test {
 protected:
  DamagedLogTest() {
    UpdateLog log(folder_.path("log"), 1, [](const Record&) {});
    for (int i = 0; i < 5; ++i) append(log, kPage - 40);
    log.sync();
    for (int i = 0; i < 5; ++i) append(log, kPage - 40);
    segment_ = fs::directory_iterator(folder_.path("log"))->path();
    whole_ = bytes_of(segment_);
    EXPECT_EQ(whole_.size(), 10 * kPage);
  }
  void damage(size_t page, size_t at = 100) {
    std::string bytes = bytes_of(segment_);
    bytes[page * kPage + at] ^= 1;
    std::ofstream(segment_, std::ios::binary | std::ios::trunc) << bytes;
  }

  const ScratchFolder folder_;
  fs::path segment_;
  std::string whole_;
};

TEST_F(DamagedLogTest, WhatWasNotSyncedIsCutOffAfterAPowerCutAlone) {
  for (const size_t at : {size_t{1}, size_t{100}, kPage - 1}) {
    std::ofstream(segment_, std::ios::binary | std::ios::trunc) << whole_;
    damage(7, at);
    EXPECT_NE(test::message_of<ConfigError>([&] {
                records_in(folder_.path("log"), PowerCut::kImpossible);
              }).find("damaged at byte 28672"),
              std::string::npos);
    std::string cut_off;
    EXPECT_EQ(records_in(folder_.path("log"), PowerCut::kPossible, &cut_off), 7U);
    EXPECT_NE(cut_off.find("damaged at byte 28672"), std::string::npos) << cut_off;
    EXPECT_EQ(fs::file_size(segment_), 7 * kPage);
    EXPECT_EQ(records_in(folder_.path("log"), PowerCut::kImpossible), 7U);
  }
}

TEST_F(DamagedLogTest, WhatWasSyncedIsDamageEvenAfterAPowerCut) {
  for (const size_t page : {0, 4}) {
    std::ofstream(segment_, std::ios::binary | std::ios::trunc) << whole_;
    damage(page);
    EXPECT_NE(test::message_of<ConfigError>([&] {
                records_in(folder_.path("log"), PowerCut::kPossible);
              }).find("damaged at byte " + std::to_string(page * kPage)),
              std::string::npos);
    EXPECT_EQ(fs::file_size(segment_), whole_.size()) << "a refused log is left as it is";
  }
}

TEST_F(DamagedLogTest, AnEndThatIsMissingIsToldAfterAPowerCut) {
  fs::resize_file(segment_, 9 * kPage + 100);
  std::string cut_off;
  EXPECT_EQ(records_in(folder_.path("log"), PowerCut::kPossible, &cut_off), 9U);
  EXPECT_NE(cut_off.find("it ends within a record, at byte 36864"), std::string::npos) << cut_off;
  EXPECT_EQ(records_in(folder_.path("log"), PowerCut::kPossible, &cut_off), 9U);
  EXPECT_EQ(cut_off, "");
}

TEST_F(DamagedLogTest, WhatCameBeforeTheLastSegmentIsDamage) {
  {
    UpdateLog log(folder_.path("log"), 1, [](const Record&) {});
    log.begin_segment();
    append(log, 8);
  }
  damage(9);
  EXPECT_THROW(records_in(folder_.path("log"), PowerCut::kPossible), ConfigError);
}

// One sync each second, whether a client waits for it or not.
TEST(UpdateLogSyncTest, WhatIsASecondOldIsSynced) {
  const ScratchFolder folder;
  disk_calls::forget();
  const disk_calls::ReplacedSyncs syncs(0);
  UpdateLog log(folder.path("log"), 1, [](const Record&) {});
  append(log, 100);
  const std::string segment = fs::directory_iterator(folder.path("log"))->path().string();
  size_t looks = 0;
  for (; disk_calls::synced_bytes(segment) < 100 && looks < kWindow; ++looks)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_LT(looks, kWindow);
}

TEST_F(DamagedLogTest, AServerOfTheSameRunOfTheSystemRefusesDamage) {
  const std::string folder = folder_.path("server");
  const Log log(LogOptions{.file = folder_.path("server.log"), .console = LogConsole::kNever});
  const ServerOptions options{.folder = folder};
  const JobOptions job = ledger_job(1, 1, Mode::kAsync);
  {
    Server server(options, log);
    ask(server, {.call = Call::kJob, .trainer = 0, .text = job.to_json()});
    ask(server, {.call = Call::kJoin, .trainer = 0, .job = job.fingerprint(), .nonce = 7});
  }
  segment_ = fs::directory_iterator(folder + "/log")->path();
  std::string bytes = bytes_of(segment_);
  bytes.back() ^= 1;
  std::ofstream(segment_, std::ios::binary | std::ios::trunc) << bytes;
  EXPECT_THROW(Server(options, log), ConfigError);
  std::ofstream(folder + "/boot") << "another-run-of-the-system\n";
  EXPECT_NO_THROW(Server(options, log));
  EXPECT_NE(bytes_of(folder_.path("server.log")).find("a power cut damaged the end of the log"),
            std::string::npos);
}

}  // namespace power_cut_test
}  // namespace cohort::ps
