// SPDX-License-Identifier: Apache-2.0
// Cohort's own store: what c10d's stores do, for clients with the secret, and nothing for others.
#include <algorithm>
#include <barrier>
#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <functional>
#include <future>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/comm/libtorch_version.h"
#include "cohort/comm/listen.h"
#include "cohort/comm/process_group.h"
#include "cohort/comm/store_client.h"
#include "cohort/comm/store_connection.h"
#include "cohort/comm/store_server.h"

#include "tests/support/eventually.h"
#include "tests/support/free_port.h"
#include "tests/support/message_of.h"
#include "tests/support/shell.h"

namespace cohort::comm {
namespace store_test {

using c10d::Store;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;
using StorePtr = c10::intrusive_ptr<Store>;
using Bytes = std::vector<uint8_t>;

const std::string kSecret = "the job's own secret";

Bytes bytes(const std::string& text) {
  return {text.begin(), text.end()};
}
std::string text(const Bytes& bytes) {
  return {bytes.begin(), bytes.end()};
}

struct Served {
  explicit Served(StoreServerOptions options = {.secret = kSecret}) {
    Fd listener(listen_on(0, "127.0.0.1"));
    port = port_of(listener.get());
    server = std::make_unique<StoreServer>(std::move(listener), std::move(options));
  }
  c10::intrusive_ptr<StoreClient> client(const std::string& secret = kSecret,
                                         milliseconds timeout = seconds(30)) const {
    return c10::make_intrusive<StoreClient>(
        StoreAddress{.host = "127.0.0.1", .port = port, .secret = secret},
        Clock::now() + seconds(30), timeout);
  }
  Fd stranger() const {
    Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    return fd;
  }
  int port = 0;
  std::unique_ptr<StoreServer> server;
};

void say(const Fd& fd, const std::string& what) {
  [[maybe_unused]] const ssize_t size = ::send(fd.get(), what.data(), what.size(), MSG_NOSIGNAL);
}

// Whatever comes until the other side closes, or until `limit`.
std::string hear(const Fd& fd, milliseconds limit) {
  const timeval wait{.tv_sec = limit.count() / 1000, .tv_usec = limit.count() % 1000 * 1000};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait);
  std::string heard;
  char buffer[4096];
  for (ssize_t size = 0; (size = ::recv(fd.get(), buffer, sizeof buffer, 0)) > 0;)
    heard.append(buffer, static_cast<size_t>(size));
  return heard;
}

// So many bytes.
std::string hear_exactly(const Fd& fd, size_t size) {
  const timeval wait{.tv_sec = 30, .tv_usec = 0};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait);
  std::string heard(size, '\0');
  const ssize_t count = ::recv(fd.get(), heard.data(), heard.size(), MSG_WAITALL);
  EXPECT_EQ(count, static_cast<ssize_t>(size));
  return heard;
}

// What everything that a store can do comes to, in words.
std::string try_everything(Store& store) {
  std::string log;
  const auto note = [&log](const std::string& what) { log += what + "\n"; };
  const auto compare = [&](const std::string& key, const std::string& a, const std::string& b) {
    note("compareSet " + text(store.compareSet(key, bytes(a), bytes(b))));
  };
  store.set("a", bytes("one"));
  store.set("a", bytes("two"));
  note("get " + text(store.get("a")));
  store.set("empty", Bytes{});
  note("get " + text(store.get("empty")) + "|");
  store.set("binary", Bytes{0, 255, 10, 0});
  note("get " + std::to_string(store.get("binary").size()));
  note("check " + std::to_string(store.check({"a"})) + std::to_string(store.check({"a", "none"})) +
       std::to_string(store.check({})));
  compare("new", "", "first");
  compare("new", "", "second");
  compare("new", "first", "third");
  compare("new", "wrong", "fourth");
  compare("missing", "expected", "desired");
  note("check " + std::to_string(store.check({"missing"})));
  for (const int64_t more : {int64_t{3}, int64_t{-5}, int64_t{0}, int64_t{1} << 62})
    note("add " + std::to_string(store.add("count", more)));
  note("get " + text(store.get("count")));
  store.set("number", bytes("41"));
  note("add " + std::to_string(store.add("number", 1)));
  store.append("list", bytes("x"));
  store.append("list", bytes("yz"));
  note("get " + text(store.get("list")));
  store.multiSet({"m1", "m2"}, {bytes("1"), bytes("22")});
  for (const Bytes& value : store.multiGet({"m2", "m1"})) note("multiGet " + text(value));
  note("keys " + std::to_string(store.getNumKeys()));
  note("delete " + std::to_string(store.deleteKey("a")) + std::to_string(store.deleteKey("a")));
  note("keys " + std::to_string(store.getNumKeys()));
  store.wait({"m1", "m2"});
  store.wait({});
  store.wait({"m1"}, seconds(30));
  try {
    store.wait({"m1", "never"}, milliseconds(50));
    note("it came");
  } catch (const c10::DistStoreError&) {
    note("timeout");
  }
  store.setTimeout(milliseconds(50));
  try {
    store.get("never");
    note("it came");
  } catch (const c10::DistStoreError&) {
    note("timeout");
  }
  store.setTimeout(seconds(30));
  note("get " + text(store.get("m1")));
  note("extended " + std::to_string(store.hasExtendedApi()));
  return log;
}

