// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/operations.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>

#include "cohort/comm/libtorch_version.h"

namespace cohort::comm {
std::string type_name(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return "uint8";
    case at::kChar:
      return "int8";
    case at::kShort:
      return "int16";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    case at::kHalf:
      return "float16";
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kBFloat16:
      return "bfloat16";
    case at::kBool:
      return "bool";
    case at::kComplexFloat:
      return "complex64";
    case at::kComplexDouble:
      return "complex128";
    default:
      return c10::toString(type);
  }
}

void check_tensor(const at::Tensor& tensor, const char* operation,
                  const c10d::ProcessGroup& backend) {
  TORCH_CHECK_VALUE(tensor.defined(), operation, ": expected a tensor, got an undefined one");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, operation, ": expected a dense tensor, got ",
                    tensor.toString());
  const auto devices = backend.getDeviceTypes();
  const bool served = std::any_of(devices.begin(), devices.end(), [&](const c10::Device& device) {
    return device.type() == tensor.device().type();
  });
  TORCH_CHECK_VALUE(served, operation, ": the backend serves no tensors on ", tensor.device());
}

void check_written(const at::Tensor& tensor, const char* operation,
                   const c10d::ProcessGroup& backend) {
  check_tensor(tensor, operation, backend);
  TORCH_CHECK_VALUE(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, operation,
                    ": expected a tensor whose elements have memory of their own, got strides ",
                    tensor.strides(), " of shape ", tensor.sizes());
}

void check_limit(std::chrono::milliseconds limit, const std::string& operation) {
  constexpr std::chrono::days kLongest{3650};
  TORCH_CHECK_VALUE(limit.count() > 0 && limit <= kLongest, operation,
                    ": expected a timeout above 0 and of at most ", kLongest.count(), " days, got ",
                    limit.count(), " ms");
}

void check_rank(int rank, int size, const char* operation, const char* role) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size, operation, ": expected a ", role, " in [0, ", size,
                    "), got ", rank);
}

at::Tensor as_bytes(const at::Tensor& tensor) {
  // A contiguous one may have any stride in a dimension of one element.
  return tensor.detach().as_strided({tensor.numel()}, {1}).view(at::kByte);
}

void Written::finish() const {
  if (!memory.is_same(tensor)) at::Tensor(tensor).copy_(memory);
}

