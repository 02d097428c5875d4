// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backends/shm/shm_backend.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <sstream>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/process_stat.h"
#include "cohort/comm/call_matcher.h"
#include "cohort/comm/number_hash.h"
#include "cohort/comm/rendezvous.h"
#include "cohort/comm/time_left.h"

namespace cohort::comm {
namespace {

using c10d::OpType;
using std::chrono::milliseconds;
using Message = SharedExchange::Message;
using Tensors = ShmBackend::Tensors;

// In a profiler's trace.
const char* title_of(OpType type) {
  switch (type) {
    case OpType::BROADCAST:
      return "shm:broadcast";
    case OpType::ALLREDUCE:
    case OpType::ALLREDUCE_COALESCED:
      return "shm:all_reduce";
    case OpType::REDUCE:
      return "shm:reduce";
    case OpType::ALLGATHER:
      return "shm:all_gather";
    case OpType::GATHER:
      return "shm:gather";
    case OpType::SCATTER:
      return "shm:scatter";
    case OpType::REDUCE_SCATTER:
      return "shm:reduce_scatter";
    case OpType::ALLTOALL:
      return "shm:all_to_all";
    case OpType::SEND:
      return "shm:send";
    case OpType::RECV:
    case OpType::RECVANYSOURCE:
      return "shm:recv";
    default:
      return "shm:barrier";
  }
}

// Nobody else keeps the time of a message: its limit counts from `wait`.
class ShmMessage : public QueuedWork {
 public:
  ShmMessage(int rank, OpType type, const Tensors& tensors, milliseconds timeout, std::string what)
      : QueuedWork(rank, type, title_of(type), tensors),
        timeout_(timeout),
        what_(std::move(what)) {}
  bool wait(milliseconds timeout) override {
    const milliseconds limit = timeout.count() > 0 ? timeout : timeout_;
    std::unique_lock lock(mutex_);
    if (!cv_.wait_for(lock, limit, [&] { return completed_; })) {
      C10_THROW_ERROR(DistBackendError, "shm: " + what_ + " has not come to an end within " +
                                            std::to_string(limit.count()) + " ms");
    }
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }

 private:
  const milliseconds timeout_;
  const std::string what_;
};

void check_dense(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(
      tensor.layout() == at::kStrided && tensor.device().is_cpu() && tensor.is_contiguous(), "shm ",
      name, ": expected a dense contiguous CPU tensor, got ", tensor.toString(), " of shape ",
      tensor.sizes());
}

const at::Tensor& only(const Tensors& tensors, const char* name) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "shm ", name, ": expected one tensor, got ",
                    tensors.size());
  return tensors[0];
}

const at::Tensor& only_dense(const Tensors& tensors, const char* name) {
  check_dense(only(tensors, name), name);
  return tensors[0];
}

// One tensor a rank, each like `like`.
void check_alike(const Tensors& list, int world_size, const at::Tensor& like, const char* name) {
  TORCH_CHECK_VALUE(list.size() == static_cast<size_t>(world_size), "shm ", name, ": expected ",
                    world_size, " tensors, got ", list.size());
  for (const auto& tensor : list) {
    check_dense(tensor, name);
    TORCH_CHECK_VALUE(tensor.numel() == like.numel() && tensor.scalar_type() == like.scalar_type(),
                      "shm ", name, ": expected tensors of ", like.numel(), " x ",
                      like.scalar_type(), ", got ", tensor.numel(), " x ", tensor.scalar_type());
  }
}

std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

Message message_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

// The piece at `offset` of a message that `tensor` takes.
void take_piece(const at::Tensor& tensor, size_t offset, const std::byte* piece,
                size_t piece_bytes) {
  if (offset >= tensor.nbytes()) return;
  std::byte* to = data_of(tensor) + offset;
  if (to != piece) std::memcpy(to, piece, std::min(piece_bytes, tensor.nbytes() - offset));
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const Message x = message_of(a), y = message_of(b);
  return x.data() < y.data() + y.size() && y.data() < x.data() + x.size();
}

// Views of `world_size` equal parts.
Tensors parts_of(const at::Tensor& tensor, int world_size) {
  return tensor.view({world_size, -1}).unbind(0);
}