TEST(StoreTest, DoesWhatC10dsStoresDo) {
  const auto hash = c10::make_intrusive<c10d::HashStore>();
  const std::string expected = try_everything(*hash);
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto tcp = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const Served served;
  const auto own = served.client();
  const std::string found = try_everything(*own);
  EXPECT_EQ(found, expected);
  EXPECT_EQ(found, try_everything(*tcp));
  c10d::PrefixStore prefixed("a/b", served.client());
  EXPECT_NE(try_everything(prefixed).find("compareSet third\ncompareSet third"), std::string::npos);
  EXPECT_EQ(text(own->get("a/b/m1")), "1");
  EXPECT_EQ(text(own->clone()->get("m2")), "22");
}

TEST(StoreTest, WhatCannotBeIsRefusedAndHurtsNobody) {
  const Served served;
  const auto store = served.client();
  store->set("word", bytes("abc"));
  EXPECT_THROW(store->add("word", 1), c10::DistStoreError);
  EXPECT_THROW(store->set(std::string(5000, 'k'), bytes("")), c10::ValueError);
  EXPECT_THROW(store->check({std::string(5000, 'k')}), c10::ValueError);
  EXPECT_THROW(store->set("huge", Bytes(kLongestStoreMessage)), c10::ValueError);
  EXPECT_THROW(store->multiSet({"a", "b"}, {bytes("")}), c10::ValueError);
  EXPECT_THROW(store->listKeys(), c10::NotImplementedError);
  EXPECT_EQ(text(store->get("word")), "abc");
}

// Each answer may be asked for, but not the three at once.
TEST(StoreTest, LargeValuesPassWhole) {
  const Served served;
  const auto store = served.client();
  Bytes large(50'000'000);
  for (size_t i = 0; i < large.size(); ++i) large[i] = static_cast<uint8_t>(i * 2654435761U >> 24);
  store->set("large", large);
  EXPECT_TRUE(served.client()->get("large") == large);
  Bytes larger(100'000'000, 7);
  for (const char* key : {"1", "2", "3"}) store->set(key, larger);
  EXPECT_THROW(store->multiGet({"1", "2", "3"}), c10::DistStoreError);
  EXPECT_EQ(store->multiGet({"1", "2"}).at(1).size(), larger.size());
  for (const char* key : {"1", "2", "3"}) EXPECT_TRUE(store->deleteKey(key));
}

TEST(StoreTest, ThreeRanksMeetEachOthersKeys) {
  const Served served;
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto store = served.client();
      for (int round = 0; round < 100; ++round) {
        const std::string prefix = std::to_string(round) + "/";
        store->set(prefix + std::to_string(rank), bytes(std::to_string(rank * round)));
        for (int peer = 0; peer < 3; ++peer)
          EXPECT_EQ(text(store->get(prefix + std::to_string(peer))), std::to_string(peer * round));
        store->add("sum", rank);
      }
    });
  }
  ranks.clear();
  EXPECT_EQ(served.client()->add("sum", 0), 300);
}

TEST(StoreTest, ManyWaitersAreAnsweredWhenTheirKeysAreThere) {
  const Served served;
  std::vector<std::future<std::string>> waiters;
  std::barrier all_ask(33);
  for (int i = 0; i < 32; ++i) {
    waiters.push_back(std::async(std::launch::async, [&, i] {
      const auto store = served.client();
      all_ask.arrive_and_wait();
      store->wait({"go", "key " + std::to_string(i % 4)});
      return text(store->get("key " + std::to_string(i % 4)));
    }));
  }
  const auto store = served.client();
  all_ask.arrive_and_wait();
  store->append("go", {});
  for (int i = 0; i < 4; ++i) store->compareSet("key " + std::to_string(i), {}, bytes("there"));
  for (auto& waiter : waiters) EXPECT_EQ(waiter.get(), "there");
}

