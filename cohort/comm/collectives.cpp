// The operations of ProcessGroup: arguments are checked, then c10d does the work.
#include <ATen/ops/add.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "cohort/base/error.h"
#include "cohort/comm/process_group_impl.h"

namespace cohort::comm {
namespace {

using Tensors = std::vector<at::Tensor>;
using EngineWork = c10::intrusive_ptr<c10d::Work>;

const char* op_name(ReduceOp op) {
  constexpr std::array<const char*, 8> kNames{"sum", "max",  "min", "product",
                                              "avg", "band", "bor", "bxor"};
  return kNames[static_cast<size_t>(op)];
}

// What the engine computes; the division of kAvg is ours.
c10d::ReduceOp::RedOpType engine_op(ReduceOp op) {
  using Engine = c10d::ReduceOp;
  constexpr std::array<Engine::RedOpType, 8> kOps{Engine::SUM,     Engine::MAX, Engine::MIN,
                                                  Engine::PRODUCT, Engine::SUM, Engine::BAND,
                                                  Engine::BOR,     Engine::BXOR};
  return kOps[static_cast<size_t>(op)];
}

std::string name_of(const char* operation, ReduceOp op) {
  return std::string(operation) + "(" + op_name(op) + ")";
}

std::string with_subject(const std::string& operation, const std::string& of) {
  return of.empty() ? operation : operation + " (" + of + ')';
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

void check_tensor(const at::Tensor& tensor, const char* operation,
                  const c10d::ProcessGroup& engine) {
  TORCH_CHECK_VALUE(tensor.defined(), operation, ": expected a tensor, got an undefined one");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.is_contiguous(), operation,
                    ": expected a contiguous tensor, got strides ", tensor.strides(), " of shape ",
                    tensor.sizes());
  const auto devices = engine.getDeviceTypes();
  const bool served = std::any_of(devices.begin(), devices.end(), [&](const c10::Device& device) {
    return device.type() == tensor.device().type();
  });
  TORCH_CHECK_VALUE(served, operation, ": the engine serves no tensors on ", tensor.device());
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

void check_rank(int rank, int size, const char* operation, const char* role) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size, operation, ": expected a ", role, " in [0, ", size,
                    "), got ", rank);
}

void check_parts(const at::Tensor& whole, const at::Tensor& part, int size, const char* operation) {
  TORCH_CHECK_VALUE(whole.scalar_type() == part.scalar_type(), operation,
                    ": expected one dtype, got ", type_name(whole.scalar_type()), " and ",
                    type_name(part.scalar_type()));
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * size, operation, ": expected ", size, " times ",
                    part.numel(), " elements, got ", whole.numel());
}

// The same memory as plain bytes: engines know few types, and to move data needs none.
at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.detach().view({-1}).view(at::kByte);
}

// into = a op b, the engine's arithmetic for one pair.
void combine(at::Tensor into, const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      at::add_out(into, a, b);
      break;
    case ReduceOp::kProduct:
      at::mul_out(into, a, b);
      break;
    case ReduceOp::kMax:
      at::maximum_out(into, a, b);
      break;
    case ReduceOp::kMin:
      at::minimum_out(into, a, b);
      break;
    case ReduceOp::kBand:
      at::bitwise_and_out(into, a, b);
      break;
    case ReduceOp::kBor:
      at::bitwise_or_out(into, a, b);
      break;
    case ReduceOp::kBxor:
      at::bitwise_xor_out(into, a, b);
      break;
  }
}

// output = parts[0] op parts[1] op ..., in this order. Intermediate results lie in parts, but never
// in the `own`-th. `output` may be that one, or the last of the others.
void combine_all(const at::Tensor& output, const Tensors& parts, size_t own, ReduceOp op) {
  if (parts.size() == 1 && !output.is_same(parts[0])) at::Tensor(output).copy_(parts[0]);
  at::Tensor sum = parts[0];
  for (size_t i = 1; i < parts.size(); ++i) {
    const at::Tensor& into = i + 1 == parts.size() ? output : i == own ? sum : parts[i];
    combine(into, sum, parts[i], op);
    sum = into;
  }
}