Tensors equal_parts(const at::Tensor& whole, int world_size, const at::Tensor& like,
                    const char* name) {
  check_dense(whole, name);
  TORCH_CHECK_VALUE(
      whole.scalar_type() == like.scalar_type() && whole.numel() == like.numel() * world_size,
      "shm ", name, ": expected ", world_size, " parts of ", like.numel(), " x ",
      like.scalar_type(), ", got ", whole.numel(), " x ", whole.scalar_type());
  return whole.numel() > 0 ? parts_of(whole, world_size)
                           : Tensors(static_cast<size_t>(world_size), whole.view(-1));
}

// Rows of dimension 0, by split; equal shares if there is none.
Tensors split_rows(const at::Tensor& tensor, const std::vector<int64_t>& splits, int world_size,
                   const char* name) {
  check_dense(tensor, name);
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 0;
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % world_size == 0, "shm ", name, ": expected rows in ", world_size,
                      " equal shares, got ", rows);
    return rows > 0 ? tensor.split(rows / world_size, 0)
                    : Tensors(static_cast<size_t>(world_size), tensor.narrow(0, 0, 0));
  }
  TORCH_CHECK_VALUE(splits.size() == static_cast<size_t>(world_size), "shm ", name, ": expected ",
                    world_size, " splits, got ", splits.size());
  return tensor.split_with_sizes(splits, 0);
}

// What a rank tells the others of itself.
std::string describe_self(size_t room_each) {
  return own_host() + " " + std::to_string(getpid()) + " " + process_stat(getpid(), 22) + " " +
         std::to_string(room_each);
}

std::vector<int> numbers_of(const BackendRequest& request, std::vector<int> names) {
  if (names.empty()) {
    names.resize(static_cast<size_t>(request.world_size));
    std::iota(names.begin(), names.end(), 0);
  }
  return names;
}

// Makes `room_each` the least that a rank has.
std::vector<PeerProcess> find_peers(const BackendRequest& request, const std::vector<int>& names,
                                    std::chrono::steady_clock::time_point deadline,
                                    size_t& room_each) {
  const auto key = [](int rank) { return "process/" + std::to_string(rank); };
  request.store->set(key(request.rank), describe_self(room_each));
  const std::string own = own_host();
  std::vector<PeerProcess> peers;
  for (int peer = 0; peer < request.world_size; ++peer) {
    request.store->wait({key(peer)}, time_left(deadline));
    std::istringstream text(request.store->get_to_str(key(peer)));
    const std::string name = std::to_string(names[static_cast<size_t>(peer)]);
    std::string host, started;
    pid_t pid = -1;
    size_t room = 0;
    text >> host >> pid >> started >> room;
    room_each = std::min(room_each, room);
    if (host != own) {
      throw ConfigError("backend shm: expected all ranks on one host, rank " + name + " is on " +
                        host.substr(0, host.find('/')) + " or in other namespaces: use gloo");
    }
    peers.emplace_back(pid, started);
    if (!peers.back().is_watched())
      throw ConfigError("backend shm: expected pidfd_open (Linux 5.3) to watch rank " + name +
                        ": " + std::strerror(errno) + "; use gloo");
  }
  return peers;
}

size_t exchange_bytes(int world_size) {
  return SharedExchange::bytes_for(world_size);
}

// Of what the backend itself uses; the ranks' rooms follow.
size_t own_bytes(int world_size) {
  const size_t bytes = exchange_bytes(world_size) + Mailbox::bytes_for(world_size);
  return (bytes + Arena::kGrain - 1) / Arena::kGrain * Arena::kGrain;
}

bool is_limited(int resource) {
  rlimit limit{};
  return getrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0 ||
         limit.rlim_cur != RLIM_INFINITY;
}

// Addresses for the tensors of each rank that this process can have: twice its share of the machine's
// memory, for ranks need not take alike. Many groups have room beside each other.
size_t room_of_each(int world_size) {
  constexpr size_t kMostAddresses = size_t{512} << 30U;  // of 128 TiB that a process has
  if (world_size == 1) return 0;
  const size_t installed =
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto ranks = static_cast<size_t>(world_size);
  const size_t each =
      std::min(2 * installed, kMostAddresses) / ranks / Arena::kGrain * Arena::kGrain;
  const size_t all = own_bytes(world_size) + each * ranks;
  const bool limited = is_limited(RLIMIT_FSIZE) || is_limited(RLIMIT_AS);
  void* tried =
      limited ? MAP_FAILED
              : mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (tried == MAP_FAILED) {
    TORCH_WARN_ONCE(
        "shm: a limit of file sizes or addresses (ulimit -f, ulimit -v) leaves no room for tensors "
        "that ranks share: collectives copy them");
    return 0;
  }
  munmap(tried, all);
  return each;
}