void Written::bump_version() const {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

namespace {

// Whether its memory holds its values in their order: conj() and the like only mark a tensor.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

Written filled(const at::Tensor& tensor) {
  return {tensor, is_plain(tensor) ? tensor : at::empty(tensor.sizes(), tensor.options())};
}

at::Tensor readable(const at::Tensor& tensor) {
  if (is_plain(tensor)) return tensor;
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

namespace {

const char* op_name(ReduceOp op) {
  constexpr std::array<const char*, 8> kNames{"sum", "max",  "min", "product",
                                              "avg", "band", "bor", "bxor"};
  return kNames[static_cast<size_t>(op)];
}

// What the backend computes; the division of kAvg is ours.
c10d::ReduceOp::RedOpType backend_op(ReduceOp op) {
  using Native = c10d::ReduceOp;
  constexpr std::array<Native::RedOpType, 8> kOps{Native::SUM,     Native::MAX, Native::MIN,
                                                  Native::PRODUCT, Native::SUM, Native::BAND,
                                                  Native::BOR,     Native::BXOR};
  return kOps[static_cast<size_t>(op)];
}

std::string name_of(const char* operation, ReduceOp op) {
  return std::string(operation) + "(" + op_name(op) + ")";
}

bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor;
}

bool is_reducible(at::ScalarType type) {
  switch (type) {
    case at::kBool:
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
      return true;
    default:
      return false;
  }
}

void check_reducible(const at::Tensor& tensor, const char* operation, ReduceOp op) {
  const at::ScalarType type = tensor.scalar_type();
  TORCH_CHECK_VALUE(is_reducible(type), operation, ": ", type_name(type),
                    " cannot be reduced; expected bool, uint8, int8, int32, int64, float16, "
                    "bfloat16, float32 or float64");
  const bool floating = at::isFloatingType(type);
  TORCH_CHECK_VALUE(!is_bitwise(op) || !floating, operation, "(", op_name(op),
                    "): expected integers or bool, got ", type_name(type));
  TORCH_CHECK_VALUE(op != ReduceOp::kAvg || floating, operation,
                    "(avg): expected a floating type, got ", type_name(type));
  const bool orders =
      op == ReduceOp::kMax || op == ReduceOp::kMin || op == ReduceOp::kBand || op == ReduceOp::kBor;
  TORCH_CHECK_VALUE(type != at::kBool || orders, operation, "(", op_name(op),
                    "): bool goes with max, min, band and bor only");
}

void check_parts(const at::Tensor& whole, const at::Tensor& part, int size, const char* operation) {
  TORCH_CHECK_VALUE(whole.scalar_type() == part.scalar_type(), operation,
                    ": expected one dtype, got ", type_name(whole.scalar_type()), " and ",
                    type_name(part.scalar_type()));
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * size, operation, ": expected ", size, " times ",
                    part.numel(), " elements, got ", whole.numel());
}

// Both are contiguous.
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* x = static_cast<const std::byte*>(a.const_data_ptr());
  const auto* y = static_cast<const std::byte*>(b.const_data_ptr());
  return a.is_alias_of(b) && x < y + b.nbytes() && y < x + a.nbytes();
}

// What a backend may read while `written` is written to.
at::Tensor read_beside(const at::Tensor& read, const at::Tensor& written) {
  return overlap(read, written) ? read.clone() : read;
}

// The same where one of both may be this rank's part of the other. MPI forbids even that.
at::Tensor read_beside_own_part(const at::Tensor& read, const at::Tensor& written,
                                c10d::ProcessGroup& backend) {
  const at::Tensor& whole = read.nbytes() < written.nbytes() ? written : read;
  const at::Tensor& part = &whole == &read ? written : read;
  const auto* own = static_cast<const std::byte*>(whole.const_data_ptr()) +
                    static_cast<size_t>(backend.getRank()) * part.nbytes();
  const auto name = backend.getBackend(read.device().type())->getBackendName();
  const bool may_overlap =
      name == "nccl" || name == "gloo" || name == "shm" || name == "hierarchical";
  return may_overlap && part.const_data_ptr() == own ? read : read_beside(read, written);
}

// For an operation that reads it, too.
Written in_place(const at::Tensor& tensor) {
  return {tensor, readable(tensor)};
}

// What is left of a reduction: the division of kAvg, and the copy into what is not contiguous.
std::function<void()> rest_of(ReduceOp op, Written written, int size) {
  return [op, written = std::move(written), size] {
    if (op == ReduceOp::kAvg) at::Tensor(written.memory).div_(size);
    written.finish();
  };
}

// One tensor like `like` for each rank.
void check_list(const Tensors& list, const at::Tensor& like, const char* operation,
                const char* what, const c10d::ProcessGroup& backend) {
  TORCH_CHECK_VALUE(list.size() == static_cast<size_t>(backend.getSize()), operation, ": expected ",
                    backend.getSize(), " ", what, ", got ", list.size());
  for (const at::Tensor& tensor : list) {
    check_tensor(tensor, operation, backend);
    TORCH_CHECK_VALUE(tensor.sizes() == like.sizes() && tensor.scalar_type() == like.scalar_type(),
                      operation, ": expected ", what, " of ", type_name(like.scalar_type()), " ",
                      like.sizes(), ", got ", type_name(tensor.scalar_type()), " ", tensor.sizes());
  }
}

// The same on the root; none elsewhere.
void check_list_of_root(const Tensors& list, const at::Tensor& like, int root,
                        const char* operation, const char* what,
                        const c10d::ProcessGroup& backend) {
  check_rank(root, backend.getSize(), operation, "root");
  const int expected = backend.getRank() == root ? backend.getSize() : 0;
  TORCH_CHECK_VALUE(list.size() == static_cast<size_t>(expected), operation, ": expected ",
                    backend.getSize(), " ", what, " on the root and none elsewhere, got ",
                    list.size());
  if (expected > 0) check_list(list, like, operation, what, backend);
}

void check_splits(const std::vector<int64_t>& splits, const at::Tensor& tensor, int size,
                  const char* side) {
  TORCH_CHECK_VALUE(tensor.dim() > 0, "all_to_all: expected ", side,
                    " with rows in dimension 0, got a tensor without dimensions");
  const int64_t rows = tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % size == 0, "all_to_all: expected ", size, " equal parts of ", side,
                      ", got ", rows, " rows");
    return;
  }
  TORCH_CHECK_VALUE(
      splits.size() == static_cast<size_t>(size) &&
          std::all_of(splits.begin(), splits.end(), [](int64_t n) { return n >= 0; }) &&
          std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows,
      "all_to_all: expected ", size, " ", side, " splits of at least 0 that sum to ", rows,
      ", got ", splits);
}