// Several works as one. Engines see memory, not tensors: those lie here until it is at rest.
class JoinedWork : public c10d::Work {
 public:
  void add(EngineWork work, at::Tensor tensor) {
    tensors_.push_back(std::move(tensor));
    works_.push_back(std::move(work));
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const EngineWork& work : works_) work->wait(timeout);
    return true;
  }

 private:
  Tensors tensors_;  // outlive works_
  std::vector<EngineWork> works_;
};

// Sends outgoing[r] to every other rank r and fills incoming[r] with what r sends, in place.
EngineWork begin_exchange(c10d::ProcessGroup& engine, const Tensors& outgoing,
                          const Tensors& incoming, int tag) {
  auto joined = c10::make_intrusive<JoinedWork>();
  const int size = outgoing.front().numel() > 0 ? engine.getSize() : 1;
  for (int step = 1; step < size; ++step) {
    const int from = (engine.getRank() + size - step) % size;
    Tensors tensors{as_bytes(incoming[static_cast<size_t>(from)])};
    joined->add(engine.recv(tensors, from, tag), tensors[0]);
  }
  for (int step = 1; step < size; ++step) {
    const int to = (engine.getRank() + step) % size;
    Tensors tensors{as_bytes(outgoing[static_cast<size_t>(to)])};
    joined->add(engine.send(tensors, to, tag), tensors[0]);
  }
  return joined;
}

bool is_gloo(c10d::ProcessGroup& engine, const at::Tensor& tensor) {
  return engine.getBackend(tensor.device().type())->getBackendName() == "gloo";
}

// What an engine may read while `written` is written to. MPI forbids them to overlap.
at::Tensor read_beside(const at::Tensor& read, const at::Tensor& written,
                       c10d::ProcessGroup& engine) {
  const bool overlaps = read.is_alias_of(written);
  const auto backend = engine.getBackend(read.device().type())->getBackendName();
  return overlaps && backend != "nccl" && backend != "gloo" ? read.clone() : read;
}

EngineWork begin_all_reduce(c10d::ProcessGroup& engine, const at::Tensor& tensor, ReduceOp op) {
  Tensors tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = engine_op(op);
  return engine.allreduce(tensors, options);
}

// The checks of an all_reduce, and the call that is traced.
Call all_reduce_call(const c10d::ProcessGroup& engine, const at::Tensor& tensor, ReduceOp op,
                     CallSite site) {
  check_tensor(tensor, "all_reduce", engine);
  check_reducible(tensor, "all_reduce", op);
  return {.operation = name_of("all_reduce", op), .tensor = &tensor, .site = site};
}

// The same of an all_gather_into.
Call all_gather_call(const c10d::ProcessGroup& engine, const at::Tensor& output,
                     const at::Tensor& input, CallSite site) {
  check_tensor(output, "all_gather_into", engine);
  check_tensor(input, "all_gather_into", engine);
  check_parts(output, input, engine.getSize(), "all_gather_into");
  return {.operation = "all_gather", .tensor = &input, .site = site};
}

EngineWork begin_all_to_all(c10d::ProcessGroup& engine, at::Tensor output, at::Tensor input,
                            std::vector<int64_t> output_splits, std::vector<int64_t> input_splits) {
  return engine.alltoall_base(output, input, output_splits, input_splits);
}

EngineWork begin_all_gather(c10d::ProcessGroup& engine, const at::Tensor& output,
                            const at::Tensor& input) {
  at::Tensor output_bytes = as_bytes(output);
  at::Tensor input_bytes = as_bytes(read_beside(input, output, engine));
  return engine._allgather_base(output_bytes, input_bytes);
}

// The same without the copies that Gloo makes of everything: straight from rank to rank.
EngineWork begin_direct_all_gather(c10d::ProcessGroup& engine, const at::Tensor& output,
                                   const at::Tensor& input, int tag) {
  const auto size = static_cast<size_t>(engine.getSize());
  const Tensors parts = output.detach().view({engine.getSize(), input.numel()}).unbind(0);
  at::Tensor own = parts[static_cast<size_t>(engine.getRank())];
  const at::Tensor flat = input.detach().view({-1});
  if (own.const_data_ptr() != flat.const_data_ptr()) own.copy_(flat);
  return begin_exchange(engine, Tensors(size, flat), parts, tag);
}