std::shared_ptr<Arena> make_arena(const std::shared_ptr<const SharedMemory>& memory, int rank,
                                  int world_size, size_t each) {
  if (each == 0) return nullptr;
  return std::make_shared<Arena>(memory, own_bytes(world_size) + static_cast<size_t>(rank) * each,
                                 each);
}

}  // namespace

ShmBackend::ShmBackend(const BackendRequest& request, std::vector<int> names,
                       std::chrono::steady_clock::time_point deadline)
    : QueuedBackend(request.rank, request.world_size, request.timeout, "cohort-shm", title_of),
      names_(numbers_of(request, std::move(names))),
      room_each_(room_of_each(request.world_size)),
      peers_(find_peers(request, names_, deadline, room_each_)),
      memory_(std::make_shared<const SharedMemory>(SharedMemory::share(
          *request.store, request.rank, request.world_size, own_bytes(request.world_size),
          time_left(deadline), room_each_ * static_cast<size_t>(request.world_size)))),
      arena_(make_arena(memory_, request.rank, request.world_size, room_each_)),
      exchange_(
          memory_->data(), request.rank, peers_, names_,
          {.first = memory_->data() + own_bytes(request.world_size), .bytes_each = room_each_},
          request.has_core_each),
      mailbox_(memory_->data() + exchange_bytes(request.world_size), request.rank, peers_,
               [this] { exchange_.abort(); }) {
  init();
}

ShmBackend::~ShmBackend() {
  end_queue();
}

void ShmBackend::abort() {
  if (arena_) arena_->retire();
  exchange_.abort();
  mailbox_.fail("the message was aborted");
}

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK_VALUE(arena_ && options.device().is_cpu(),
                    "shm allocateTensor: expected ranks that share memory and a CPU tensor");
  return arena_->empty(size, options);
}

void ShmBackend::begin(const BackendCall& call) {
  exchange_.begin(call.shared, std::chrono::steady_clock::now() + call.timeout);
}

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = only_dense(tensors, "broadcast");
  const auto root = static_cast<size_t>(checked_rank(options.rootRank, "broadcast"));
  BackendCall call = backend_call(OpType::BROADCAST, options, tensors, tensor, timeout());
  call.run = [this, tensor, root] {
    const Message own = static_cast<int>(root) == rank_ ? message_of(tensor) : Message();
    exchange_.show(own, tensor.nbytes(), [&](size_t offset, size_t bytes, const auto& pieces) {
      take_piece(tensor, offset, pieces[root], bytes);
    });
  };
  return launch(std::move(call));
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only(tensors, "allreduce");
  if (tensor.is_sparse()) {
    TORCH_CHECK_VALUE(options.reduceOp == c10d::ReduceOp::SUM,
                      "shm allreduce: expected a sum of sparse tensors");
    BackendCall call = backend_call(OpType::ALLREDUCE, options, tensors, {}, timeout());
    call.shared.dtype = static_cast<int32_t>(tensor.scalar_type());
    call.shared.shape = hash_of_shape(static_cast<uint32_t>(tensor.sparse_dim()), tensor);
    call.run = [this, tensor] { all_reduce_sparse(tensor); };
    return launch(std::move(call));
  }
  check_dense(tensor, "allreduce");
  const Reduction reduction = reduction_of(options.reduceOp, tensor.scalar_type(), size_);
  BackendCall call = backend_call(OpType::ALLREDUCE, options, tensors, tensor, timeout());
  call.run = [this, tensor, reduction] {
    exchange_.all_reduce(reduction, data_of(tensor), tensor.numel(), tensor.element_size());
  };
  return launch(std::move(call));
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Reduction> reductions;
  BackendCall call = backend_call(OpType::ALLREDUCE_COALESCED, options, tensors, {}, timeout());
  call.shared.numel = 0;
  for (const auto& tensor : tensors) {
    check_dense(tensor, "allreduce_coalesced");
    reductions.push_back(reduction_of(options.reduceOp, tensor.scalar_type(), size_));
    call.shared.numel += tensor.numel();
    call.shared.shape = hash_of_shape(call.shared.shape, tensor);
  }
  call.run = [this, list = tensors, reductions] {
    for (size_t i = 0; i < list.size(); ++i)
      exchange_.all_reduce(reductions[i], data_of(list[i]), list[i].numel(),
                           list[i].element_size());
  };
  return launch(std::move(call));
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor tensor = only_dense(tensors, "reduce");
  const bool is_root = checked_rank(options.rootRank, "reduce") == rank_;
  const Reduction reduction = reduction_of(options.reduceOp, tensor.scalar_type(), size_);
  BackendCall call = backend_call(OpType::REDUCE, options, tensors, tensor, timeout());
  call.run = [this, tensor, is_root, reduction] {
    const Message own = message_of(tensor);
    exchange_.show(own, own.size(), [&](size_t offset, size_t bytes, const auto& pieces) {
      if (!is_root) return;
      const auto here = static_cast<int64_t>(std::min(bytes, own.size() - offset));
      comm::reduce(reduction, data_of(tensor) + offset, pieces, here / tensor.element_size());
    });
  };
  return launch(std::move(call));
}