// Gloo takes less than it expects without an error, and ends the process if it gets more.
void compare_splits(c10d::ProcessGroup& backend, const std::vector<int64_t>& sent,
                    const std::vector<int64_t>& expected) {
  at::Tensor own = at::cat({at::tensor(sent), at::tensor(expected)});
  at::Tensor all = at::empty({backend.getSize(), own.numel()}, at::kLong);
  backend.COHORT_ALL_GATHER_SINGLE(all, own, {.asyncOp = false})->wait();
  check_split_bytes({all.const_data_ptr<int64_t>(), static_cast<size_t>(all.numel())},
                    backend.getSize());
}

}  // namespace

Operation all_reduce_of(c10d::ProcessGroup& backend, const at::Tensor& tensor, ReduceOp op,
                        CallSite site) {
  check_written(tensor, "all_reduce", backend);
  check_reducible(tensor, "all_reduce", op);
  const Written written = in_place(tensor);
  return {.call = {.operation = name_of("all_reduce", op), .tensor = tensor, .site = site},
          .begin =
              [&backend, written, op](bool async_op) {
                written.bump_version();
                Tensors tensors{written.memory};
                c10d::AllreduceOptions options;
                options.asyncOp = async_op;
                options.reduceOp = backend_op(op);
                return backend.allreduce(tensors, options);
              },
          .finish = rest_of(op, written, backend.getSize())};
}

Operation reduce_of(c10d::ProcessGroup& backend, const at::Tensor& tensor, int root, ReduceOp op,
                    CallSite site) {
  check_written(tensor, "reduce", backend);
  check_reducible(tensor, "reduce", op);
  check_rank(root, backend.getSize(), "reduce", "root");
  const Written written = in_place(tensor);
  return {.call = {.operation = name_of("reduce", op) + " to " + std::to_string(root),
                   .tensor = tensor,
                   .site = site},
          .begin =
              [&backend, written, root, op](bool async_op) {
                written.bump_version();
                Tensors tensors{written.memory};
                c10d::ReduceOptions options;
                options.asyncOp = async_op;
                options.reduceOp = backend_op(op);
                options.rootRank = root;
                return backend.reduce(tensors, options);
              },
          .finish = backend.getRank() == root ? rest_of(op, written, backend.getSize()) : nullptr};
}

Operation broadcast_of(c10d::ProcessGroup& backend, const at::Tensor& tensor, int root,
                       CallSite site) {
  check_written(tensor, "broadcast", backend);
  check_rank(root, backend.getSize(), "broadcast", "root");
  const Written written = in_place(tensor);
  return {.call = {.operation = "broadcast from " + std::to_string(root),
                   .tensor = tensor,
                   .site = site},
          .begin =
              [&backend, written, root](bool async_op) {
                if (backend.getRank() != root) written.bump_version();
                Tensors tensors{as_bytes(written.memory)};
                c10d::BroadcastOptions options;
                options.asyncOp = async_op;
                options.rootRank = root;
                return backend.broadcast(tensors, options);
              },
          .finish = [written] { written.finish(); }};
}