std::string text_of(const at::Tensor& bytes, int64_t offset, int64_t length) {
  return {static_cast<const char*>(bytes.const_data_ptr()) + offset, static_cast<size_t>(length)};
}

at::Tensor padded_bytes(const std::string& text, int64_t length) {
  at::Tensor bytes = at::zeros({length}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

std::vector<std::string> unpack(const at::Tensor& all, const std::vector<int64_t>& lengths) {
  const int64_t stride = all.numel() / static_cast<int64_t>(lengths.size());
  std::vector<std::string> texts;
  for (size_t rank = 0; rank < lengths.size(); ++rank) {
    texts.push_back(text_of(all, static_cast<int64_t>(rank) * stride, lengths[rank]));
  }
  return texts;
}

std::vector<int64_t> gather_lengths(ProcessGroup& group, const std::string& text, CallSite site) {
  at::Tensor lengths = at::empty({group.size()}, at::kLong);
  group.all_gather_into(lengths, at::tensor({static_cast<int64_t>(text.size())}), site);
  const auto* values = lengths.const_data_ptr<int64_t>();
  return {values, values + group.size()};
}

// A reduction that has a local division left.
std::function<void()> division(ReduceOp op, at::Tensor tensor, int size) {
  if (op != ReduceOp::kAvg) return {};
  return [tensor = std::move(tensor), size]() mutable { tensor.div_(size); };
}

void check_splits(const std::vector<int64_t>& splits, const at::Tensor& tensor, int size,
                  const char* side) {
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 0;
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % size == 0, "all_to_all: expected ", size, " equal parts of ", side,
                      ", got ", rows, " rows");
    return;
  }
  TORCH_CHECK_VALUE(
      splits.size() == static_cast<size_t>(size) &&
          std::all_of(splits.begin(), splits.end(), [](int64_t n) { return n >= 0; }) &&
          std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows,
      "all_to_all: expected ", size, " ", side, " splits that sum to ", rows, ", got ", splits);
}

// What goes before a message: its dtype and number of elements.
at::Tensor form_of(const at::Tensor& tensor) {
  return at::tensor({static_cast<int64_t>(tensor.scalar_type()), tensor.numel()})
      .to(tensor.device());
}

// Gloo would write the bytes of another dtype as they are, and end the process for too many.
void check_form(const at::Tensor& tensor, int from, c10d::ProcessGroup& engine, int tag) {
  Tensors form{at::empty({2}, at::TensorOptions(at::kLong).device(tensor.device()))};
  engine.recv(form, from, tag)->wait();
  const at::Tensor sent = form.front().cpu();
  const auto type = static_cast<at::ScalarType>(sent[0].item<int64_t>());
  const auto numel = sent[1].item<int64_t>();
  if (type == tensor.scalar_type() && numel == tensor.numel()) return;
  // It is taken all the same: its sender waits for that, and what comes next is another message.
  Tensors unwanted{as_bytes(at::empty({numel}, tensor.options().dtype(type)))};
  engine.recv(unwanted, from, tag)->wait();
  TORCH_CHECK_VALUE(false, "recv from ", from, ": expected ", tensor.numel(), " elements of ",
                    type_name(tensor.scalar_type()), ", rank ", from, " sends ", numel, " of ",
                    type_name(type));
}

}  // namespace

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

void ProcessGroup::all_reduce(at::Tensor& tensor, ReduceOp op, CallSite site) {
  impl_->run(all_reduce_call(engine(), tensor, op, site), [&] {
    begin_all_reduce(engine(), tensor, op)->wait();
    if (op == ReduceOp::kAvg) tensor.div_(size());
  });
}

Work ProcessGroup::all_reduce_async(at::Tensor& tensor, ReduceOp op, CallSite site) {
  return impl_->start(
      all_reduce_call(engine(), tensor, op, site),
      [&] { return begin_all_reduce(engine(), tensor, op); }, division(op, tensor, size()));
}

