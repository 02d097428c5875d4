// SPDX-License-Identifier: Apache-2.0
// What each collective over Gloo, or a step of one strategy, sends and takes, beside what is predicted.
//
//   cohort run --nproc-per-node 4 -- build/release/bin/collective_costs [--strategy zero3]
//
// Rank 0 prints one JSON line; lists are by rank. The program has no allocator but glibc's, whose
// functions it replaces to count.
#include <ATen/ATen.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <functional>
#include <malloc.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <torch/nn/modules/linear.h>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/cli/parse.h"
#include "cohort/comm/process_group.h"
#include "cohort/optim/adam.h"
#include "cohort/parallel/sharding/unit.h"
#include "cohort/parallel/strategy.h"
#include "cohort/parallel/tensor_parallel.h"

#include "bench/collective_traffic.h"
#include "bench/median.h"
#include "bench/sent_bytes.h"

namespace {

// Bytes that all threads have allocated.
std::atomic<int64_t> held{0}, most_held{0};

void* counted(void* memory) {
  if (!memory) return memory;
  const auto bytes = static_cast<int64_t>(malloc_usable_size(memory));
  const int64_t now = held.fetch_add(bytes) + bytes;
  int64_t most = most_held;
  while (now > most && !most_held.compare_exchange_weak(most, now)) {
  }
  return memory;
}

void uncount(void* memory) {
  if (memory) held -= static_cast<int64_t>(malloc_usable_size(memory));
}

}  // namespace

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);

void* malloc(size_t bytes) {
  return counted(__libc_malloc(bytes));
}
void* calloc(size_t count, size_t bytes) {
  return counted(__libc_calloc(count, bytes));
}
void* realloc(void* memory, size_t bytes) {
  uncount(memory);
  return counted(__libc_realloc(memory, bytes));
}
void* memalign(size_t alignment, size_t bytes) {
  return counted(__libc_memalign(alignment, bytes));
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  return counted(__libc_memalign(alignment, bytes));
}
int posix_memalign(void** memory, size_t alignment, size_t bytes) {
  *memory = counted(__libc_memalign(alignment, bytes));
  return *memory ? 0 : ENOMEM;
}
void free(void* memory) {
  uncount(memory);
  __libc_free(memory);
}
}