// Whether an output lies where other ranks read what this one sends them.
bool ShmBackend::writes_to_sent(const Tensors& outputs, const Tensors& inputs) const {
  for (size_t peer = 0; peer < inputs.size(); ++peer) {
    if (static_cast<int>(peer) == rank_) continue;
    for (const at::Tensor& output : outputs)
      if (overlap(output, inputs[peer])) return true;
  }
  return false;
}

// Shows this rank's tensor, and takes every rank's into `list`; an empty one takes none.
void ShmBackend::gather_into(const Tensors& list, const at::Tensor& input) {
  const Message own = message_of(input);
  exchange_.show(own, own.size(), [&](size_t offset, size_t bytes, const auto& pieces) {
    for (size_t peer = 0; peer < list.size(); ++peer)
      take_piece(list[peer], offset, pieces[peer], bytes);
  });
}

ShmBackend::WorkPtr ShmBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  const at::Tensor input = only_dense(inputs, "allgather");
  TORCH_CHECK_VALUE(outputs.size() == 1, "shm allgather: expected one list of outputs, got ",
                    outputs.size());
  check_alike(outputs[0], size_, input, "allgather");
  BackendCall call = backend_call(OpType::ALLGATHER, options, outputs[0], input, timeout());
  call.run = [this, list = outputs[0], input] { gather_into(list, input); };
  return launch(std::move(call));
}

ShmBackend::WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  check_dense(input, "_allgather_base");
  std::vector<Tensors> outputs{equal_parts(output, size_, input, "_allgather_base")};
  Tensors inputs{input};
  return allgather(outputs, inputs, options);
}

ShmBackend::WorkPtr ShmBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const at::Tensor input = only_dense(inputs, "gather");
  const bool is_root = checked_rank(options.rootRank, "gather") == rank_;
  TORCH_CHECK_VALUE(outputs.size() == (is_root ? 1U : 0U),
                    "shm gather: expected a list of outputs on the root alone");
  if (is_root) check_alike(outputs[0], size_, input, "gather");
  BackendCall call =
      backend_call(OpType::GATHER, options, is_root ? outputs[0] : Tensors(), input, timeout());
  call.run = [this, list = call.results, input] { gather_into(list, input); };
  return launch(std::move(call));
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ScatterOptions& options) {
  const at::Tensor output = only_dense(outputs, "scatter");
  const auto root = static_cast<size_t>(checked_rank(options.rootRank, "scatter"));
  const bool is_root = static_cast<int>(root) == rank_;
  TORCH_CHECK_VALUE(inputs.size() == (is_root ? 1U : 0U),
                    "shm scatter: expected a list of inputs on the root alone");
  if (is_root) check_alike(inputs[0], size_, output, "scatter");
  BackendCall call = backend_call(OpType::SCATTER, options, outputs, output, timeout());
  call.run = [this, output, root, list = is_root ? inputs[0] : Tensors()] {
    std::vector<Message> messages;
    for (const at::Tensor& part : list) messages.push_back(message_of(part));
    exchange_.pass(
        messages, output.nbytes(),
        [&](size_t offset, size_t bytes, const auto& pieces) {
          take_piece(output, offset, pieces[root], bytes);
        },
        !writes_to_sent({output}, list));
  };
  return launch(std::move(call));
}