TEST(StoreTest, ThreadsShareAClient) {
  const Served served;
  const auto store = served.client();
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const std::string key = "key " + std::to_string(i);
      for (int64_t count = 1; count <= 500; ++count) EXPECT_EQ(store->add(key, 1), count);
    });
  }
}

// An answer that crosses the cancellation belongs to the call that gave up, or is its own.
TEST(StoreTest, AfterATimeoutTheConnectionGoesOn) {
  const Served served;
  const auto store = served.client();
  const auto other = served.client();
  int num_late = 0;
  for (int i = 0; i < 200; ++i) {
    const std::string key = "key " + std::to_string(i);
    std::jthread setter([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(500 + 12 * i));
      other->set(key, bytes(key));
    });
    try {
      store->setTimeout(milliseconds(2));
      EXPECT_EQ(text(store->get(key)), key);
    } catch (const c10::DistStoreError& error) {
      ++num_late;
      EXPECT_NE(one_line(error).find("wait timeout after 2ms, keys: " + key), std::string::npos);
    }
    store->setTimeout(seconds(30));
    EXPECT_EQ(text(store->get(key)), key);
  }
  std::printf("%d of 200 gave up\n", num_late);
}

TEST(StoreTest, AWaitIsInterruptedAndNothingElseIs) {
  const Served served;
  const auto store = served.client();
  const auto start = Clock::now();
  std::jthread interrupter([&] {
    std::this_thread::sleep_for(milliseconds(100));
    store->interrupt();
  });
  EXPECT_THROW(store->wait({"never"}, seconds(30)), c10::DistStoreError);
  interrupter.join();
  store->interrupt();  // before a wait: ends the next one, and no other call
  store->set("there", bytes("1"));
  EXPECT_TRUE(store->check({"there"}));
  EXPECT_THROW(store->wait({"never"}, seconds(30)), c10::DistStoreError);
  EXPECT_LT(Clock::now() - start, seconds(20));
  EXPECT_THROW(store->wait({"never"}, milliseconds(300)), c10::DistStoreError);
  EXPECT_GE(Clock::now() - start, milliseconds(400));
  EXPECT_EQ(text(store->get("there")), "1");
}

TEST(StoreTest, AServerThatIsGoneEndsEveryCallAndNothingIsWritten) {
  testing::internal::CaptureStderr();
  auto served = std::make_unique<Served>();
  const auto store = served->client();
  auto waiter = std::async(std::launch::async, [&] { store->get("never"); });
  std::this_thread::sleep_for(milliseconds(100));
  served.reset();
  EXPECT_THROW(waiter.get(), c10::DistNetworkError);
  EXPECT_THROW(store->set("a", bytes("")), c10::DistNetworkError);
  EXPECT_THROW(store->check({"a"}), c10::DistNetworkError);

  const Served again;
  const auto cut = again.client();
  auto wakes = std::async(std::launch::async, [&] { cut->wait({"never"}); });
  std::this_thread::sleep_for(milliseconds(100));
  cut->shut_down();
  EXPECT_THROW(wakes.get(), c10::DistNetworkError);
  EXPECT_THROW(again.client()->wait({"never"}, milliseconds(20)), c10::DistStoreError);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

// A server that shook hands, and stands still: a process that is stopped.
TEST(StoreTest, AStoppedServerEndsEveryCallInTime) {
  if (std::getenv("COHORT_TEST_STORE_SERVER")) {
    const Served served;
    std::printf("%d\n", served.port);
    std::fflush(stdout);
    ::pause();
  }
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::dup2(ends[1], 1);
    ::setenv("COHORT_TEST_STORE_SERVER", "1", 1);
    ::execl(self.c_str(), self.c_str(), "--gtest_brief=1",
            "--gtest_filter=StoreTest.AStoppedServerEndsEveryCallInTime", nullptr);
    ::_exit(127);
  }
  ::close(ends[1]);
  FILE* out = ::fdopen(ends[0], "r");
  int port = 0;
  char line[256];
  while (port == 0 && std::fgets(line, sizeof line, out)) port = std::atoi(line);
  const auto connect = [&](milliseconds timeout) {
    return c10::make_intrusive<StoreClient>(
        StoreAddress{.host = "127.0.0.1", .port = port, .secret = kSecret},
        Clock::now() + seconds(30), timeout);
  };
  const auto asks = connect(milliseconds(200)), waits = connect(milliseconds(200));
  ::kill(pid, SIGSTOP);
  ::waitpid(pid, nullptr, WUNTRACED);  // Until it has stopped.
  const auto start = Clock::now();
  EXPECT_THROW(asks->set("a", bytes("")), c10::DistNetworkError);
  EXPECT_THROW(waits->get("a"), c10::DistNetworkError);
  EXPECT_LT(Clock::now() - start, seconds(10)) << "it takes 2.2 s";
  EXPECT_THROW(asks->check({"a"}), c10::DistNetworkError);
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  std::fclose(out);
}

