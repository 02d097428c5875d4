// SPDX-License-Identifier: Apache-2.0
// Debian's Gloo headers describe an older Gloo than the one inside libtorch: this file only passes
// shared pointers around and never touches a Gloo object.
#define USE_C10D_GLOO
#include "cohort/comm/backends/gloo/gloo.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <sched.h>
#include <set>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "cohort/base/env.h"
#include "cohort/comm/backends/gloo/direct_exchange.h"
#include "cohort/comm/connections.h"
#include "cohort/comm/libtorch_version.h"
#include "cohort/comm/numbered_backend.h"
#include "cohort/comm/time_left.h"

namespace cohort::comm {
namespace {

using Gloo = c10d::ProcessGroupGloo;
using Device = std::shared_ptr<::gloo::transport::Device>;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

class GlooBackend : public Gloo, public NumberedBackend {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;
  void number_next(uint32_t number) override { collectiveCounter_ = number; }
  bool compares_numbers() const override { return false; }
  // Before the backend is used.
  void set_connections(Connections connections) { connections_ = std::move(connections); }
  void set_one_host(bool one_host) { one_host_ = one_host; }
  // Until every rank has its connections and needs the store no more. A rank that leaves may close
  // its own at once: it has read all that the others sent for this, and what it sent comes before the
  // end.
  void await_all(Clock::time_point deadline) {
    const milliseconds timeout = options_->timeout;
    setTimeout(time_left(deadline));
    number_next(std::numeric_limits<uint32_t>::max());  // The next one's is 0.
    barrier()->wait();
    setTimeout(timeout);
  }
  // Operations that wait end with an error, and so do those that begin.
  void abort() override { connections_.shut_down(); }

  // Over one host all paths are alike; between hosts Gloo's ring crosses the network less often.
  c10::intrusive_ptr<c10d::Work> COHORT_ALL_GATHER_SINGLE(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    if (!one_host_) return ProcessGroupGloo::COHORT_ALL_GATHER_SINGLE(output, input, options);
    return direct_all_gather(*this, output, input, next_tag());
  }
  c10::intrusive_ptr<c10d::Work> COHORT_REDUCE_SCATTER_SINGLE(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return direct_reduce_scatter(*this, output, input, options.reduceOp, next_tag());
  }

 private:
  // Above the tags that a program gives its own messages.
  int next_tag() {
    return static_cast<int>((1U << 30) | (collectiveCounter_++ & ((1U << 30) - 1)));
  }

  Connections connections_;
  bool one_host_ = false;
};

// While one exists, threads that the calling thread starts are SCHED_BATCH: waking up, they do not
// preempt a running thread. Gloo's device thread wakes for each message, and spins while a sender
// holds the lock of the connection. If it preempted that sender, both would wait for the end of a
// time slice.
class BatchThreads {
 public:
  BatchThreads() : changed_(::sched_getscheduler(0) == SCHED_OTHER && set(SCHED_BATCH)) {}
  ~BatchThreads() {
    if (changed_) set(SCHED_OTHER);
  }
  BatchThreads(const BatchThreads&) = delete;
  BatchThreads& operator=(const BatchThreads&) = delete;

 private:
  // Of the calling thread. Where it is forbidden, this only makes messages slower.
  static bool set(int policy) {
    const sched_param none{};
    return ::sched_setscheduler(0, policy, &none) == 0;
  }

  const bool changed_;
};

Device make_device(const BackendRequest& request) {
  const BatchThreads batch;
  return request.interface.empty() ? Gloo::createDeviceForHostname(request.address)
                                   : Gloo::createDeviceForInterface(request.interface);
}

// Makes a device and finds where it listens: at the one endpoint that is new. Another thread of the
// program may begin to listen at the same moment; then again. Each group has its own, with its
// thread: a device that outlived its group would report late connections to objects that the group
// has destroyed.
Device make_device(const BackendRequest& request, Endpoint& endpoint) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  for (int attempt = 0; attempt < 100; ++attempt) {
    const auto before = listening_sockets();
    Device device = make_device(request);
    auto now = listening_sockets();
    std::erase_if(now, [&](const auto& socket) { return before.contains(socket.first); });
    if (now.size() != 1) continue;
    endpoint = now.begin()->second;
    return device;
  }
  TORCH_CHECK(
      false,
      "gloo: cannot tell its listening socket from those that other threads open all the time");
}

// c10d's flight recorder notes each group's first operation in a map of the whole process without a
// lock (libtorch 2.11): two groups that begin in two threads end the process. The trace page
// (docs/comm.md) shows the same. A user who sets its size has it all the same.
void turn_flight_recorder_off() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (!env_string("TORCH_NCCL_TRACE_BUFFER_SIZE"))
      ::setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);
  });
}

std::string endpoint_key(int rank) {
  return "endpoint/" + std::to_string(rank);
}

// Where the other ranks listen.
std::set<Endpoint> endpoints_of_peers(const BackendRequest& request) {
  std::set<Endpoint> peers;
  for (int peer = 0; peer < request.world_size; ++peer) {
    if (peer != request.rank) peers.insert(request.store->get_to_str(endpoint_key(peer)));
  }
  return peers;
}

std::string host_of(const Endpoint& endpoint) {
  return endpoint.substr(0, endpoint.rfind(':'));
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendRequest& request) {
  const auto deadline = Clock::now() + request.timeout;
  turn_flight_recorder_off();
  auto options = Gloo::Options::create(request.timeout);
  Endpoint endpoint;
  options->devices.push_back(make_device(request, endpoint));
  options->threads = 1;  // Buckets arrive one after another; a second thread only takes a core.
  // Before Gloo connects, so that connected peers find it.
  request.store->set(endpoint_key(request.rank), endpoint);
  auto backend =
      c10::make_intrusive<GlooBackend>(request.store, request.rank, request.world_size, options);
  const auto peers = endpoints_of_peers(request);
  backend->set_connections(Connections::where([&](const Endpoint& here, const Endpoint& there) {
    return here == endpoint || peers.contains(there);
  }));
  backend->set_one_host(std::all_of(peers.begin(), peers.end(), [&](const Endpoint& peer) {
    return host_of(peer) == host_of(endpoint);
  }));
  backend->await_all(deadline);
  return backend;
}

}  // namespace cohort::comm