// Every rank sums its part of all inputs.
void ShmBackend::scatter_sums(const at::Tensor& output, const Tensors& inputs,
                              const Reduction& reduction) {
  std::vector<Message> messages;
  for (const at::Tensor& part : inputs) messages.push_back(message_of(part));
  exchange_.pass(
      messages, output.nbytes(),
      [&](size_t offset, size_t bytes, const auto& pieces) {
        const auto here = static_cast<int64_t>(std::min(bytes, output.nbytes() - offset));
        comm::reduce(reduction, data_of(output) + offset, pieces, here / output.element_size());
      },
      !writes_to_sent({output}, inputs));
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  const at::Tensor output = only_dense(outputs, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs.size() == 1, "shm reduce_scatter: expected one list of inputs, got ",
                    inputs.size());
  check_alike(inputs[0], size_, output, "reduce_scatter");
  const Reduction reduction = reduction_of(options.reduceOp, output.scalar_type(), size_);
  BackendCall call = backend_call(OpType::REDUCE_SCATTER, options, outputs, output, timeout());
  call.run = [this, output, list = inputs[0], reduction] { scatter_sums(output, list, reduction); };
  return launch(std::move(call));
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  check_dense(output, "_reduce_scatter_base");
  std::vector<Tensors> inputs{equal_parts(input, size_, output, "_reduce_scatter_base")};
  Tensors outputs{output};
  return reduce_scatter(outputs, inputs, options);
}

// Tensors of any length to every rank. Lengths go ahead: ranks compare them, and all must take as
// many steps.
void ShmBackend::exchange(const Tensors& outputs, const Tensors& inputs) {
  const auto ranks = static_cast<size_t>(size_);
  std::vector<int64_t> lengths;
  std::vector<Message> messages;
  for (const at::Tensor& input : inputs) messages.push_back(message_of(input));
  for (const Tensors* list : {&inputs, &outputs}) {
    for (const at::Tensor& tensor : *list) lengths.push_back(static_cast<int64_t>(tensor.nbytes()));
  }
  std::vector<int64_t> all(ranks * lengths.size());
  const Message own = std::as_bytes(std::span(lengths));
  exchange_.show(own, own.size(), [&](size_t, size_t, const auto& pieces) {
    for (size_t peer = 0; peer < ranks; ++peer)
      std::memcpy(&all[peer * lengths.size()], pieces[peer], own.size());
  });
  check_split_bytes(all, size_);
  exchange_.pass(
      messages, static_cast<size_t>(*std::ranges::max_element(all)),
      [&](size_t offset, size_t bytes, const auto& pieces) {
        for (size_t peer = 0; peer < ranks; ++peer)
          take_piece(outputs[peer], offset, pieces[peer], bytes);
      },
      !writes_to_sent(outputs, inputs));
}

ShmBackend::WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits,
                                              std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  Tensors outputs = split_rows(output, output_splits, size_, "alltoall_base");
  Tensors inputs = split_rows(input, input_splits, size_, "alltoall_base");
  return alltoall(outputs, inputs, options);
}

ShmBackend::WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size_) && inputs.size() == outputs.size(),
                    "shm alltoall: expected ", size_, " outputs and inputs, got ", outputs.size(),
                    " and ", inputs.size());
  for (const Tensors* list : {&outputs, &inputs}) {
    for (const at::Tensor& tensor : *list) check_dense(tensor, "alltoall");
  }
  BackendCall call = backend_call(OpType::ALLTOALL, options, outputs, {}, timeout());
  call.shared.dtype = static_cast<int32_t>(outputs[0].scalar_type());
  call.run = [this, to = outputs, from = inputs] { exchange(to, from); };
  return launch(std::move(call));
}

