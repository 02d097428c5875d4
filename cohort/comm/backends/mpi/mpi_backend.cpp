// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backends/mpi/mpi_backend.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <algorithm>
#include <memory>
#include <utility>

#include "cohort/comm/backends/mpi/mpi_types.h"

namespace cohort::comm {
namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;
using std::chrono::milliseconds;

// MPI counts in int. Every longer message goes in pieces of this many bytes, on both sides.
constexpr int64_t kPieceBytes = int64_t{1} << 30;
constexpr int kTag = 0;

class MpiWork : public c10d::Work {
 public:
  MpiWork(int rank, OpType type, const std::string& title, Tensors results)
      : Work(rank, type, title.c_str()),
        results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}

  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  int sourceRank() const override { return source_; }

  void set_source(int source) { source_ = source; }
  void end(std::exception_ptr error) {
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(results_));
    }
    finish(error);
  }

 private:
  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  int source_ = -1;
};

void check_tensor(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(
      tensor.layout() == at::kStrided && tensor.device().is_cpu() && tensor.is_contiguous(), "mpi ",
      name, ": expected a dense contiguous CPU tensor, got ", tensor.toString(), " of shape ",
      tensor.sizes());
}

// One tensor a rank, each like `like`.
void check_list(const Tensors& list, int world_size, const at::Tensor& like, const char* name) {
  TORCH_CHECK_VALUE(list.size() == static_cast<size_t>(world_size), "mpi ", name, ": expected ",
                    world_size, " tensors, got ", list.size());
  for (const auto& tensor : list) {
    check_tensor(tensor, name);
    TORCH_CHECK_VALUE(tensor.numel() == like.numel() && tensor.scalar_type() == like.scalar_type(),
                      "mpi ", name, ": expected tensors of ", like.numel(), " x ",
                      like.scalar_type(), ", got ", tensor.numel(), " x ", tensor.scalar_type());
  }
}

int64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.nbytes());
}

// Calls visit(pointer, count) for the pieces of `total` units of `unit_bytes` at `data`.
template <typename Visit>
void for_pieces(void* data, int64_t total, int64_t unit_bytes, const Visit& visit) {
  const int64_t most = kPieceBytes / unit_bytes;
  for (int64_t begin = 0; begin < total; begin += most) {
    visit(static_cast<char*>(data) + begin * unit_bytes,
          static_cast<int>(std::min(most, total - begin)));
  }
}

void post_send(const at::Tensor& tensor, int to, int tag, MPI_Comm comm, MpiRequests& requests) {
  for_pieces(tensor.data_ptr(), bytes_of(tensor), 1, [&](void* data, int count) {
    check_mpi(MPI_Isend(data, count, MPI_BYTE, to, tag, comm, requests.next()), "MPI_Isend");
  });
}

void post_receive(const at::Tensor& tensor, int from, int tag, MPI_Comm comm,
                  MpiRequests& requests) {
  for_pieces(tensor.data_ptr(), bytes_of(tensor), 1, [&](void* data, int count) {
    check_mpi(MPI_Irecv(data, count, MPI_BYTE, from, tag, comm, requests.next()), "MPI_Irecv");
  });
}

void post_broadcast(void* data, int64_t bytes, int root, MPI_Comm comm, MpiRequests& requests) {
  for_pieces(data, bytes, 1, [&](void* piece, int count) {
    check_mpi(MPI_Ibcast(piece, count, MPI_BYTE, root, comm, requests.next()), "MPI_Ibcast");
  });
}

// Reduces `elements` of the reduction's type from `in` to `out` on `root`.
void post_reduce(void* in, void* out, int64_t elements, int64_t element_bytes,
                 MpiReduction reduction, int root, MPI_Comm comm, MpiRequests& requests) {
  for_pieces(out, elements, element_bytes, [&](void* piece, int count) {
    void* from = in == MPI_IN_PLACE ? in
                                    : static_cast<char*>(in) +
                                          (static_cast<char*>(piece) - static_cast<char*>(out));
    check_mpi(
        MPI_Ireduce(from, piece, count, reduction.type, reduction.op, root, comm, requests.next()),
        "MPI_Ireduce");
  });
}