Operation all_gather_of(c10d::ProcessGroup& backend, const at::Tensor& output,
                        const at::Tensor& input, CallSite site) {
  check_written(output, "all_gather_into", backend);
  check_tensor(input, "all_gather_into", backend);
  check_parts(output, input, backend.getSize(), "all_gather_into");
  const Written written = filled(output);
  return {.call = {.operation = "all_gather", .tensor = input, .site = site},
          .begin =
              [&backend, written, read = readable(input)](bool async_op) {
                written.bump_version();
                at::Tensor output_bytes = as_bytes(written.memory);
                at::Tensor input_bytes =
                    as_bytes(read_beside_own_part(read, written.memory, backend));
                return backend.COHORT_ALL_GATHER_SINGLE(output_bytes, input_bytes,
                                                        {.asyncOp = async_op});
              },
          .finish = [written] { written.finish(); }};
}

Operation all_gather_of(c10d::ProcessGroup& backend, const Tensors& outputs,
                        const at::Tensor& tensor, CallSite site) {
  check_tensor(tensor, "all_gather", backend);
  check_list(outputs, tensor, "all_gather", "outputs", backend);
  for (const at::Tensor& output : outputs) check_written(output, "all_gather", backend);
  const at::Tensor all = at::empty({backend.getSize(), tensor.numel()}, tensor.options());
  Operation operation = all_gather_of(backend, all, tensor, site);
  operation.finish = [all, outputs] {
    for (size_t peer = 0; peer < outputs.size(); ++peer)
      at::Tensor(outputs[peer]).copy_(all[static_cast<int64_t>(peer)].view(outputs[peer].sizes()));
  };
  return operation;
}

Operation gather_of(c10d::ProcessGroup& backend, const Tensors& outputs, const at::Tensor& tensor,
                    int root, CallSite site) {
  check_tensor(tensor, "gather", backend);
  check_list_of_root(outputs, tensor, root, "gather", "outputs", backend);
  std::vector<Written> written;
  for (const at::Tensor& output : outputs) {
    check_written(output, "gather", backend);
    written.push_back(filled(output));
  }
  return {
      .call = {.operation = "gather to " + std::to_string(root), .tensor = tensor, .site = site},
      .begin =
          [&backend, written, read = readable(tensor), root](bool async_op) {
            std::vector<Tensors> output_lists(backend.getRank() == root ? 1 : 0);
            for (const Written& output : written) {
              output.bump_version();
              output_lists[0].push_back(as_bytes(output.memory));
            }
            at::Tensor input = read;
            for (const Written& output : written) input = read_beside(input, output.memory);
            Tensors inputs{as_bytes(input)};
            c10d::GatherOptions options;
            options.asyncOp = async_op;
            options.rootRank = root;
            return backend.gather(output_lists, inputs, options);
          },
      .finish =
          [written] {
            for (const Written& output : written) output.finish();
          }};
}

Operation scatter_of(c10d::ProcessGroup& backend, const at::Tensor& output, const Tensors& inputs,
                     int root, CallSite site) {
  check_written(output, "scatter", backend);
  check_list_of_root(inputs, output, root, "scatter", "inputs", backend);
  const Written written = filled(output);
  Tensors read;
  for (const at::Tensor& input : inputs) read.push_back(readable(input));
  return {
      .call = {.operation = "scatter from " + std::to_string(root), .tensor = output, .site = site},
      .begin =
          [&backend, written, read, root](bool async_op) {
            written.bump_version();
            std::vector<Tensors> input_lists(backend.getRank() == root ? 1 : 0);
            for (const at::Tensor& input : read)
              input_lists[0].push_back(as_bytes(read_beside(input, written.memory)));
            Tensors outputs{as_bytes(written.memory)};
            c10d::ScatterOptions options;
            options.asyncOp = async_op;
            options.rootRank = root;
            return backend.scatter(outputs, input_lists, options);
          },
      .finish = [written] { written.finish(); }};
}