TEST(StoreTest, AClientThatEndsInAWaitLeavesNothing) {
  const Served served;
  const auto open_files = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  const auto before = open_files();
  for (int i = 0; i < 20; ++i) {
    const auto ends = served.client();
    auto wait = std::async(std::launch::async,
                           [&] { EXPECT_THROW(ends->wait({"never"}), c10::DistNetworkError); });
    std::this_thread::sleep_for(milliseconds(10));
    ends->shut_down();
  }
  EXPECT_TRUE(test::eventually([&] { return open_files() <= before; }))
      << open_files() << " beside " << before;
  const auto store = served.client();
  store->set("never", bytes("late"));
  EXPECT_EQ(text(store->get("never")), "late");
}

void expect_refused(const std::function<void()>& connect, const std::string& what) {
  try {
    connect();
    FAIL() << "expected: " << what;
  } catch (const ConfigError& error) {
    EXPECT_NE(one_line(error).find(what), std::string::npos) << one_line(error);
  }
}

TEST(StoreSecretTest, AnotherSecretIsRefusedByName) {
  const Served with, without({.secret = ""});
  const std::string what =
      "COHORT_JOB_SECRET: expected the same in all processes of the job, or "
      "none; the store at 127.0.0.1:";
  expect_refused([&] { with.client("another"); }, what + std::to_string(with.port));
  expect_refused([&] { with.client(""); }, "than this process, which has none");
  expect_refused([&] { without.client("one"); }, "than this process, which has one");
  without.client("")->set("a", bytes("b"));
  with.client()->set("a", bytes("b"));
}

TEST(StoreSecretTest, RanksWithDifferentSecretsDoNotJoin) {
  RankInfo info;
  info.rank = 0;
  info.world_size = 2;
  info.master_addr = "127.0.0.1";
  info.master_port = test::free_port();
  const auto deadline = Clock::now() + seconds(30);
  ::setenv("COHORT_JOB_SECRET", "one", 1);
  connect_store(info, deadline, seconds(5)).store->set("a", bytes("b"));
  info.rank = 1;
  EXPECT_EQ(text(connect_store(info, deadline, seconds(5)).store->get("a")), "b");
  ::setenv("COHORT_JOB_SECRET", "two", 1);
  expect_refused([&] { ProcessGroup group(info, {.rendezvous_timeout = seconds(5)}); },
                 "COHORT_JOB_SECRET: expected the same");
  ::unsetenv("COHORT_JOB_SECRET");
  expect_refused([&] { ProcessGroup group(info, {.rendezvous_timeout = seconds(5)}); },
                 "which has none");
}

// One that says whatever a store of Cohort's would, but for the proof.
TEST(StoreSecretTest, AnImpostorIsNotBelieved) {
  const Fd listener(listen_on(0, "127.0.0.1"));
  const int port = port_of(listener.get());
  const std::jthread impostor([&] {
    const Fd connection(::accept(listener.get(), nullptr, nullptr));
    say(connection, std::string(kStoreGreeting) + std::string(kStoreNonceSize, '7'));
    const std::string heard =
        hear_exactly(connection, kStoreGreeting.size() + kStoreNonceSize + kStoreProofSize);
    say(connection, heard.substr(heard.size() - kStoreProofSize));  // The client's own proof.
    hear(connection, seconds(5));
  });
  const StoreAddress address{.host = "127.0.0.1", .port = port, .secret = kSecret};
  expect_refused(
      [&] {
        const auto client =
            c10::make_intrusive<StoreClient>(address, Clock::now() + seconds(30), seconds(1));
      },
      "none; what answers at 127.0.0.1:" + std::to_string(port) + " has another one");
}

