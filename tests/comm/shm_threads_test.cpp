// SPDX-License-Identifier: Apache-2.0
// Shared memory among ranks that are threads of one process, where the thread sanitizer sees both
// sides of it (scripts/sanitize tsan): a slot that comes round too early is a race.
#include <cstdlib>
#include <cstring>
#include <gtest/gtest.h>
#include <memory>
#include <thread>

#include "cohort/comm/backends/shm/mailbox.h"
#include "cohort/comm/backends/shm/shared_exchange.h"

namespace cohort::comm {
namespace shm_threads_test {

using std::chrono::seconds;

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};

std::unique_ptr<std::byte, Free> zeros(size_t bytes) {
  const size_t whole = (bytes + 4095) / 4096 * 4096;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(4096, whole));
  std::memset(memory, 0, whole);
  return std::unique_ptr<std::byte, Free>(memory);
}

const std::vector<int> kNames{0, 1, 2, 3};

void on_threads(int world_size, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

std::vector<float> filled(size_t numel, float value) {
  return std::vector<float>(numel, value);
}

std::span<const std::byte> bytes_of(const std::vector<float>& values) {
  return std::as_bytes(std::span(values));
}

// Every kind of operation, several pieces long and none, one right after the other.
void exchange_all(SharedExchange& exchange, int rank, int world_size) {
  uint32_t number = 0;
  const auto begin = [&] {
    exchange.begin({.number = number++}, std::chrono::steady_clock::now() + seconds(60));
  };
  const Reduction sum = reduction_of(c10d::ReduceOp::SUM, c10::ScalarType::Float, world_size);
  const auto ranks = static_cast<size_t>(world_size);
  for (const size_t numel : {0, 1, 5000, 70001, 200000}) {
    const auto own = static_cast<float>(rank + 1);
    std::vector<float> x = filled(numel, own);
    begin();
    exchange.all_reduce(sum, reinterpret_cast<std::byte*>(x.data()), std::ssize(x), 4);
    EXPECT_EQ(x, filled(numel, static_cast<float>(world_size * (world_size + 1)) / 2));

    x = filled(numel, own);
    std::vector<std::vector<float>> all(ranks, filled(numel, 0));
    const auto take = [&all, numel](size_t offset, size_t bytes, const auto& pieces) {
      if (offset >= numel * 4) return;
      for (size_t peer = 0; peer < all.size(); ++peer)
        std::memcpy(reinterpret_cast<std::byte*>(all[peer].data()) + offset, pieces[peer],
                    std::min(bytes, numel * 4 - offset));
    };
    begin();
    exchange.show(bytes_of(x), numel * 4, take);
    for (size_t peer = 0; peer < ranks; ++peer)
      EXPECT_EQ(all[peer], filled(numel, static_cast<float>(peer) + 1));

    std::vector<std::vector<float>> messages;
    for (size_t peer = 0; peer < ranks; ++peer)
      messages.push_back(filled(numel, 10 * own + static_cast<float>(peer)));
    std::vector<SharedExchange::Message> passed;
    for (const auto& message : messages) passed.push_back(bytes_of(message));
    begin();
    exchange.pass(passed, numel * 4, take);
    for (size_t peer = 0; peer < ranks; ++peer)
      EXPECT_EQ(all[peer],
                filled(numel, static_cast<float>(10 * (peer + 1)) + static_cast<float>(rank)));
    begin();
    exchange.barrier();
  }
}

TEST(ShmThreadsTest, OperationsFollowEachOtherWithoutARace) {
  for (const int world_size : {1, 2, 3, 4}) {
    const auto memory = zeros(SharedExchange::bytes_for(world_size));
    const std::vector<PeerProcess> peers(static_cast<size_t>(world_size));
    std::atomic<int> num_ready = 0;
    on_threads(world_size, [&](int rank) {
      SharedExchange exchange(memory.get(), rank, peers, kNames, {}, /*spins=*/world_size < 4);
      for (int round = 0; round < 3; ++round) exchange_all(exchange, rank, world_size);
      // A rank that leaves is an error to those that wait for it.
      for (++num_ready; num_ready < world_size;) std::this_thread::yield();
    });
  }
}

// A rank that writes what others still read, or reads what they have not written, is a race.
void exchange_in_place(SharedExchange& exchange, int rank, int world_size, float* room) {
  constexpr size_t kNumel = 50001;
  const Reduction sum = reduction_of(c10d::ReduceOp::SUM, c10::ScalarType::Float, world_size);
  const auto ranks = static_cast<size_t>(world_size);
  const std::span own(room, kNumel), parts(room + kNumel, kNumel * ranks);
  const auto value = static_cast<float>(rank + 1);
  uint32_t number = 0;
  const auto begin = [&] {
    exchange.begin({.number = number++}, std::chrono::steady_clock::now() + seconds(60));
  };
  std::vector<std::vector<float>> all(ranks, filled(kNumel, 0));
  int num_takes = 0;
  const auto take = [&](size_t offset, size_t bytes, const auto& pieces) {
    ++num_takes;
    for (size_t peer = 0; peer < ranks; ++peer)
      std::memcpy(reinterpret_cast<std::byte*>(all[peer].data()) + offset, pieces[peer],
                  std::min(bytes, kNumel * 4 - offset));
  };
  for (int round = 0; round < 3; ++round) {
    std::ranges::fill(own, value);
    begin();
    exchange.all_reduce(sum, reinterpret_cast<std::byte*>(own.data()), kNumel, 4);
    const std::vector<float> sums(own.begin(), own.end());
    EXPECT_EQ(sums, filled(kNumel, static_cast<float>(world_size * (world_size + 1)) / 2));

    std::ranges::fill(own, value);
    begin();
    exchange.show(std::as_bytes(own), kNumel * 4, take);
    for (size_t peer = 0; peer < ranks; ++peer)
      EXPECT_EQ(all[peer], filled(kNumel, static_cast<float>(peer) + 1));

    std::vector<SharedExchange::Message> messages;
    for (size_t peer = 0; peer < ranks; ++peer) {
      const std::span part = parts.subspan(peer * kNumel, kNumel);
      std::ranges::fill(part, 10 * value + static_cast<float>(peer));
      messages.push_back(std::as_bytes(part));
    }
    begin();
    exchange.pass(messages, kNumel * 4, take);
    for (size_t peer = 0; peer < ranks; ++peer)
      EXPECT_EQ(all[peer],
                filled(kNumel, static_cast<float>(10 * (peer + 1)) + static_cast<float>(rank)));
  }
  EXPECT_EQ(num_takes, 6) << "each takes its messages whole: they are where they were";
}

TEST(ShmThreadsTest, TensorsAreReadInPlaceWithoutARace) {
  constexpr size_t kRoomBytes = 2 << 20;
  for (const int world_size : {1, 2, 3, 4}) {
    const auto memory = zeros(SharedExchange::bytes_for(world_size));
    const auto rooms = zeros(kRoomBytes * static_cast<size_t>(world_size));
    const std::vector<PeerProcess> peers(static_cast<size_t>(world_size));
    std::atomic<int> num_ready = 0;
    on_threads(world_size, [&](int rank) {
      SharedExchange exchange(memory.get(), rank, peers, kNames,
                              {.first = rooms.get(), .bytes_each = kRoomBytes},
                              /*spins=*/world_size < 4);
      auto* room = rooms.get() + kRoomBytes * static_cast<size_t>(rank);
      exchange_in_place(exchange, rank, world_size, reinterpret_cast<float*>(room));
      for (++num_ready; num_ready < world_size;) std::this_thread::yield();
    });
  }
}

// A rank that ends its call at the closing step may change its tensor while another still reads it.
TEST(ShmThreadsTest, WhatWasReadWhileACallEndedIsNotTakenForGood) {
  constexpr size_t kRoomBytes = 1 << 20, kNumel = 50001;
  const auto memory = zeros(SharedExchange::bytes_for(2));
  const auto rooms = zeros(kRoomBytes * 2);
  const std::vector<PeerProcess> peers(2);
  std::vector<std::unique_ptr<SharedExchange>> exchanges;
  for (int rank = 0; rank < 2; ++rank)
    exchanges.push_back(std::make_unique<SharedExchange>(
        memory.get(), rank, peers, kNames,
        SharedExchange::Rooms{.first = rooms.get(), .bytes_each = kRoomBytes}, /*spins=*/true));
  std::atomic<bool> gone = false;
  on_threads(2, [&](int rank) {
    const auto index = static_cast<size_t>(rank);
    SharedExchange& exchange = *exchanges[index];
    const std::span own(rooms.get() + kRoomBytes * index, kNumel * 4);
    const auto take = [&](size_t, size_t, const auto&) {
      if (rank == 0) return;
      exchanges[0]->abort();
      while (!gone) std::this_thread::yield();
    };
    exchange.begin({}, std::chrono::steady_clock::now() + seconds(60));
    EXPECT_THROW(exchange.show(own, own.size(), take), c10::DistBackendError);
    if (rank == 0) gone = true;
  });
}

TEST(ShmThreadsTest, AnAbortEndsTheWaitOfAllRanks) {
  const auto memory = zeros(SharedExchange::bytes_for(3));
  const std::vector<PeerProcess> peers(3);
  std::atomic<int> num_begun = 0, num_ended = 0;
  on_threads(3, [&](int rank) {
    SharedExchange exchange(memory.get(), rank, peers, kNames, {}, /*spins=*/true);
    if (rank == 2) {
      while (num_begun < 2) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // Most likely they wait by now.
      exchange.abort();
    } else {
      exchange.begin({}, std::chrono::steady_clock::now() + seconds(60));
      ++num_begun;
      EXPECT_THROW(exchange.barrier(), c10::DistBackendError);
    }
    for (++num_ended; num_ended < 3;) std::this_thread::yield();
  });
}

TEST(ShmThreadsTest, MessagesCrossWithoutARace) {
  constexpr int kRanks = 3;
  constexpr int kMessages = 40;
  const auto memory = zeros(Mailbox::bytes_for(kRanks));
  const std::vector<PeerProcess> peers(kRanks);
  std::atomic<int> num_ready = 0;
  on_threads(kRanks, [&](int rank) {
    Mailbox mailbox(memory.get(), rank, peers, [] {});
    std::atomic<int> num_done = 0, num_failed = 0;
    const auto done = [&](int, const std::exception_ptr& error) {
      num_failed += error ? 1 : 0;
      ++num_done;
    };
    const auto numel_of = [](int tag) { return static_cast<size_t>(tag * tag * tag); };
    std::vector<std::vector<float>> sent, got(kRanks * kMessages);
    for (int tag = 0; tag < kMessages; ++tag)
      sent.push_back(filled(numel_of(tag), static_cast<float>(100 * rank + tag)));
    for (int peer = 0; peer < kRanks; ++peer) {
      if (peer == rank) continue;
      for (int tag = 0; tag < kMessages; ++tag)
        mailbox.send(bytes_of(sent[static_cast<size_t>(tag)]), peer, tag, done);
      for (int tag = kMessages - 1; tag >= 0; --tag) {
        auto& to = got[static_cast<size_t>(peer * kMessages + tag)];
        to.resize(numel_of(tag));
        mailbox.receive(
            std::as_writable_bytes(std::span(to)), peer, tag, [] { return true; }, done);
      }
    }
    while (num_done < (kRanks - 1) * kMessages * 2) std::this_thread::yield();
    EXPECT_EQ(num_failed, 0);
    for (int peer = 0; peer < kRanks; ++peer) {
      for (int tag = 0; peer != rank && tag < kMessages; ++tag)
        EXPECT_EQ(got[static_cast<size_t>(peer * kMessages + tag)],
                  filled(numel_of(tag), static_cast<float>(100 * peer + tag)));
    }
    for (++num_ready; num_ready < kRanks;) std::this_thread::yield();
  });
}

}  // namespace shm_threads_test
}  // namespace cohort::comm
