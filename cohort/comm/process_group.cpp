#include "cohort/comm/process_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <cstring>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/comm/backends/gloo/gloo.h"
#include "cohort/comm/failure_watch.h"
#include "cohort/comm/listen.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

milliseconds since(Clock::time_point start) {
  return std::chrono::duration_cast<milliseconds>(Clock::now() - start);
}

c10d::TCPStoreOptions store_options(const Place& place, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(place.master_port);
  options.timeout = timeout;
  options.waitWorkers = false;
  options.numWorkers = static_cast<size_t>(place.world_size);
  return options;
}

// Rank 0 hosts the store on a socket that is bound here or by the launcher: no port is ever raced
// for.
StorePtr connect_store(const Place& place, milliseconds timeout) {
  auto options = store_options(place, timeout);
  if (place.rank == 0) {
    options.isServer = true;
    options.masterListenFd = place.store_fd ? *place.store_fd : listen_on(place.master_port);
    options.port = static_cast<uint16_t>(port_of(*options.masterListenFd));
    if (options.port != place.master_port) {
      throw ConfigError("COHORT_STORE_FD listens on port " + std::to_string(options.port) +
                        ": expected MASTER_PORT=" + std::to_string(place.master_port));
    }
    return c10::make_intrusive<c10d::TCPStore>("localhost", options);
  }
  return c10::make_intrusive<c10d::TCPStore>(place.master_addr, options);
}

c10d::ReduceOp::RedOpType engine_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReduceOp::kSum:
      break;
  }
  return c10d::ReduceOp::SUM;
}

}  // namespace

struct ProcessGroup::Impl {
  Place place;
  GroupOptions options;
  StorePtr store;                       // this thread's connection
  std::unique_ptr<FailureWatch> watch;  // none in a group of one
  c10::intrusive_ptr<c10d::ProcessGroup> engine;
  int64_t sequence = 0;
  bool dead = false;

  void meet();
  void wait_for_counter(const std::string& key);
  [[noreturn]] void fail(const std::string& operation, Clock::time_point start,
                         const std::string& cause);
};

ProcessGroup::ProcessGroup(const Place& place, const GroupOptions& options)
    : impl_(std::make_unique<Impl>()) {
  if (options.backend != "gloo") {
    throw ConfigError("backend \"" + options.backend + "\" is unknown: expected gloo");
  }
  impl_->place = place;
  impl_->options = options;
  impl_->meet();
}

void ProcessGroup::Impl::meet() {
  const auto start = Clock::now();
  std::string address = "127.0.0.1";
  const std::string where = place.master_addr + ":" + std::to_string(place.master_port);
  try {
    if (place.world_size == 1) {
      store = c10::make_intrusive<c10d::HashStore>();
    } else {
      address = local_address_towards(place.master_addr, place.master_port);
      store = connect_store(place, options.rendezvous_timeout);
    }
    store->setTimeout(options.rendezvous_timeout);
    const auto prefix = c10::make_intrusive<c10d::PrefixStore>("group", store);
    engine = c10::make_intrusive<c10d::ProcessGroup>(prefix, place.rank, place.world_size);
    auto backend =
        make_gloo_backend(c10::make_intrusive<c10d::PrefixStore>("cpu", prefix), place.rank,
                          place.world_size, options.rendezvous_timeout, address);
    backend->setTimeout(options.timeout);
    engine->setDefaultBackend(c10d::ProcessGroup::GLOO);
    engine->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::GLOO, backend);
    engine->setGroupName("cohort");
    if (place.world_size > 1) {
      auto client = store_options(place, options.rendezvous_timeout);
      auto own = c10::make_intrusive<c10d::TCPStore>(
          place.rank == 0 ? "localhost" : place.master_addr, client);
      watch = std::make_unique<FailureWatch>(
          c10::make_intrusive<c10d::PrefixStore>("watch", std::move(own)), place.rank,
          place.world_size);
    }
  } catch (const c10::ValueError&) {
    throw;
  } catch (const std::exception& error) {
    throw PeerError({.rank = place.rank,
                     .lost_ranks = {},
                     .operation = "rendezvous at " + where,
                     .sequence = -1,
                     .elapsed = since(start),
                     .cause = one_line(error)});
  }
}

void ProcessGroup::Impl::fail(const std::string& operation, Clock::time_point start,
                              const std::string& cause) {
  dead = true;
  const auto elapsed = since(start);
  throw PeerError({.rank = place.rank,
                   .lost_ranks = watch ? watch->lost_ranks() : std::vector<int>{},
                   .operation = operation,
                   .sequence = sequence,
                   .elapsed = elapsed,
                   .cause = cause});
}