int64_t ProcessGroup::all_reduce_sum(int64_t value, CallSite site) {
  at::Tensor tensor = at::tensor({value});
  all_reduce(tensor, ReduceOp::kSum, site);
  return tensor.item<int64_t>();
}

void ProcessGroup::reduce(at::Tensor& tensor, int root, ReduceOp op, CallSite site) {
  check_tensor(tensor, "reduce", engine());
  check_reducible(tensor, "reduce", op);
  check_rank(root, size(), "reduce", "root");
  const std::string operation = name_of("reduce", op) + " to " + std::to_string(root);
  impl_->run({.operation = operation, .tensor = &tensor, .site = site}, [&] {
    Tensors tensors{tensor};
    c10d::ReduceOptions options;
    options.reduceOp = engine_op(op);
    options.rootRank = root;
    engine().reduce(tensors, options)->wait();
    if (op == ReduceOp::kAvg && rank() == root) tensor.div_(size());
  });
}

void ProcessGroup::broadcast(at::Tensor& tensor, int root, CallSite site) {
  check_tensor(tensor, "broadcast", engine());
  check_rank(root, size(), "broadcast", "root");
  impl_->run(
      {.operation = "broadcast from " + std::to_string(root), .tensor = &tensor, .site = site},
      [&] {
        Tensors tensors{as_bytes(tensor)};
        c10d::BroadcastOptions options;
        options.rootRank = root;
        engine().broadcast(tensors, options)->wait();
      });
}

std::vector<at::Tensor> ProcessGroup::all_gather(const at::Tensor& tensor, CallSite site) {
  check_tensor(tensor, "all_gather", engine());
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape.insert(shape.begin(), size());
  at::Tensor output = at::empty(shape, tensor.options());
  all_gather_into(output, tensor, site);
  return output.unbind(0);
}

// Over one host all paths are alike; between hosts Gloo's ring crosses the network less often.
EngineWork ProcessGroup::Impl::begin_all_gather(const at::Tensor& output, const at::Tensor& input) {
  const bool one_host = job->place.local_world_size == job->place.world_size;
  return one_host && is_gloo(*engine, input)
             ? begin_direct_all_gather(*engine, output, input, data_tag())
             : comm::begin_all_gather(*engine, output, input);
}

void ProcessGroup::all_gather_into(at::Tensor& output, const at::Tensor& input, CallSite site) {
  impl_->run(all_gather_call(engine(), output, input, site),
             [&] { impl_->begin_all_gather(output, input)->wait(); });
}

Work ProcessGroup::all_gather_into_async(at::Tensor& output, const at::Tensor& input,
                                         const std::string& of, CallSite site) {
  Call call = all_gather_call(engine(), output, input, site);
  call.operation = with_subject(call.operation, of);
  return impl_->start(call, [&] { return impl_->begin_all_gather(output, input); }, {});
}

std::vector<at::Tensor> ProcessGroup::gather(const at::Tensor& tensor, int root, CallSite site) {
  check_tensor(tensor, "gather", engine());
  check_rank(root, size(), "gather", "root");
  Tensors outputs;
  if (rank() == root) {
    for (int peer = 0; peer < size(); ++peer) outputs.push_back(at::empty_like(tensor));
  }
  impl_->run({.operation = "gather to " + std::to_string(root), .tensor = &tensor, .site = site},
             [&] {
               std::vector<Tensors> output_lists;
               if (rank() == root) output_lists.emplace_back();
               for (const at::Tensor& output : outputs) output_lists[0].push_back(as_bytes(output));
               Tensors inputs{as_bytes(tensor)};
               c10d::GatherOptions options;
               options.rootRank = root;
               engine().gather(output_lists, inputs, options)->wait();
             });
  return outputs;
}