namespace {

using cohort::bench::Traffic;
using cohort::comm::ProcessGroup;
using nlohmann::json;
using Clock = std::chrono::steady_clock;

struct Options {
  int64_t repeats = 9;
  std::string strategy;
  int64_t width = 256;
  int64_t blocks = 8;
  int64_t rows = 4;
};

// Every rank's value, by rank.
json by_rank(const ProcessGroup& group, int64_t value) {
  std::vector<int64_t> values;
  for (const at::Tensor& each : group.all_gather(at::tensor({value})))
    values.push_back(each.item<int64_t>());
  return values;
}

int64_t sent_bytes(const ProcessGroup& group) {
  return cohort::bench::tcp_bytes_sent(group.rank_info().master_port);
}

struct Case {
  const char* name;
  Traffic traffic;       // of this rank, for a call whose kind is known
  int64_t extra_memory;  // of this rank, beside the tensors that the caller gives
  std::function<void()> call;
};

// `bytes`: of the largest buffer of each collective.
std::vector<Case> cases(const ProcessGroup& group, int64_t bytes) {
  using namespace cohort::bench;
  const int rank = group.rank(), size = group.size();
  const int64_t part = bytes / size;
  const at::Tensor whole = at::ones({bytes / 4}), other = at::ones({bytes / 4});
  const at::Tensor own = at::ones({part / 4});
  const auto on_root = [&](const at::Tensor& parts) {
    return rank == 0 ? parts.view({size, part / 4}).unbind(0) : std::vector<at::Tensor>();
  };
  const auto outputs = on_root(whole), inputs = on_root(other);
  const int64_t scratch = 2 * std::min(ceil_div(bytes, 2 * size), kMaxSegmentBytes);
  std::vector<Case> all{
      {"all_reduce", all_reduce_traffic(bytes, rank, size), scratch,
       [=] { group.all_reduce(whole, cohort::comm::ReduceOp::kMax); }},
      {"reduce", reduce_traffic(bytes, 0, rank, size), scratch,
       [=] { group.reduce(whole, 0, cohort::comm::ReduceOp::kMax); }},
      {"broadcast", broadcast_traffic(bytes, 0, rank, size), 0, [=] { group.broadcast(whole, 0); }},
      {"all_gather_into", exchange_traffic(part, size), 0,
       [=] { group.all_gather_into(whole, own); }},
      {"reduce_scatter", exchange_traffic(part, size), (size - 2) * part,
       [=] { group.reduce_scatter(own, whole); }},
      {"all_to_all", exchange_traffic(part, size), 0, [=] { group.all_to_all(whole, other); }},
      {"gather", gather_traffic(part, 0, rank, size), rank == 0 ? bytes : 0,
       [=] { group.gather_async(outputs, own, 0).wait(); }},
      // libtorch makes an empty tensor of all parts to keep its records by.
      {"scatter", scatter_traffic(part, 0, rank, size), rank == 0 ? bytes : 0,
       [=] { group.scatter(own, inputs, 0); }},
      {"barrier", comparison_traffic(rank, size), 0, [=] { group.barrier("measured"); }}};
  // Rank 0 to rank 1; the others do nothing.
  const int64_t form_bytes = 24;
  Case message{"send", {}, 0, [] {}};
  if (rank == 0) {
    message.traffic = {.bytes = bytes + form_bytes, .sent = 2};
    message.call = [=] { group.send(whole, 1); };
  } else if (rank == 1) {
    message.traffic = {.received = 2};
    message.call = [=] { group.recv(whole, 0); };
  }
  all.push_back(message);
  return all;
}

json measure(const Options& options, const ProcessGroup& group, const Case& each) {
  constexpr int kCalls = 4;
  each.call();
  each.call();
  group.barrier("all know this call");
  const int64_t before = sent_bytes(group);
  for (int i = 0; i < kCalls; ++i) each.call();
  const int64_t sent = sent_bytes(group) - before;
  group.barrier("bytes counted");
  const int64_t held_before = held;
  most_held = held_before;
  each.call();
  const int64_t memory = most_held - held_before;
  std::vector<double> times;
  for (int64_t i = 0; i < options.repeats; ++i) {
    group.barrier("start");
    const auto start = Clock::now();
    each.call();
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  at::Tensor slowest = at::tensor(times, at::kDouble);  // of all ranks, round by round
  group.all_reduce(slowest, cohort::comm::ReduceOp::kMax);
  times.assign(slowest.data_ptr<double>(), slowest.data_ptr<double>() + slowest.numel());
  return {{"predicted_bytes", by_rank(group, each.traffic.bytes)},
          {"predicted_messages", by_rank(group, each.traffic.sent)},
          {"predicted_wire_bytes", by_rank(group, each.traffic.wire_bytes())},
          {"wire_bytes", by_rank(group, sent / kCalls)},
          {"predicted_memory", by_rank(group, each.extra_memory)},
          {"memory", by_rank(group, memory)},
          {"us",
           {{"median", cohort::bench::median_of(times)},
            {"least", *std::ranges::min_element(times)},
            {"most", *std::ranges::max_element(times)}}}};
}

json collectives(const Options& options, const ProcessGroup& group) {
  json result = json::object();
  for (const int64_t bytes : {12 << 10, 768 << 10, 24 << 20}) {
    json& of_size = result[std::to_string(bytes)];
    for (const Case& each : cases(group, bytes)) of_size[each.name] = measure(options, group, each);
  }
  return result;
}

// With `tensor` its ranks compute one block together.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, ProcessGroup tensor)
      : tensor_(std::move(tensor)),
        up(register_module("up", torch::nn::Linear(width, 2 * width / parts()))),
        down(register_module("down", torch::nn::Linear(2 * width / parts(), width))) {}
  at::Tensor forward(const at::Tensor& x) {
    using namespace cohort::parallel;
    if (!tensor_) return x + down(at::tanh(up(x)));
    const at::Tensor inner = column_parallel_linear(x, up->weight, up->bias, tensor_);
    return x + row_parallel_linear(at::tanh(inner), down->weight, down->bias, tensor_);
  }

 private:
  int parts() const { return tensor_ ? tensor_.size() : 1; }
  ProcessGroup tensor_;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl(const Options& options, const ProcessGroup& tensor) {
    for (int64_t i = 0; i < options.blocks; ++i)
      blocks.push_back(register_module("block" + std::to_string(i),
                                       cohort::parallel::Unit<Block>(options.width, tensor)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return x;
  }
  std::vector<cohort::parallel::Unit<Block>> blocks;
};
TORCH_MODULE(Net);

// Operations that c10d's backends have begun in this process, by their names in a trace.
std::atomic<int64_t> num_all_reduces{0}, num_sends{0};

std::unique_ptr<at::ObserverContext> count_operation(const at::RecordFunction& record) {
  const std::string_view name = record.name();
  if (name == "gloo:all_reduce") ++num_all_reduces;
  if (name == "gloo:send") ++num_sends;
  return nullptr;
}

// Bytes held once the backend has let go of what it worked on. Collective.
int64_t held_at_rest(const ProcessGroup& group) {
  group.barrier("at rest");
  return held;
}

// A few steps. `base` bytes were held before the model was made, which takes `parameters`; of
// what its wrapper has added the rest is for gradients.
template <class Model>
json steps(const Options& options, const ProcessGroup& group, Model& model,
           const std::vector<std::pair<std::string, at::Tensor>>& trained, int64_t base,
           int64_t parameters) {
  const int64_t made = held_at_rest(group) - base;
  cohort::optim::Adam adam(trained);
  const at::Tensor x = at::randn({options.rows, options.width});
  const auto backward = [&] { model(x).square().sum().backward(); };
  const auto update = [&] {
    adam.step(1e-3);
    adam.zero_grad();
  };
  for (int i = 0; i < 2; ++i) {
    backward();
    update();
  }
  const int64_t without_gradients = held_at_rest(group) - base;
  backward();
  const int64_t after_backward = held_at_rest(group) - base;
  update();
  held_at_rest(group);
  most_held = held.load();
  const int64_t sent_before = sent_bytes(group);
  num_all_reduces = num_sends = 0;
  backward();
  update();
  const int64_t sent = sent_bytes(group) - sent_before;
  const int64_t all_reduces = num_all_reduces, sends = num_sends;
  const int64_t above = most_held - base - after_backward;
  group.barrier("counted");
  return {{"wire_bytes", by_rank(group, sent)},
          {"all_reduces", by_rank(group, all_reduces)},
          {"sends", by_rank(group, sends)},
          {"parameters", by_rank(group, parameters)},
          {"gradients", by_rank(group, after_backward - without_gradients + made - parameters)},
          {"optimizer", by_rank(group, without_gradients - made)},
          {"after_backward", by_rank(group, after_backward)},
          {"above", by_rank(group, above)}};
}

json strategy_step(const Options& options, const ProcessGroup& group) {
  using namespace cohort::parallel;
  at::addGlobalCallback(
      at::RecordFunctionCallback(count_operation).scopes({at::RecordScope::USER_SCOPE}));
  // What libraries allocate once is not the model's.
  Options one = options;
  one.blocks = 1;
  Net(one, ProcessGroup())->forward(at::ones({one.rows, one.width})).sum().backward();
  const int64_t base = held_at_rest(group);
  const bool tensor = options.strategy == "tensor";
  Net net(options, tensor ? group : ProcessGroup());
  const int64_t whole = held_at_rest(group) - base;
  if (tensor) return steps(options, group, net, cohort::optim::named_parameters(*net), base, whole);
  const Strategy strategy = parse_strategy(options.strategy);
  const bool hybrid = strategy == Strategy::kHybrid;
  const auto mesh = hybrid
                        ? cohort::init_device_mesh(group, {{"dp_replicate", -1}, {"dp_shard", 2}})
                        : cohort::init_device_mesh(group, {{"dp", -1}});
  ParallelModel<Net> model(net, mesh,
                           {.strategy = strategy, .ddp = {.gradient_as_bucket_view = true}});
  // Under DDP the wrapper adds its buckets, which gradients are views of.
  const int64_t parameters = strategy == Strategy::kDdp ? whole : held_at_rest(group) - base;
  return steps(options, group, model, model.named_parameters(), base, parameters);
}

int run(const Options& options) {
  at::set_num_threads(1);
  // As the other programs, whose allocator keeps what is freed.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that it takes
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  const ProcessGroup group(cohort::comm::rank_info_from_environment(), {.backend = "gloo"});
  if (group.size() < 2)
    throw cohort::ConfigError("expected 2 ranks or more: cohort run --nproc-per-node 2 -- ...");
  const json result =
      options.strategy.empty() ? collectives(options, group) : strategy_step(options, group);
  group.close();
  if (group.rank() == 0) std::printf("%s\n", result.dump().c_str());
  return cohort::kExitOk;
}

}  // namespace

int main(int argc, char** argv) {
  return cohort::run_program("collective_costs", [&] {
    CLI::App app("What collectives and strategies send and take, beside what is predicted");
    Options options;
    app.add_option("--repeats", options.repeats, "Timed calls of each collective")
        ->capture_default_str();
    app.add_option("--strategy", options.strategy,
                   "A step of it instead; hybrid: pairs of ranks shard, tensor: all ranks compute "
                   "one model")
        ->check(CLI::IsMember({"ddp", "zero1", "zero2", "zero3", "hybrid", "tensor"}));
    app.add_option("--width", options.width, "Of the model")->capture_default_str();
    app.add_option("--blocks", options.blocks, "Of the model")->capture_default_str();
    app.add_option("--rows", options.rows, "Of a rank's batch")->capture_default_str();
    if (const auto ended = cohort::cli::parse(app, argc, argv)) return *ended;
    return run(options);
  });
}