void post_all_gather(const at::Tensor& output, const at::Tensor& input, int rank, int world_size,
                     MPI_Comm comm, MpiRequests& requests) {
  const int64_t bytes = bytes_of(input);
  auto* out = static_cast<char*>(output.data_ptr());
  if (bytes <= kPieceBytes) {
    check_mpi(MPI_Iallgather(input.data_ptr(), static_cast<int>(bytes), MPI_BYTE, out,
                             static_cast<int>(bytes), MPI_BYTE, comm, requests.next()),
              "MPI_Iallgather");
    return;
  }
  output.view(-1).narrow(0, rank * input.numel(), input.numel()).copy_(input.view(-1));
  for (int root = 0; root < world_size; ++root)
    post_broadcast(out + root * bytes, bytes, root, comm, requests);
}

void divide(const at::Tensor& tensor, c10d::ReduceOp op, int world_size) {
  if (op == c10d::ReduceOp::AVG) at::Tensor(tensor).div_(world_size);
}

}  // namespace

MpiBackend::MpiBackend(MpiThread& mpi, int rank, std::vector<int> world_ranks, milliseconds timeout)
    : Backend(rank, static_cast<int>(world_ranks.size())), mpi_(mpi), timeout_(timeout) {
  const auto made = std::make_shared<std::pair<MPI_Comm, MPI_Comm>>(MPI_COMM_NULL, MPI_COMM_NULL);
  mpi.run("connect", timeout, [made, ranks = std::move(world_ranks)] {
    MPI_Group world = MPI_GROUP_NULL;
    MPI_Group members = MPI_GROUP_NULL;
    check_mpi(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
    check_mpi(MPI_Group_incl(world, static_cast<int>(ranks.size()), ranks.data(), &members),
              "MPI_Group_incl");
    check_mpi(MPI_Comm_create_group(MPI_COMM_WORLD, members, kTag, &made->first),
              "MPI_Comm_create_group");
    check_mpi(MPI_Comm_set_errhandler(made->first, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check_mpi(MPI_Comm_dup(made->first, &made->second), "MPI_Comm_dup");
    MPI_Group_free(&members);
    MPI_Group_free(&world);
  });
  std::tie(comm_, peers_) = *made;
  init();
}

MpiBackend::WorkPtr MpiBackend::launch(Call call) {
  ++sequence_;
  auto work =
      c10::make_intrusive<MpiWork>(rank_, call.type, "mpi:" + call.name, std::move(call.results));
  const milliseconds timeout = call.timeout > kNoTimeout ? call.timeout : timeout_.load();
  mpi_.submit(
      {.name = std::move(call.name),
       .timeout = timeout,
       .start = std::move(call.start),
       .finish =
           [work, type = call.type, finish = std::move(call.finish)](const MpiRequests& requests) {
             if (type == OpType::RECVANYSOURCE)
               work->set_source(requests.statuses.at(0).MPI_SOURCE);
             if (finish) finish();
           },
       .done = [work](std::exception_ptr error) { work->end(error); }});
  return work;
}

at::Tensor MpiBackend::only(const Tensors& tensors, const char* name) const {
  TORCH_CHECK_VALUE(tensors.size() == 1, "mpi ", name, ": expected one tensor, got ",
                    tensors.size());
  check_tensor(tensors[0], name);
  return tensors[0];
}

int MpiBackend::checked_rank(int64_t rank, const char* name) const {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "mpi ", name, ": expected a rank in [0, ", size_,
                    "), got ", rank);
  return static_cast<int>(rank);
}

MpiBackend::WorkPtr MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = only(tensors, "broadcast");
  const int root = checked_rank(options.rootRank, "broadcast");
  return launch({.type = OpType::BROADCAST,
                 .name = "broadcast",
                 .timeout = options.timeout,
                 .results = tensors,
                 .start = [tensor, root, comm = comm_](MpiRequests& requests) {
                   post_broadcast(tensor.data_ptr(), bytes_of(tensor), root, comm, requests);
                 }});
}

MpiBackend::WorkPtr MpiBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  only(tensors, "allreduce");
  return all_reduce_each(OpType::ALLREDUCE, "allreduce", tensors, options);
}

MpiBackend::WorkPtr MpiBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return all_reduce_each(OpType::ALLREDUCE_COALESCED, "allreduce_coalesced", tensors, options);
}