// Every rank adds all ranks' tensors, in their order. Their numbers of elements differ.
void ShmBackend::all_reduce_sparse(at::Tensor tensor) {
  const at::Tensor own = tensor.coalesce();
  const at::Tensor indices = own.indices().contiguous();
  const at::Tensor values = own.values().contiguous();
  const auto ranks = static_cast<size_t>(size_);
  std::vector<int64_t> num(ranks);
  const std::array<int64_t, 1> mine{own._nnz()};
  exchange_.show(std::as_bytes(std::span(mine)), sizeof mine,
                 [&](size_t, size_t, const auto& pieces) {
                   for (size_t peer = 0; peer < ranks; ++peer)
                     std::memcpy(&num[peer], pieces[peer], sizeof(int64_t));
                 });
  const int64_t most = *std::ranges::max_element(num);
  Tensors all_indices, all_values;
  std::vector<int64_t> shape = values.sizes().vec();
  for (const int64_t count : num) {
    shape[0] = count;
    all_indices.push_back(at::empty({indices.size(0), count}, indices.options()));
    all_values.push_back(at::empty(shape, values.options()));
  }
  const auto gather_all = [&](const at::Tensor& from, const Tensors& to, int64_t bytes_each) {
    exchange_.show(message_of(from), static_cast<size_t>(most * bytes_each),
                   [&](size_t offset, size_t bytes, const auto& pieces) {
                     for (size_t peer = 0; peer < ranks; ++peer)
                       take_piece(to[peer], offset, pieces[peer], bytes);
                   });
  };
  gather_all(indices, all_indices, indices.size(0) * indices.element_size());
  gather_all(values, all_values,
             values.element_size() * c10::multiply_integers(values.sizes().slice(1)));
  at::Tensor sum;
  for (size_t peer = 0; peer < ranks; ++peer) {
    const at::Tensor term =
        at::sparse_coo_tensor(all_indices[peer], all_values[peer], tensor.sizes())
            ._coalesced_(true);
    sum = sum.defined() ? sum.add(term) : term;
  }
  tensor.copy_(sum.coalesce());
}

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int destination, int tag) {
  const at::Tensor tensor = only_dense(tensors, "send");
  const int to = checked_rank(destination, "send");
  TORCH_CHECK_VALUE(to != rank_, "shm send: expected another rank, got this one");
  auto work = c10::make_intrusive<ShmMessage>(rank_, OpType::SEND, tensors, timeout(),
                                              "a message to rank " + std::to_string(to));
  mailbox_.send(message_of(tensor), to, tag,
                [work, tensor](int, std::exception_ptr error) { work->end(std::move(error)); });
  return work;
}

// A caller that lets go of the work before the message begins to arrive does not want it.
ShmBackend::WorkPtr ShmBackend::receive(OpType type, const at::Tensor& tensor, int from, int tag) {
  const std::string what =
      "a message from " +
      (from == Mailbox::kAnyRank ? std::string("any rank") : "rank " + std::to_string(from));
  auto work = c10::make_intrusive<ShmMessage>(rank_, type, Tensors{tensor}, timeout(), what);
  const c10::weak_intrusive_ptr<ShmMessage> weak(work);
  mailbox_.receive(
      std::span(data_of(tensor), tensor.nbytes()), from, tag, [weak] { return !weak.expired(); },
      [weak, tensor](int sender, std::exception_ptr error) {
        if (const auto wanted = weak.lock()) wanted->end(std::move(error), sender);
      });
  return work;
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int source, int tag) {
  const at::Tensor tensor = only_dense(tensors, "recv");
  const int from = checked_rank(source, "recv");
  TORCH_CHECK_VALUE(from != rank_, "shm recv: expected another rank, got this one");
  return receive(OpType::RECV, tensor, from, tag);
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive(OpType::RECVANYSOURCE, only_dense(tensors, "recvAnysource"), Mailbox::kAnyRank,
                 tag);
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  BackendCall call = backend_call(OpType::BARRIER, options, {}, {}, timeout());
  call.run = [this] { exchange_.barrier(); };
  return launch(std::move(call));
}

uint32_t hash_of_shape(uint32_t before, const at::Tensor& tensor) {
  NumberHash hash(before);
  hash.add(static_cast<int64_t>(tensor.scalar_type()));
  for (const int64_t length : tensor.sizes()) hash.add(length);
  return hash.value() | 1U;
}

c10::intrusive_ptr<c10d::Backend> make_shm_backend(const BackendRequest& request) {
  if (request.world_size > kMostShmRanks) {
    throw ConfigError("backend shm: expected at most " + std::to_string(kMostShmRanks) +
                      " ranks, got " + std::to_string(request.world_size));
  }
  return c10::make_intrusive<ShmBackend>(request);
}

std::string memory_sharing() {
  return why_no_memory_sharing().empty() ? "uid" + std::to_string(geteuid()) : std::string();
}

std::string why_no_memory_sharing() {
  const Fd process(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  if (!process) return std::string("pidfd_open (Linux 5.3): ") + std::strerror(errno);
  const Fd memory(memfd_create("cohort-shm", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory) return std::string("memfd_create: ") + std::strerror(errno);
  rlimit file_size{};
  getrlimit(RLIMIT_FSIZE, &file_size);
  const size_t expected = own_bytes(kMostShmRanks);
  if (file_size.rlim_cur >= expected) return {};
  return "expected a limit of file sizes (ulimit -f) of at least " +
         std::to_string(expected >> 10U) + " KiB, got " +
         std::to_string(file_size.rlim_cur >> 10U) + " KiB";
}

}  // namespace cohort::comm