Operation reduce_scatter_of(c10d::ProcessGroup& backend, const at::Tensor& output,
                            const at::Tensor& input, ReduceOp op, CallSite site) {
  check_written(output, "reduce_scatter", backend);
  check_tensor(input, "reduce_scatter", backend);
  check_parts(input, output, backend.getSize(), "reduce_scatter");
  check_reducible(input, "reduce_scatter", op);
  const Written written = filled(output);
  return {.call = {.operation = name_of("reduce_scatter", op), .tensor = input, .site = site},
          .begin =
              [&backend, written, read = readable(input), op](bool async_op) {
                written.bump_version();
                at::Tensor part = written.memory;
                at::Tensor whole = read_beside_own_part(read, part, backend);
                c10d::ReduceScatterOptions options;
                options.asyncOp = async_op;
                options.reduceOp = backend_op(op);
                return backend.COHORT_REDUCE_SCATTER_SINGLE(part, whole, options);
              },
          .finish = rest_of(op, written, backend.getSize())};
}

Operation all_to_all_of(c10d::ProcessGroup& backend, const at::Tensor& output,
                        const at::Tensor& input, const std::vector<int64_t>& output_splits,
                        const std::vector<int64_t>& input_splits, bool compares, CallSite site) {
  check_written(output, "all_to_all", backend);
  check_tensor(input, "all_to_all", backend);
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(),
                    "all_to_all: expected one dtype, got ", type_name(output.scalar_type()),
                    " and ", type_name(input.scalar_type()));
  const int size = backend.getSize();
  check_splits(output_splits, output, size, "output");
  check_splits(input_splits, input, size, "input");
  // Splits are in rows here and in bytes below.
  const bool equal = output_splits.empty() && input_splits.empty();
  const auto in_bytes = [&](const std::vector<int64_t>& splits, const at::Tensor& tensor) {
    const int64_t rows = tensor.size(0);
    const int64_t row_bytes = rows == 0 ? 0 : static_cast<int64_t>(tensor.nbytes()) / rows;
    std::vector<int64_t> result(splits);
    if (!equal && splits.empty()) result.assign(static_cast<size_t>(size), rows / size);
    for (int64_t& count : result) count *= row_bytes;
    return result;
  };
  std::vector<int64_t> out_counts = in_bytes(output_splits, output);
  std::vector<int64_t> in_counts = in_bytes(input_splits, input);
  const auto own = static_cast<size_t>(backend.getRank());
  TORCH_CHECK_VALUE(!equal || output.numel() == input.numel(),
                    "all_to_all: expected as many elements in the output as in the input, ",
                    input.numel(), ", got ", output.numel());
  TORCH_CHECK_VALUE(equal || out_counts[own] == in_counts[own], "all_to_all: rank ", own,
                    " sends itself ", in_counts[own], " bytes and expects ", out_counts[own]);
  const Written written = filled(output);
  compares = compares && !equal && input.is_cpu();
  return {.call = {.operation = "all_to_all of " +
                                std::string(equal ? "equal parts" : type_name(input.scalar_type())),
                   .tensor = equal ? input : at::Tensor(),
                   .site = site,
                   .device = input.device().type()},
          .begin =
              [&backend, written, read = readable(input), out_counts, in_counts,
               compares](bool async_op) mutable {
                if (compares) compare_splits(backend, in_counts, out_counts);
                written.bump_version();
                at::Tensor output_bytes = as_bytes(written.memory);
                at::Tensor input_bytes = as_bytes(read_beside(read, written.memory));
                return backend.COHORT_ALL_TO_ALL_SINGLE(output_bytes, input_bytes, out_counts,
                                                        in_counts, {.asyncOp = async_op});
              },
          .finish = [written] { written.finish(); }};
}

}  // namespace cohort::comm