MpiBackend::WorkPtr MpiBackend::all_reduce_each(OpType type, const char* name, Tensors& tensors,
                                                const c10d::AllreduceOptions& options) {
  const c10d::ReduceOp op = options.reduceOp;
  for (const auto& tensor : tensors) {
    check_tensor(tensor, name);
    mpi_reduction(tensor.scalar_type(), op);
  }
  return launch({.type = type,
                 .name = name,
                 .timeout = options.timeout,
                 .results = tensors,
                 .start =
                     [tensors, op, comm = comm_](MpiRequests& requests) {
                       for (const auto& tensor : tensors) {
                         const auto [mpi_type, mpi_op] = mpi_reduction(tensor.scalar_type(), op);
                         for_pieces(tensor.data_ptr(), tensor.numel(), tensor.element_size(),
                                    [&, type = mpi_type, op = mpi_op](void* data, int count) {
                                      check_mpi(MPI_Iallreduce(MPI_IN_PLACE, data, count, type, op,
                                                               comm, requests.next()),
                                                "MPI_Iallreduce");
                                    });
                       }
                     },
                 .finish =
                     [tensors, op, world_size = size_] {
                       for (const auto& tensor : tensors) divide(tensor, op, world_size);
                     }});
}

MpiBackend::WorkPtr MpiBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor tensor = only(tensors, "reduce");
  const int root = checked_rank(options.rootRank, "reduce");
  const c10d::ReduceOp op = options.reduceOp;
  const MpiReduction reduction = mpi_reduction(tensor.scalar_type(), op);
  const bool is_root = rank_ == root;
  // MPI wants the other ranks' second buffer too, if only to count; it does not touch it.
  return launch({.type = OpType::REDUCE,
                 .name = "reduce",
                 .timeout = options.timeout,
                 .results = tensors,
                 .start =
                     [=, comm = comm_](MpiRequests& requests) {
                       post_reduce(is_root ? MPI_IN_PLACE : tensor.data_ptr(), tensor.data_ptr(),
                                   tensor.numel(), tensor.element_size(), reduction, root, comm,
                                   requests);
                     },
                 .finish =
                     [=, world_size = size_] {
                       if (is_root) divide(tensor, op, world_size);
                     }});
}

MpiBackend::WorkPtr MpiBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  const at::Tensor input = only(inputs, "allgather");
  TORCH_CHECK_VALUE(outputs.size() == 1, "mpi allgather: expected one list of outputs, got ",
                    outputs.size());
  check_list(outputs[0], size_, input, "allgather");
  const at::Tensor flat = at::empty({size_, input.numel()}, input.options());
  return launch({.type = OpType::ALLGATHER,
                 .name = "allgather",
                 .timeout = options.timeout,
                 .results = outputs[0],
                 .start =
                     [=, rank = rank_, world_size = size_, comm = comm_](MpiRequests& requests) {
                       post_all_gather(flat, input, rank, world_size, comm, requests);
                     },
                 .finish =
                     [flat, list = outputs[0]] {
                       for (size_t i = 0; i < list.size(); ++i) {
                         at::Tensor(list[i]).copy_(
                             flat[static_cast<int64_t>(i)].view(list[i].sizes()));
                       }
                     }});
}

MpiBackend::WorkPtr MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  check_tensor(input, "allgather_into_tensor");
  check_tensor(output, "allgather_into_tensor");
  TORCH_CHECK_VALUE(
      output.numel() == input.numel() * size_ && output.scalar_type() == input.scalar_type(),
      "mpi allgather_into_tensor: expected an output of ", input.numel() * size_, " x ",
      input.scalar_type(), ", got ", output.numel(), " x ", output.scalar_type());
  return launch({.type = OpType::_ALLGATHER_BASE,
                 .name = "allgather_into_tensor",
                 .timeout = options.timeout,
                 .results = {output},
                 .start = [output, input, rank = rank_, world_size = size_,
                           comm = comm_](MpiRequests& requests) {
                   post_all_gather(output, input, rank, world_size, comm, requests);
                 }});
}

MpiBackend::WorkPtr MpiBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const at::Tensor input = only(inputs, "gather");
  const int root = checked_rank(options.rootRank, "gather");
  Tensors list;
  if (rank_ == root) {
    TORCH_CHECK_VALUE(outputs.size() == 1,
                      "mpi gather: expected one list of outputs on the root, got ", outputs.size());
    list = outputs[0];
    check_list(list, size_, input, "gather");
  }
  return launch({.type = OpType::GATHER,
                 .name = "gather",
                 .timeout = options.timeout,
                 .results = list,
                 .start = [=, rank = rank_, comm = comm_](MpiRequests& requests) {
                   if (rank != root) return post_send(input, root, kTag, comm, requests);
                   for (int peer = 0; peer < static_cast<int>(list.size()); ++peer) {
                     const at::Tensor& output = list[static_cast<size_t>(peer)];
                     if (peer != rank) post_receive(output, peer, kTag, comm, requests);
                   }
                   at::Tensor(list[static_cast<size_t>(rank)])
                       .copy_(input.view(list[static_cast<size_t>(rank)].sizes()));
                 }});
}