void ProcessGroup::Impl::wait_for_counter(const std::string& key) {
  // Everyone has just met in a barrier, so nobody is far away.
  const auto deadline = Clock::now() + std::min<milliseconds>(options.timeout, milliseconds(30'000));
  while (store->add(key, 0) < place.world_size) {
    if (Clock::now() > deadline) C10_THROW_ERROR(DistError, "waited in vain for " + key);
    usleep(500);
  }
}

ProcessGroup::~ProcessGroup() = default;

int ProcessGroup::rank() const {
  return impl_->place.rank;
}
int ProcessGroup::size() const {
  return impl_->place.world_size;
}
const Place& ProcessGroup::place() const {
  return impl_->place;
}
c10d::ProcessGroup& ProcessGroup::engine() {
  return *impl_->engine;
}

void ProcessGroup::guard(const std::string& operation, const std::function<void()>& call) {
  const auto start = Clock::now();
  if (impl_->dead) impl_->fail(operation, start, "the group is dead since it lost a peer");
  ++impl_->sequence;
  try {
    call();
  } catch (const PeerError&) {
    throw;
  } catch (const c10::DistError& error) {
    impl_->fail(operation, start, one_line(error));
  } catch (const c10::Error& error) {
    // c10d reports a failed collective of the Reducer as a plain c10::Error with Gloo's text in it.
    const std::string text = one_line(error);
    if (text.find("gloo/transport") == std::string::npos) throw;
    impl_->fail(operation, start, text);
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    // Gloo's IoException is a std::runtime_error and its EnforceNotMet a std::exception.
    const std::string text = one_line(error);
    if (text.find("gloo/") == std::string::npos) throw;
    impl_->fail(operation, start, text);
  }
}

void ProcessGroup::all_reduce(at::Tensor& tensor, ReduceOp op) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "all_reduce: expected a contiguous tensor");
  guard("all_reduce", [&] {
    std::vector<at::Tensor> tensors{tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = engine_op(op);
    impl_->engine->allreduce(tensors, options)->wait();
  });
}

int64_t ProcessGroup::all_reduce_sum(int64_t value) {
  at::Tensor tensor = at::tensor({value});
  all_reduce(tensor);
  return tensor.item<int64_t>();
}

void ProcessGroup::broadcast(at::Tensor& tensor, int root) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "broadcast: expected a contiguous tensor");
  TORCH_CHECK_VALUE(root >= 0 && root < size(), "broadcast: expected a root in [0, ", size(),
                    "), got ", root);
  guard("broadcast", [&] {
    std::vector<at::Tensor> tensors{tensor};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    impl_->engine->broadcast(tensors, options)->wait();
  });
}

std::string ProcessGroup::broadcast_text(const std::string& text, int root) {
  at::Tensor length = at::tensor({static_cast<int64_t>(text.size())});
  broadcast(length, root);
  at::Tensor bytes = at::empty({length.item<int64_t>()}, at::kByte);
  if (rank() == root) std::memcpy(bytes.data_ptr(), text.data(), text.size());
  if (bytes.numel() > 0) broadcast(bytes, root);
  return std::string(static_cast<const char*>(bytes.data_ptr()),
                     static_cast<size_t>(bytes.numel()));
}

std::vector<std::string> ProcessGroup::all_gather_text(const std::string& text) {
  std::vector<std::string> texts;
  for (int root = 0; root < size(); ++root) texts.push_back(broadcast_text(text, root));
  return texts;
}

void ProcessGroup::barrier(const std::string& name, std::optional<milliseconds> limit) {
  guard("barrier \"" + name + "\"", [&] {
    at::Tensor token = at::zeros({1}, at::kByte);
    std::vector<at::Tensor> tensors{token};
    c10d::AllreduceOptions options;
    options.timeout = limit.value_or(impl_->options.timeout);
    impl_->engine->allreduce(tensors, options)->wait();
  });
}

void ProcessGroup::close() {
  if (size() == 1) return;
  barrier("close");  // a peer that is gone shows here, as in any collective
  guard("close", [&] {
    impl_->store->add("closing", 1);
    impl_->wait_for_counter("closing");
    impl_->watch.reset();
    impl_->engine.reset();
    impl_->store->add("closed", 1);
    if (rank() == 0) impl_->wait_for_counter("closed");
  });
}

}  // namespace cohort::comm
