// SPDX-License-Identifier: Apache-2.0
// Memory that clients share with servers of their host.
#include "cohort/ps/rpc/shared_area.h"

#include <algorithm>
#include <array>
#include <c10/util/Exception.h>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <future>
#include <gtest/gtest.h>
#include <numeric>
#include <sstream>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "cohort/ps/client/server_link.h"
#include "cohort/ps/rpc/rpc_channel.h"
#include "cohort/ps/rpc/rpc_server.h"

#include "tests/ps/cluster.h"
#include "tests/ps/shared_calls.h"
#include "tests/support/message_of.h"

namespace cohort::ps {
namespace shared_area_test {

using cohort::test::message_of;

constexpr uint64_t kBytes = 1 << 16;
constexpr size_t kRows = 5000;  // More bytes than go through a socket.

// The inode of the file that is mapped at `address`; 0: none.
uint64_t inode_at(const void* address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream fields(line);
    uint64_t begin = 0, end = 0, inode = 0;
    char dash = 0;
    std::string rights, offset, device;
    fields >> std::hex >> begin >> dash >> end >> rights >> offset >> device >> std::dec >> inode;
    const auto at = reinterpret_cast<uint64_t>(address);
    if (begin <= at && at < end) return inode;
  }
  return 0;
}

size_t num_areas() {
  size_t count = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    count += line.find("memfd:cohort-ps") != std::string::npos;
  return count;
}

// How many there are once there are no more than `expected`, or after 20 s.
size_t areas_after(size_t expected) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (num_areas() > expected && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return num_areas();
}

// Another process that has made an area.
class Sharer {
 public:
  Sharer() {
    std::array<int, 2> ends{};
    TORCH_CHECK(::pipe(ends.data()) == 0);
    process_ = ::fork();
    if (process_ == 0) {
      const SharedArea area(kBytes);
      (void)!::write(ends[1], &area.name(), sizeof(SharedAreaName));
      ::pause();
      ::_exit(0);
    }
    TORCH_CHECK(::read(ends[0], &name_, sizeof(name_)) == static_cast<ssize_t>(sizeof(name_)));
    for (const int end : ends) ::close(end);
  }
  ~Sharer() { kill(); }
  const SharedAreaName& name() const { return name_; }
  void kill() {
    if (process_ == 0) return;
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
    process_ = 0;
  }