MpiBackend::WorkPtr MpiBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ScatterOptions& options) {
  const at::Tensor output = only(outputs, "scatter");
  const int root = checked_rank(options.rootRank, "scatter");
  Tensors list;
  if (rank_ == root) {
    TORCH_CHECK_VALUE(inputs.size() == 1,
                      "mpi scatter: expected one list of inputs on the root, got ", inputs.size());
    list = inputs[0];
    check_list(list, size_, output, "scatter");
  }
  return launch({.type = OpType::SCATTER,
                 .name = "scatter",
                 .timeout = options.timeout,
                 .results = outputs,
                 .start = [=, rank = rank_, comm = comm_](MpiRequests& requests) {
                   if (rank != root) return post_receive(output, root, kTag, comm, requests);
                   for (int peer = 0; peer < static_cast<int>(list.size()); ++peer) {
                     if (peer != rank)
                       post_send(list[static_cast<size_t>(peer)], peer, kTag, comm, requests);
                   }
                   at::Tensor(output).copy_(list[static_cast<size_t>(rank)].view(output.sizes()));
                 }});
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  const at::Tensor output = only(outputs, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs.size() == 1, "mpi reduce_scatter: expected one list of inputs, got ",
                    inputs.size());
  check_list(inputs[0], size_, output, "reduce_scatter");
  Tensors flat;
  for (const auto& input : inputs[0]) flat.push_back(input.view(-1));
  return reduce_scatter_flat(output, at::cat(flat), OpType::REDUCE_SCATTER, "reduce_scatter",
                             options);
}

MpiBackend::WorkPtr MpiBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  check_tensor(output, "reduce_scatter_tensor");
  check_tensor(input, "reduce_scatter_tensor");
  TORCH_CHECK_VALUE(
      input.numel() == output.numel() * size_ && output.scalar_type() == input.scalar_type(),
      "mpi reduce_scatter_tensor: expected an input of ", output.numel() * size_, " x ",
      output.scalar_type(), ", got ", input.numel(), " x ", input.scalar_type());
  return reduce_scatter_flat(output, input, OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor",
                             options);
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter_flat(const at::Tensor& output,
                                                    const at::Tensor& input, OpType type,
                                                    const char* name,
                                                    const c10d::ReduceScatterOptions& options) {
  const c10d::ReduceOp op = options.reduceOp;
  const MpiReduction reduction = mpi_reduction(output.scalar_type(), op);
  return launch(
      {.type = type,
       .name = name,
       .timeout = options.timeout,
       .results = {output},
       .start =
           [=, world_size = size_, comm = comm_](MpiRequests& requests) {
             const int64_t bytes = bytes_of(output);
             if (bytes_of(input) <= kPieceBytes) {
               check_mpi(MPI_Ireduce_scatter_block(input.data_ptr(), output.data_ptr(),
                                                   static_cast<int>(output.numel()), reduction.type,
                                                   reduction.op, comm, requests.next()),
                         "MPI_Ireduce_scatter_block");
               return;
             }
             for (int root = 0; root < world_size; ++root) {
               post_reduce(static_cast<char*>(input.data_ptr()) + root * bytes, output.data_ptr(),
                           output.numel(), output.element_size(), reduction, root, comm, requests);
             }
           },
       .finish = [output, op, world_size = size_] { divide(output, op, world_size); }});
}