void ProcessGroup::scatter(at::Tensor& output, const std::vector<at::Tensor>& inputs, int root,
                           CallSite site) {
  check_tensor(output, "scatter", engine());
  check_rank(root, size(), "scatter", "root");
  TORCH_CHECK_VALUE(inputs.size() == (rank() == root ? static_cast<size_t>(size()) : 0),
                    "scatter: expected ", size(), " inputs on the root and none elsewhere, got ",
                    inputs.size());
  for (const at::Tensor& input : inputs) {
    check_tensor(input, "scatter", engine());
    TORCH_CHECK_VALUE(
        input.sizes() == output.sizes() && input.scalar_type() == output.scalar_type(),
        "scatter: expected inputs like the output, ", type_name(output.scalar_type()), " ",
        output.sizes(), ", got ", type_name(input.scalar_type()), " ", input.sizes());
  }
  impl_->run({.operation = "scatter from " + std::to_string(root), .tensor = &output, .site = site},
             [&] {
               std::vector<Tensors> input_lists;
               if (rank() == root) input_lists.emplace_back();
               for (const at::Tensor& input : inputs) input_lists[0].push_back(as_bytes(input));
               Tensors outputs{as_bytes(output)};
               c10d::ScatterOptions options;
               options.rootRank = root;
               engine().scatter(outputs, input_lists, options)->wait();
             });
}

Work ProcessGroup::reduce_scatter_async(at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                        const std::string& of, CallSite site) {
  check_tensor(output, "reduce_scatter", engine());
  check_tensor(input, "reduce_scatter", engine());
  check_parts(input, output, size(), "reduce_scatter");
  check_reducible(input, "reduce_scatter", op);
  const Call call{
      .operation = with_subject(name_of("reduce_scatter", op), of), .tensor = &input, .site = site};
  if (!is_gloo(engine(), input)) {
    const auto begin = [&] {
      at::Tensor whole = read_beside(input, output, engine());
      c10d::ReduceScatterOptions options;
      options.reduceOp = engine_op(op);
      return engine()._reduce_scatter_base(output, whole, options);
    };
    return impl_->start(call, begin, division(op, output, size()));
  }
  const auto own = static_cast<size_t>(rank());
  const Tensors outgoing = input.detach().view({size(), output.numel()}).unbind(0);
  const at::Tensor result = output.detach().view({-1});
  // The last part that comes may lie where the result will, unless this rank's own lies there.
  const size_t last = own + 1 == outgoing.size() ? own - 1 : outgoing.size() - 1;
  Tensors parts;
  for (size_t peer = 0; peer < outgoing.size(); ++peer) {
    const bool there = peer == last && !output.is_alias_of(input);
    parts.push_back(peer == own ? outgoing[own] : there ? result : at::empty_like(outgoing[peer]));
  }
  const auto begin = [&] { return begin_exchange(engine(), outgoing, parts, impl_->data_tag()); };
  const auto finish = [parts, own, result, op, divide = division(op, output, size())] {
    combine_all(result, parts, own, op);
    if (divide) divide();
  };
  return impl_->start(call, begin, finish);
}

void ProcessGroup::reduce_scatter(at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                  CallSite site) {
  reduce_scatter_async(output, input, op, {}, site).wait(site);
}

void ProcessGroup::all_to_all(at::Tensor& output, const at::Tensor& input,
                              const std::vector<int64_t>& output_splits,
                              const std::vector<int64_t>& input_splits, CallSite site) {
  check_tensor(output, "all_to_all", engine());
  check_tensor(input, "all_to_all", engine());
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(),
                    "all_to_all: expected one dtype, got ", type_name(output.scalar_type()),
                    " and ", type_name(input.scalar_type()));
  check_splits(output_splits, output, size(), "output");
  check_splits(input_splits, input, size(), "input");
  // Splits are in rows here and in bytes below.
  const bool equal = output_splits.empty() && input_splits.empty();
  const auto in_bytes = [&](const std::vector<int64_t>& splits, const at::Tensor& tensor) {
    const int64_t rows = tensor.size(0);
    const int64_t row_bytes = rows == 0 ? 0 : static_cast<int64_t>(tensor.nbytes()) / rows;
    std::vector<int64_t> result(splits);
    if (!equal && splits.empty()) result.assign(static_cast<size_t>(size()), rows / size());
    for (int64_t& count : result) count *= row_bytes;
    return result;
  };
  const std::vector<int64_t> out_counts = in_bytes(output_splits, output);
  const std::vector<int64_t> in_counts = in_bytes(input_splits, input);
  const auto own = static_cast<size_t>(rank());
  TORCH_CHECK_VALUE(!equal || output.numel() == input.numel(),
                    "all_to_all: expected as many elements in the output as in the input, ",
                    input.numel(), ", got ", output.numel());
  TORCH_CHECK_VALUE(equal || out_counts[own] == in_counts[own], "all_to_all: rank ", rank(),
                    " sends itself ", in_counts[own], " bytes and expects ", out_counts[own]);
  const std::string operation =
      "all_to_all of " + std::string(equal ? "equal parts" : type_name(input.scalar_type()));
  impl_->run({.operation = operation, .tensor = equal ? &input : nullptr, .site = site}, [&] {
    begin_all_to_all(engine(), as_bytes(output), as_bytes(input), out_counts, in_counts)->wait();
  });
}