TEST(StoreSecretTest, AStoreOfC10dsIsNoneOfOurs) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto theirs = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const StoreAddress address{.host = "127.0.0.1", .port = theirs->getPort(), .secret = kSecret};
  const std::string why = test::message_of<c10::DistNetworkError>(
      [&] { c10::make_intrusive<StoreClient>(address, Clock::now() + seconds(1), seconds(1)); });
  EXPECT_NE(why.find("the port is open, but silent"), std::string::npos) << why;
}

// A client as the protocol has it, by hand: up to the proof, which is the caller's.
std::string hello(const Fd& fd, const std::string& secret) {
  const std::string nonce(kStoreNonceSize, 'n');
  say(fd, std::string(kStoreGreeting) + nonce);
  const std::string said = hear_exactly(fd, kStoreGreeting.size() + kStoreNonceSize);
  return store_proof(secret, "client", nonce, said.substr(kStoreGreeting.size()));
}

class StrangersTest : public testing::Test {
 protected:
  explicit StrangersTest(milliseconds handshake_limit = milliseconds(500))
      : served_({.secret = kSecret, .handshake_limit = handshake_limit}) {}
  void SetUp() override { store_->set("key-word", bytes("value-word")); }
  // A thousand connections are more than the usual limit of descriptors lets a process have twice.
  static void raise_limit() {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
  void expect_unmoved() {
    EXPECT_EQ(store_->getNumKeys(), 1);
    EXPECT_EQ(text(store_->get("key-word")), "value-word");
    EXPECT_EQ(text(served_.client()->get("key-word")), "value-word");
  }

  const Served served_;
  const StorePtr store_ = served_.client(kSecret, seconds(10));
};

// A member may take its time to prove that it has the secret.
class MembersTest : public StrangersTest {
 protected:
  MembersTest() : StrangersTest(seconds(60)) {}
};

TEST_F(StrangersTest, ChangeNothingAndLearnNothing) {
  const std::string wrong(kStoreProofSize, 'a');
  const std::string greeting = std::string(kStoreGreeting) + std::string(kStoreNonceSize, 'n');
  const std::string request = frame_of(StoreWord::kGet, {"key-word"});
  const std::string deletes = frame_of(StoreWord::kDelete, {"key-word"});
  const uint32_t magic = c10d::detail::validationMagicNumber;  // c10d's first words
  const std::string validation =
      std::string(1, static_cast<char>(c10d::detail::QueryType::VALIDATE)) +
      std::string(reinterpret_cast<const char*>(&magic), sizeof magic);
  const std::vector<std::string> words{"",
                                       "GET / HTTP/1.1\r\n\r\n",
                                       validation,
                                       std::string("\xff\xff\xff\xff", 4),
                                       request,
                                       deletes,
                                       std::string(kStoreGreeting).substr(0, 9),
                                       greeting,
                                       greeting + wrong,
                                       greeting + std::string(kStoreRefusal),
                                       greeting + wrong + deletes + request,
                                       greeting + deletes + request,
                                       std::string(200'000, 'c')};
  for (const std::string& word : words) {
    const Fd fd = served_.stranger();
    say(fd, word);
    const std::string heard = hear(fd, seconds(5));
    EXPECT_LE(heard.size(), kStoreGreeting.size() + kStoreNonceSize + kStoreProofSize);
    EXPECT_EQ(heard.find("word"), std::string::npos);
    expect_unmoved();
  }
}

// Words that were good a moment ago.
TEST_F(MembersTest, SayNothingThatAStrangerCouldRepeat) {
  const std::string request = frame_of(StoreWord::kGet, {"key-word"});
  const Fd member = served_.stranger();
  const std::string proof = hello(member, kSecret);
  say(member, proof + request);
  std::string heard;
  for (int i = 0; i < 600 && heard.find("value-word") == std::string::npos; ++i)
    heard += hear(member, milliseconds(50));
  EXPECT_NE(heard.find("value-word"), std::string::npos);
  const Fd replay = served_.stranger();
  say(replay, std::string(kStoreGreeting) + std::string(kStoreNonceSize, 'n') + proof + request);
  EXPECT_EQ(hear(replay, seconds(20)).find("value-word"), std::string::npos);
}

TEST_F(StrangersTest, SilentOnesAreSentAway) {
  const Fd silent = served_.stranger(), half = served_.stranger();
  say(half, std::string(kStoreGreeting));
  const auto start = Clock::now();
  hear(silent, seconds(20));
  hear(half, seconds(20));
  EXPECT_LT(Clock::now() - start, seconds(10)) << "half a second, and what the machine needs";
}

TEST_F(StrangersTest, AThousandConnectionsKeepNobodyOut) {
  raise_limit();
  std::vector<Fd> strangers;
  for (int i = 0; i < 1000; ++i) {
    strangers.push_back(served_.stranger());
    if (i % 3 == 0) say(strangers.back(), std::string(kStoreGreeting));
    if (i % 100 == 0) expect_unmoved();
  }
  expect_unmoved();
}

// An authenticated client that sends an invalid request loses its connection, nothing else.
TEST_F(MembersTest, ThatBreakTheRulesAreSentAway) {
  const auto length = [](uint32_t size) {
    return std::string(reinterpret_cast<const char*>(&size), sizeof size);
  };
  const std::string open = frame_of(StoreWord::kWait, {"never"});
  const std::vector<std::string> words{length(0xffffffff),
                                       length(0),
                                       length(1) + "\xff",
                                       length(6) + std::string("\x05\xff\xff\xff\xff\x00", 6),
                                       frame_of(StoreWord::kSet, {"key-word"}),
                                       frame_of(StoreWord::kAdd, {"key-word"}),
                                       frame_of(StoreWord::kDone, {}),
                                       frame_of(StoreWord::kSet, {std::string(4097, 'k'), ""}),
                                       open + open};
  for (const std::string& word : words) {
    const Fd fd = served_.stranger();
    const std::string proof = hello(fd, kSecret);
    say(fd, proof + word);
    const auto start = Clock::now();
    EXPECT_EQ(hear(fd, seconds(20)).size(), kStoreProofSize);
    EXPECT_LT(Clock::now() - start, seconds(10));
    expect_unmoved();
  }
}

TEST(StoreBoundsTest, AClientThatTakesNoAnswersIsSentAway) {
  const Served served({.secret = kSecret, .answer_limit = milliseconds(300)});
  const auto store = served.client();
  store->set("large", Bytes(20'000'000));
  const Fd fd = served.stranger();
  const std::string proof = hello(fd, kSecret);
  say(fd, proof);
  for (int i = 0; i < 100; ++i) say(fd, frame_of(StoreWord::kGet, {"large"}));
  std::this_thread::sleep_for(seconds(3));
  EXPECT_EQ(store->getNumKeys(), 1);
  EXPECT_LT(hear(fd, seconds(5)).size(), 20'000'000U);
}

double processor_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

TEST(StoreBoundsTest, WithoutDescriptorsItWaitsForSome) {
  const Served served;
  const auto store = served.client();
  std::vector<Fd> strangers;
  for (int i = 0; i < 2; ++i) {
    strangers.push_back(served.stranger());
    // It has been accepted: no descriptor that is freed below is for it.
    hear_exactly(strangers.back(), kStoreGreeting.size() + kStoreNonceSize);
  }
  std::vector<Fd> taken;
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const rlimit few{.rlim_cur = 200, .rlim_max = limit.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &few);
  while (true) {
    Fd fd(::dup(0));
    if (!fd) break;
    taken.push_back(std::move(fd));
  }
  taken.pop_back();
  const Fd waits = served.stranger();  // The last one: there is none to accept it with.
  const double before = processor_seconds();
  std::this_thread::sleep_for(seconds(1));
  EXPECT_LT(processor_seconds() - before, 0.5) << "a thread that spins takes a second";
  EXPECT_EQ(store->add("a", 1), 1);
  taken.clear();
  ::setrlimit(RLIMIT_NOFILE, &limit);
  EXPECT_EQ(hear_exactly(waits, kStoreGreeting.size()), kStoreGreeting);
}

TEST(StoreBoundsTest, ProgramsThatAreStartedInheritNoSocket) {
  const auto listed = [] { return test::shell("ls -l /proc/self/fd | grep -c socket").output; };
  const std::string before = listed();
  const Served served;
  const auto store = served.client();
  const Fd stranger = served.stranger();
  hear(stranger, milliseconds(100));
  EXPECT_EQ(listed(), before);
}

}  // namespace store_test
}  // namespace cohort::comm