 private:
  pid_t process_ = 0;
  SharedAreaName name_;
};

Reply ask(Channel& channel, const Request& request, int64_t timeout_ms = 20'000) {
  auto promise = std::make_shared<std::promise<Reply>>();
  auto answer = promise->get_future();
  channel.send(request, timeout_ms,
               [promise](Reply reply) { promise->set_value(std::move(reply)); });
  return answer.get();
}

// The answer once it comes in shared memory: the first calls offer it.
Reply shared_answer(Channel& channel, const Request& request) {
  Reply reply;
  for (int attempt = 0; attempt < 200; ++attempt) {
    reply = ask(channel, request);
    if (reply.code == Code::kOk && !reply.message.is_owner()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return reply;
}

std::vector<uint64_t> many_ids() {
  std::vector<uint64_t> ids(kRows);
  std::iota(ids.begin(), ids.end(), uint64_t{1});
  return ids;
}

Request large_pull(const RawTrainer& trainer, uint64_t step = 0) {
  Request request = trainer.pull(many_ids(), step);
  request.answer_bytes = size_t{1} << 17;
  return request;
}

TEST(SharedAreaTest, PartsDoNotOverlapAndAreUsedAgain) {
  const auto parts = std::make_shared<SharedParts>(kBytes);
  auto first = parts->take(1000);
  auto second = parts->take(100);
  const auto third = parts->take(8);
  ASSERT_TRUE(first && second && third);
  EXPECT_GE(first->bytes().size(), 1000U);
  EXPECT_GE(second->offset(), first->offset() + first->bytes().size());
  EXPECT_GE(third->offset(), second->offset() + second->bytes().size());
  const uint64_t free = second->offset();
  second.reset();
  EXPECT_EQ(parts->take(100)->offset(), free);
  EXPECT_NE(parts->take(1000)->offset(), free) << "it is too small";
  EXPECT_EQ(parts->take(kBytes), nullptr);
  EXPECT_EQ(parts->take(kBytes - 1000), nullptr);
  EXPECT_EQ(parts->take(0), nullptr);
  EXPECT_EQ(parts->take(UINT64_MAX), nullptr);
  first.reset();
  EXPECT_NE(parts->take(1000), nullptr);
}

TEST(SharedAreaTest, LostPartsAreNotUsedAgain) {
  const auto parts = std::make_shared<SharedParts>(kBytes);
  auto part = parts->take(1000);
  const uint64_t offset = part->offset(), bytes = part->bytes().size();
  parts->lose(offset);
  parts->lose(offset);  // By each call that sent what is in it.
  part.reset();
  EXPECT_GE(parts->take(8)->offset(), offset + bytes);
  EXPECT_EQ(parts->lost_bytes(), bytes);
}

// Bytes that have pages, of the memory that has the descriptor `file`.
uint64_t allocated_bytes(int file) {
  struct stat status {};
  return ::fstat(file, &status) == 0 ? static_cast<uint64_t>(status.st_blocks) * 512 : 0;
}

TEST(SharedAreaTest, PartsHavePagesBeforeTheyAreWrittenTo) {
  constexpr uint64_t kAll = uint64_t{8} << 20;
  const auto parts = std::make_shared<SharedParts>(kAll);
  const int file = parts->area().name().file;
  const auto first = parts->take(1000);
  EXPECT_GE(allocated_bytes(file), first->offset() + first->bytes().size());
  const uint64_t step = allocated_bytes(file);
  EXPECT_LT(step, kAll) << "the rest takes no memory";
  const auto second = parts->take(3'000'000);
  EXPECT_GE(allocated_bytes(file), second->offset() + second->bytes().size());
  EXPECT_NE(parts->take(kAll - (uint64_t{4} << 20)), nullptr);
  EXPECT_LE(allocated_bytes(file), kAll) << "up to the last byte";
}

TEST(SharedAreaTest, BothSidesSeeTheSameBytes) {
  const SharedArea own(kBytes);
  const SharedArea other(own.name());
  const auto written = own.part(64, 8), read = other.part(64, 8);
  ASSERT_TRUE(written && read);
  ASSERT_NE(written->data(), read->data());
  const uint64_t value = 0x1234'5678'9abc'def0;
  std::memcpy(written->data(), &value, sizeof(value));
  EXPECT_EQ(std::memcmp(read->data(), &value, sizeof(value)), 0);
  EXPECT_FALSE(other.is_orphaned());
}

TEST(SharedAreaTest, BytesOutsideAreNobodys) {
  const SharedArea area(kBytes);
  EXPECT_TRUE(area.part(64, kBytes - 64));
  EXPECT_TRUE(area.part(kBytes, 0));
  EXPECT_FALSE(area.part(64, kBytes - 56));
  EXPECT_FALSE(area.part(kBytes - 8, 16));
  EXPECT_FALSE(area.part(kBytes + 8, 0));
  EXPECT_FALSE(area.part(64, UINT64_MAX - 7));
  EXPECT_FALSE(area.part(UINT64_MAX - 7, 64));
  EXPECT_FALSE(area.part(0, 8)) << "its number is there";
  EXPECT_FALSE(area.part(68, 8));
  EXPECT_FALSE(area.part(64, 12));
}

TEST(SharedAreaTest, WhatIsNoAreaIsRefused) {
  const SharedArea area(kBytes);
  const auto refusal = [&](const auto& change) {
    SharedAreaName name = area.name();
    change(name);
    return message_of<c10::Error>([&] { const SharedArea mapped(name); });
  };
  const auto says = [](const std::string& text, const char* what) {
    return text.find(what) != std::string::npos;
  };
  EXPECT_TRUE(says(refusal([](auto& name) { ++name.number; }), "it is another process's"));
  const char* const kNone = "it is not memory of this user that keeps its size";
  EXPECT_TRUE(says(refusal([](auto& name) { name.bytes = 2 * kBytes; }), kNone));
  EXPECT_TRUE(says(refusal([](auto& name) { name.bytes = 8; }), "expected at most"));
  EXPECT_TRUE(
      says(refusal([](auto& name) { name.bytes = uint64_t{1} << 40; }), "expected at most"));
  EXPECT_TRUE(says(refusal([](auto& name) { name.file = 1'000'000; }), "No such file"));
  EXPECT_TRUE(says(refusal([](auto& name) { name.process = -1; }), "process -1"));
  const Fd growing(::memfd_create("cohort-ps", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(growing.get(), kBytes), 0);
  EXPECT_TRUE(says(refusal([&](auto& name) { name.file = growing.get(); }), kNone));
  EXPECT_TRUE(says(refusal([](auto& name) { name.number = 0; }), "expected its number, got 0"));
  // Memory of this user that keeps its size and begins with the number, of another program.
  const Fd other(::memfd_create("cohort-shm", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(other.get(), kBytes), 0);
  ASSERT_EQ(::pwrite(other.get(), &area.name().number, sizeof(uint64_t), 0), 8);
  ASSERT_EQ(::fcntl(other.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_TRUE(says(refusal([&](auto& name) { name.file = other.get(); }), "no trainer shares it"));
  // Huge pages cannot be kept for it: its first write may end a process. Not every kernel has them.
  const Fd huge(::memfd_create("cohort-ps", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB));
  if (huge && ::ftruncate(huge.get(), 2 << 20) == 0) {
    ASSERT_EQ(::fcntl(huge.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
    EXPECT_TRUE(says(refusal([&](auto& name) { name.file = huge.get(); }), "of ordinary pages"));
  }
  const ScratchFolder folder;
  const Fd file(::open(folder.path("file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(::ftruncate(file.get(), kBytes), 0);
  EXPECT_TRUE(says(refusal([&](auto& name) { name.file = file.get(); }), "no trainer shares it"));
}

TEST(SharedAreaTest, AreasOfEndedProcessesAreDropped) {
  Sharer sharer;
  const SharedAreaName& name = sharer.name();
  SharedAreas areas;
  areas.add(1, name);
  const SharedArea first(kBytes), second(kBytes);
  areas.add(2, first.name());
  EXPECT_NE(areas.find(name.number), nullptr);
  sharer.kill();
  areas.remove_orphans();
  areas.add(2, second.name());
  EXPECT_EQ(areas.find(name.number), nullptr);
  EXPECT_EQ(areas.find(first.name().number), nullptr) << "the channel has a later one";
  EXPECT_NE(areas.find(second.name().number), nullptr);
  areas.remove(2);
  EXPECT_EQ(areas.find(second.name().number), nullptr);
}

// Pushes and pulls over `endpoint`, and what the rows are in the end.
std::vector<float> train(const std::string& endpoint) {
  const JobOptions job{.mode = Mode::kAsync, .tables = {{.name = "rows", .width = 16}}};
  Client client({.servers = {endpoint}, .trainer = 0}, job);
  const auto ids = many_ids();
  std::vector<float> gradients(kRows * 16), rows(kRows * 16);
  const PullRows asked{0, ids, rows};
  for (int step = 0; step < 20; ++step) {
    for (size_t i = 0; i < gradients.size(); ++i)
      gradients[i] = static_cast<float>((i * 7 + static_cast<size_t>(step)) % 13) - 6;
    const PushRows pushed{0, ids, gradients};
    client.push(std::span(&pushed, 1), {});
    client.pull(std::span(&asked, 1), {}).wait();
  }
  client.leave();
  return rows;
}

// They hold their parts until they are acknowledged.
TEST(SharedAreaTest, PushesLeaveHalfOfTheMemoryToAnswers) {
  EXPECT_LE(static_cast<uint64_t>(LinkOptions{}.max_in_flight_bytes), SharedArea::kMostBytes / 2);
}

TEST(SharedAreaTest, RowsAreThoseThatGoThroughASocket) {
  const ScratchFolder folder;
  const Log log({.console = LogConsole::kNever});
  const size_t before = num_areas();
  Server by_socket({.folder = folder.path("a")}, log), by_memory({.folder = folder.path("b")}, log);
  const RpcServer tcp(by_socket, {});
  const RpcServer local(by_memory, {.endpoint = "unix:" + folder.path("socket")});
  const auto expected = train("127.0.0.1:" + std::to_string(tcp.port()));
  EXPECT_EQ(num_areas(), before) << "over TCP nothing is shared";
  EXPECT_EQ(train("unix:" + folder.path("socket")), expected);
  EXPECT_EQ(areas_after(before), before) << "the server has dropped it";
}

// A server that is called through a socket.
struct ServedCluster {
  Cluster cluster{1};
  const std::string endpoint = "unix:" + cluster.path("socket");
  const RpcServer rpc{*cluster.slot(0).get(), {.endpoint = endpoint}};
};

// By trainers that leave and do not end.
TEST(SharedAreaTest, WhoLeavesSharesNothingAnyMore) {
  const size_t before = num_areas();
  ServedCluster served;
  const JobOptions job = ledger_job(1, 1, Mode::kAsync);
  RawTrainer trainer(served.cluster, job, 0);
  const auto channel = make_rpc_channel({.endpoint = served.endpoint});
  ASSERT_FALSE(shared_answer(*channel, large_pull(trainer)).message.is_owner());
  EXPECT_EQ(num_areas(), before + 2) << "mapped by both sides";
  EXPECT_EQ(ask(*channel, {.call = Call::kLeave,
                           .trainer = 0,
                           .job = job.fingerprint(),
                           .incarnation = trainer.header.trainer_incarnation})
                .code,
            Code::kOk);
  EXPECT_EQ(areas_after(before), before);
}

// By trainers that are killed.
TEST(SharedAreaTest, AServerDropsTheMemoryOfAnEndedProcess) {
  ServedCluster served;
  const size_t before = num_areas();
  Sharer sharer;
  ASSERT_EQ(offer(served.endpoint, 1, sharer.name()), "");
  EXPECT_EQ(num_areas(), before + 1);
  sharer.kill();
  EXPECT_EQ(areas_after(before), before);
}

TEST(SharedAreaTest, MemoryOfACallThatWasGivenUpIsNotUsedAgain) {
  ServedCluster served;
  RawTrainer first(served.cluster, ledger_job(2, 1, Mode::kSync), 0);
  RawTrainer second(served.cluster, ledger_job(2, 1, Mode::kSync), 1);
  const auto channel = make_rpc_channel({.endpoint = served.endpoint});
  Reply before = shared_answer(*channel, large_pull(first));
  ASSERT_FALSE(before.message.empty());
  ASSERT_FALSE(before.message.is_owner());
  const std::vector<std::byte> bytes(before.message.span().begin(), before.message.span().end());
  const std::byte* const place = before.message.span().data();
  const uint64_t inode = inode_at(place);
  before = {};
  Reply repeated = ask(*channel, large_pull(first));
  EXPECT_EQ(repeated.message.span().data(), place) << "the first that is free";
  repeated = {};
  // Its step is open: the server answers later than the caller waits.
  EXPECT_EQ(ask(*channel, large_pull(first, 1), 100).code, Code::kLost);
  const Reply after = ask(*channel, large_pull(first));
  ASSERT_FALSE(after.message.is_owner());
  EXPECT_NE(after.message.span().data(), place) << "the server may still write there";
  EXPECT_EQ(inode_at(after.message.span().data()), inode) << "the rest is still used";
  EXPECT_EQ(served.cluster.ask(0, first.push(1, many_ids())).code, Code::kOk);
  EXPECT_EQ(served.cluster.ask(0, second.push(1, many_ids())).code, Code::kOk);
  EXPECT_EQ(ask(*channel, large_pull(first, 1)).code, Code::kOk);
  EXPECT_TRUE(std::ranges::equal(after.message.span(), bytes)) << "it was answered before";
}

// `message`, in memory that the channel gives for it.
Request in_memory_of(Channel& channel, Request request) {
  Buffer copy = channel.make_buffer(request.message->size());
  std::memcpy(copy.data(), request.message->span().data(), copy.size());
  request.message = std::make_shared<const Buffer>(std::move(copy));
  return request;
}

TEST(SharedAreaTest, AMessageIsSentFromWhereItWasWritten) {
  ServedCluster served;
  RawTrainer trainer(served.cluster, ledger_job(1, 1, Mode::kAsync), 0);
  const auto channel = make_rpc_channel({.endpoint = served.endpoint});
  EXPECT_TRUE(channel->make_buffer(8).is_owner()) << "it goes through the socket";
  const Reply copied = shared_answer(*channel, large_pull(trainer));
  EXPECT_EQ(parse_message(copied.message.span(), Checksums::kIgnored).header.checksum, 0U);
  Request request = in_memory_of(*channel, large_pull(trainer));
  EXPECT_EQ(inode_at(request.message->span().data()), inode_at(copied.message.span().data()));
  const Reply reply = ask(*channel, request);
  EXPECT_TRUE(std::ranges::equal(reply.message.span(), copied.message.span()));
  // What is there now is what is sent: no copy of what was there.
  auto* const byte = const_cast<std::byte*>(request.message->span().data() + sizeof(Header));
  *byte ^= std::byte{1};
  EXPECT_EQ(ask(*channel, request).code, Code::kInvalid);
  *byte ^= std::byte{1};
  const std::byte* const place = request.message->span().data();
  request = {};
  EXPECT_EQ(channel->make_buffer(size_t{1} << 15).data(), place) << "it is free again";
}

TEST(SharedAreaTest, AMessageOfAGivenUpCallIsSentAgain) {
  ServedCluster served;
  RawTrainer first(served.cluster, ledger_job(2, 1, Mode::kSync), 0);
  RawTrainer second(served.cluster, ledger_job(2, 1, Mode::kSync), 1);
  const auto channel = make_rpc_channel({.endpoint = served.endpoint});
  ASSERT_FALSE(shared_answer(*channel, large_pull(first)).message.is_owner());
  Request waiting = in_memory_of(*channel, large_pull(first, 1));
  const std::byte* const place = waiting.message->span().data();
  EXPECT_EQ(ask(*channel, waiting, 100).code, Code::kLost);
  EXPECT_EQ(ask(*channel, waiting, 100).code, Code::kLost);
  EXPECT_EQ(served.cluster.ask(0, first.push(1, many_ids())).code, Code::kOk);
  EXPECT_EQ(served.cluster.ask(0, second.push(1, many_ids())).code, Code::kOk);
  EXPECT_EQ(ask(*channel, waiting).code, Code::kOk);
  const size_t bytes = waiting.message->size();
  waiting = {};
  const Buffer next = channel->make_buffer(bytes);
  EXPECT_FALSE(next.is_owner());
  EXPECT_NE(next.span().data(), place) << "the server may still read there";
}

TEST(SharedAreaTest, MemoryOfWhichMuchIsLostIsReplaced) {
  ServedCluster served;
  RawTrainer trainer(served.cluster, ledger_job(2, 1, Mode::kSync), 0);
  const auto channel = make_rpc_channel({.endpoint = served.endpoint});
  const uint64_t inode = inode_at(shared_answer(*channel, large_pull(trainer)).message.data());
  ASSERT_NE(inode, 0U);
  Request waiting = large_pull(trainer, 1);
  waiting.answer_bytes = size_t{36} << 20;
  EXPECT_EQ(ask(*channel, waiting, 100).code, Code::kLost);
  const Reply after = shared_answer(*channel, large_pull(trainer));
  ASSERT_FALSE(after.message.is_owner());
  EXPECT_NE(inode_at(after.message.span().data()), inode);
}

TEST(SharedAreaTest, AServerThatStartedAgainIsOfferedMemoryAgain) {
  Cluster cluster(1);
  const std::string endpoint = "unix:" + cluster.path("socket");
  auto rpc =
      std::make_unique<RpcServer>(*cluster.slot(0).get(), RpcServerOptions{.endpoint = endpoint});
  RawTrainer trainer(cluster, ledger_job(1, 1, Mode::kAsync), 0);
  const auto channel = make_rpc_channel({.endpoint = endpoint});
  EXPECT_FALSE(shared_answer(*channel, large_pull(trainer)).message.is_owner());
  rpc.reset();
  rpc = std::make_unique<RpcServer>(*cluster.slot(0).get(), RpcServerOptions{.endpoint = endpoint});
  const Reply lost = ask(*channel, large_pull(trainer));
  EXPECT_TRUE(lost.code == Code::kLost || lost.message.is_owner());
  const Reply again = shared_answer(*channel, large_pull(trainer));
  EXPECT_EQ(again.code, Code::kOk);
  EXPECT_FALSE(again.message.is_owner());
}

}  // namespace shared_area_test
}  // namespace cohort::ps