void ProcessGroup::send(const at::Tensor& tensor, int to, int tag, CallSite site) {
  check_tensor(tensor, "send", engine());
  check_rank(to, size(), "send", "receiver");
  TORCH_CHECK_VALUE(to != rank() && tag >= 0,
                    "send: expected another rank and a tag >= 0, got rank ", to, ", tag ", tag);
  impl_->run_unmatched(
      {.operation = "send to " + std::to_string(to), .tensor = &tensor, .site = site}, [&] {
        if (impl_->compares()) {
          Tensors form{form_of(tensor)};
          engine().send(form, to, tag)->wait();
        }
        Tensors tensors{as_bytes(tensor)};
        engine().send(tensors, to, tag)->wait();
      });
}

void ProcessGroup::recv(at::Tensor& tensor, int from, int tag, CallSite site) {
  check_tensor(tensor, "recv", engine());
  check_rank(from, size(), "recv", "sender");
  TORCH_CHECK_VALUE(from != rank() && tag >= 0,
                    "recv: expected another rank and a tag >= 0, got rank ", from, ", tag ", tag);
  impl_->run_unmatched(
      {.operation = "recv from " + std::to_string(from), .tensor = &tensor, .site = site}, [&] {
        if (impl_->compares()) check_form(tensor, from, engine(), tag);
        Tensors tensors{as_bytes(tensor)};
        engine().recv(tensors, from, tag)->wait();
      });
}

std::string ProcessGroup::broadcast_text(const std::string& text, int root, CallSite site) {
  at::Tensor length = at::tensor({static_cast<int64_t>(text.size())});
  broadcast(length, root, site);
  at::Tensor bytes = at::empty({length.item<int64_t>()}, at::kByte);
  if (rank() == root) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  if (bytes.numel() > 0) broadcast(bytes, root, site);
  return text_of(bytes, 0, bytes.numel());
}

std::vector<std::string> ProcessGroup::all_gather_text(const std::string& text, CallSite site) {
  const auto lengths = gather_lengths(*this, text, site);
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  at::Tensor all = at::empty({size() * longest}, at::kByte);
  if (longest > 0) all_gather_into(all, padded_bytes(text, longest), site);
  return unpack(all, lengths);
}

std::vector<std::string> ProcessGroup::gather_text(const std::string& text, int root,
                                                   CallSite site) {
  const auto lengths = gather_lengths(*this, text, site);
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<std::string> texts;
  if (longest == 0) return rank() == root ? std::vector<std::string>(lengths.size()) : texts;
  const auto all = gather(padded_bytes(text, longest), root, site);
  for (size_t peer = 0; peer < all.size(); ++peer)
    texts.push_back(text_of(all[peer], 0, lengths[peer]));
  return texts;
}

void ProcessGroup::barrier(const std::string& name, std::optional<std::chrono::milliseconds> limit,
                           CallSite site) {
  impl_->run(
      {.operation = "barrier \"" + name + "\"", .tensor = nullptr, .site = site, .limit = limit},
      [&] {
        // The comparison of calls is itself a barrier, and one rank waits for nobody.
        if (impl_->compares() || size() == 1) return;
        Tensors tensors{at::zeros({1}, at::kByte)};
        c10d::AllreduceOptions options;
        options.timeout = limit.value_or(impl_->job->options.timeout);
        engine().allreduce(tensors, options)->wait();
      });
}

}  // namespace cohort::comm
