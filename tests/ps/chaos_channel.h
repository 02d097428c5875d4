// SPDX-License-Identifier: Apache-2.0
// A network within the process: it carries requests to servers that can be replaced, and loses,
// doubles, delays and reorders them and their answers by a seed.
#pragma once
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "cohort/ps/server/server.h"
#include "cohort/ps/wire/request.h"

namespace cohort::ps {

/// A server that can be replaced while channels to it exist; none: what is sent is lost.
class ServerSlot {
 public:
  void set(std::shared_ptr<Server> server) {
    const std::lock_guard lock(mutex_);
    server_ = std::move(server);
  }
  std::shared_ptr<Server> get() {
    const std::lock_guard lock(mutex_);
    return server_;
  }
  /// Takes the server away and ends it: when this returns, its folder is free.
  void end() {
    std::shared_ptr<Server> server;
    {
      const std::lock_guard lock(mutex_);
      server.swap(server_);
    }
    while (server.use_count() > 1) std::this_thread::yield();
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Server> server_;
};

struct ChaosOptions {
  uint64_t seed = 1;
  double lose = 0;   ///< Probability for each request, and for each answer.
  double twice = 0;  ///< Of each request to come twice, the second one later.
  double late = 0;   ///< Of each request, copy and answer to be late: so they overtake each other.
  std::chrono::milliseconds latest{20};  ///< How late at most.
};

/// The thread that hands things over when their time has come.
///
/// Lives longer than its channels. Threads: any.
class ChaosNetwork {
 public:
  explicit ChaosNetwork(const ChaosOptions& options = {})
      : options_(options), random_(options.seed), thread_([this] { run(); }) {}

  /// Hands over at once what is left.
  ~ChaosNetwork() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  /// Calls `deliver` from the network's thread: after a while that is drawn, or never.
  void carry(const std::function<void()>& deliver, bool is_request) {
    const std::lock_guard lock(mutex_);
    if (draw() < options_.lose) return;
    at(delay(), deliver);
    if (is_request && draw() < options_.twice) at(delay() + options_.latest / 2, deliver);
  }

  /// Calls `act` after `time`.
  void after(std::chrono::milliseconds time, std::function<void()> act) {
    const std::lock_guard lock(mutex_);
    at(time, std::move(act));
  }

 private:
  using Clock = std::chrono::steady_clock;

  double draw() { return std::uniform_real_distribution<>(0, 1)(random_); }

  Clock::duration delay() {
    if (draw() >= options_.late) return Clock::duration(0);
    return std::chrono::duration_cast<Clock::duration>(draw() * options_.latest);
  }

  void at(Clock::duration time, std::function<void()> act) {
    due_.emplace(Clock::now() + time, std::move(act));
    changed_.notify_all();
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (!stopping_ || !due_.empty()) {
      if (due_.empty()) {
        changed_.wait(lock);
        continue;
      }
      const auto first = due_.begin();
      if (!stopping_ && first->first > Clock::now()) {
        changed_.wait_until(lock, first->first);
        continue;
      }
      auto act = due_.extract(first);
      lock.unlock();
      act.mapped()();
      act = {};  // What it held may end now, and wait for threads that come here.
      lock.lock();
    }
  }

  const ChaosOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  std::multimap<Clock::time_point, std::function<void()>> due_;
  bool stopping_ = false;
  std::thread thread_;
};

/// A way through a network to what `carry` reaches; both must outlive it and its calls. It may be
/// asked to carry a request twice.
class ChaosChannel : public Channel {
 public:
  using Carry = std::function<void(const Request&, int64_t timeout_ms, Done)>;

  ChaosChannel(Carry carry, ChaosNetwork& network) : carry_(std::move(carry)), network_(network) {}
  /// To the server of a slot: let servers end first, then the network, then the slots.
  ChaosChannel(ServerSlot& slot, ChaosNetwork& network)
      : ChaosChannel(
            [&slot](const Request& request, int64_t, Done done) {
              if (const auto server = slot.get()) server->submit(request, std::move(done));
            },
            network) {}

  void send(const Request& request, int64_t timeout_ms, Done done) override {
    // Called by the first of what comes: an answer, or the end of the time.
    struct Once {
      std::mutex mutex;
      Done done;
      void call(Reply reply) {
        Done taken;
        {
          const std::lock_guard lock(mutex);
          taken.swap(done);
        }
        if (taken) taken(std::move(reply));
      }
    };
    auto once = std::make_shared<Once>();
    once->done = std::move(done);
    ChaosNetwork* const network = &network_;
    network->after(std::chrono::milliseconds(timeout_ms),
                   [once] { once->call({.code = Code::kLost, .text = "the time is up"}); });
    const auto deliver = [carry = carry_, once, request, timeout_ms, network] {
      carry(request, timeout_ms, [once, network](Reply reply) {
        const auto answer = std::make_shared<Reply>(std::move(reply));
        network->carry([once, answer] { once->call(std::move(*answer)); }, /*is_request=*/false);
      });
    };
    network->carry(deliver, /*is_request=*/true);
  }

 private:
  Carry carry_;
  ChaosNetwork& network_;
};

}  // namespace cohort::ps