MpiBackend::WorkPtr MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits,
                                              std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  const char* name = "all_to_all_single";
  const auto split = [&](const at::Tensor& tensor, const std::vector<int64_t>& rows) {
    check_tensor(tensor, name);
    TORCH_CHECK_VALUE(tensor.dim() > 0, "mpi ", name, ": expected at least one dimension");
    std::vector<int64_t> sizes = rows;
    if (sizes.empty()) sizes.assign(static_cast<size_t>(size_), tensor.size(0) / size_);
    int64_t total = 0;
    for (const int64_t size : sizes) total += size;
    TORCH_CHECK_VALUE(sizes.size() == static_cast<size_t>(size_) && total == tensor.size(0), "mpi ",
                      name, ": expected ", size_, " splits that add up to ", tensor.size(0),
                      " rows, got ", sizes);
    return tensor.split_with_sizes(sizes);
  };
  Tensors outputs = split(output, output_splits);
  Tensors inputs = split(input, input_splits);
  return exchange(OpType::ALLTOALL_BASE, name, std::move(outputs), std::move(inputs),
                  options.timeout);
}

MpiBackend::WorkPtr MpiBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  for (const auto* list : {&outputs, &inputs}) {
    TORCH_CHECK_VALUE(list->size() == static_cast<size_t>(size_), "mpi all_to_all: expected ",
                      size_, " tensors, got ", list->size());
    for (const auto& tensor : *list) check_tensor(tensor, "all_to_all");
  }
  return exchange(OpType::ALLTOALL, "all_to_all", outputs, inputs, options.timeout);
}

MpiBackend::WorkPtr MpiBackend::exchange(OpType type, const char* name, Tensors outputs,
                                         Tensors inputs, milliseconds timeout) {
  const auto own = static_cast<size_t>(rank_);
  TORCH_CHECK_VALUE(outputs[own].numel() == inputs[own].numel() &&
                        outputs[own].scalar_type() == inputs[own].scalar_type(),
                    "mpi ", name, ": expected this rank's own output like its own input, ",
                    inputs[own].numel(), " x ", inputs[own].scalar_type(), ", got ",
                    outputs[own].numel(), " x ", outputs[own].scalar_type());
  Tensors results = outputs;
  return launch({.type = type,
                 .name = name,
                 .timeout = timeout,
                 .results = std::move(results),
                 .start = [=, comm = comm_](MpiRequests& requests) {
                   for (size_t peer = 0; peer < inputs.size(); ++peer) {
                     if (peer == own) continue;
                     post_receive(outputs[peer], static_cast<int>(peer), kTag, comm, requests);
                     post_send(inputs[peer], static_cast<int>(peer), kTag, comm, requests);
                   }
                   at::Tensor(outputs[own]).copy_(inputs[own].view(outputs[own].sizes()));
                 }});
}

MpiBackend::WorkPtr MpiBackend::send(Tensors& tensors, int destination, int tag) {
  const at::Tensor tensor = only(tensors, "send");
  checked_rank(destination, "send");
  return launch({.type = OpType::SEND,
                 .name = "send",
                 .timeout = kNoTimeout,
                 .results = tensors,
                 .start = [=, comm = peers_](MpiRequests& requests) {
                   post_send(tensor, destination, tag, comm, requests);
                 }});
}

MpiBackend::WorkPtr MpiBackend::recv(Tensors& tensors, int source, int tag) {
  const at::Tensor tensor = only(tensors, "recv");
  checked_rank(source, "recv");
  return launch({.type = OpType::RECV,
                 .name = "recv",
                 .timeout = kNoTimeout,
                 .results = tensors,
                 .start = [=, comm = peers_](MpiRequests& requests) {
                   post_receive(tensor, source, tag, comm, requests);
                 }});
}

MpiBackend::WorkPtr MpiBackend::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor tensor = only(tensors, "recv");
  TORCH_CHECK_VALUE(tensor.numel() > 0 && bytes_of(tensor) <= kPieceBytes,
                    "mpi recv from any rank: expected 1 byte to 1 GiB, got ", bytes_of(tensor),
                    " bytes");
  return launch({.type = OpType::RECVANYSOURCE,
                 .name = "recv from any rank",
                 .timeout = kNoTimeout,
                 .results = tensors,
                 .start = [=, comm = peers_](MpiRequests& requests) {
                   post_receive(tensor, MPI_ANY_SOURCE, tag, comm, requests);
                 }});
}

MpiBackend::WorkPtr MpiBackend::barrier(const c10d::BarrierOptions& options) {
  return launch({.type = OpType::BARRIER,
                 .name = "barrier",
                 .timeout = options.timeout,
                 .results = {},
                 .start = [comm = comm_](MpiRequests& requests) {
                   check_mpi(MPI_Ibarrier(comm, requests.next()), "MPI_Ibarrier");
                 }});
}

}  // namespace cohort::comm
