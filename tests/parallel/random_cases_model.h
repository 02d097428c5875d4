// SPDX-License-Identifier: Apache-2.0
// The model of a random case, its batches, and one process that trains it on the union of all ranks' batches.
#pragma once
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <utility>
#include <vector>

#include "cohort/optim/adam.h"
#include "cohort/parallel/activation_checkpoint.h"
#include "cohort/parallel/sharding/fully_sharded_data_parallel.h"

#include "tests/parallel/random_cases.h"

namespace cohort::test::random_cases {

inline constexpr int kSteps = 5;
inline constexpr int64_t kInputs = 5;
inline constexpr double kAdamRate = 0.05;
inline constexpr double kSgdRate = 0.002;  // more makes some models diverge
inline constexpr double kMomentum = 0.9;
// A change of a gradient by d moves a parameter by at most kAdamRate / kAdamEps * d = 5 d.
inline constexpr double kAdamEps = 1e-2;

// Sines of a frequency and phase of their own for each (seed, which): the same on every rank.
inline at::Tensor values(uint64_t seed, uint64_t which, at::IntArrayRef shape) {
  std::mt19937_64 generator(seed * 1'000'003 + which);
  const double frequency = 0.3 + static_cast<double>(generator() % 1000) / 400;
  const double phase = static_cast<double>(generator() % 1000) / 100;
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  return at::arange(numel, at::kDouble).mul(frequency).add(phase).sin().mul(0.7).view(shape);
}

inline void fill(torch::nn::Module& module, uint64_t seed, int rank) {
  const at::NoGradGuard no_grad;
  uint64_t which = 1'000;
  for (at::Tensor& each : module.parameters())
    each.copy_(values(seed, which++, each.sizes()) + 0.25 * rank);
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    first = register_module("first", torch::nn::Linear(width, 4));
    second = register_module("second",
                             torch::nn::Linear(torch::nn::LinearOptions(4, width).bias(false)));
  }
  at::Tensor forward(const at::Tensor& x) { return x + second(at::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  // Another rank's state is not rank 0's: the wrapper of the model copies that.
  NetImpl(const RandomCase& c, int rank)
      : is_tied(c.tied), runs_twice(c.twice), recompute(c.recompute) {
    if (c.tied) {
      table = register_parameter("table", at::zeros({kInputs, c.width}));
    } else {
      first = register_module("first", torch::nn::Linear(kInputs, c.width));
      last = register_module("last", torch::nn::Linear(c.width, kInputs));
    }
    scale = register_parameter("scale", at::zeros({}));
    if (c.empty) empty = register_parameter("empty", at::zeros({0, 3}));
    for (int i = 0; i < c.blocks; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block(c.width)));
    if (c.sometimes) extra = register_module("extra", Block(c.width));
    if (c.unused) register_module("unused", Block(c.width));
    if (c.buffers) {
      offset = register_buffer("offset", at::full({c.width}, 0.1 + rank));
      mean = register_buffer("mean", at::full({c.width}, 0.2 * rank));
      count = register_buffer("count", at::full({1}, rank, at::kLong));
    }
    fill(*this, c.seed, rank);
    to(c.single ? at::kFloat : at::kDouble);
    if (count.defined()) count.set_data(count.to(at::kLong));
    if (c.frozen)
      for (at::Tensor& each : blocks.back()->parameters()) each.set_requires_grad(false);
  }

  at::Tensor run(Block& block, const at::Tensor& x) {
    return parallel::run_unit(*block, [&]() -> at::Tensor {
      if (recompute == Recompute::kModule)
        return parallel::activation_checkpoint_module(block, {}, x);
      if (recompute == Recompute::kNone) return block->forward(x);
      return parallel::activation_checkpoint(
          {}, [block](const at::Tensor& h) mutable { return block->forward(h); }, x);
    });
  }

  // `uses_extra` [rows, 1]: 1 where the extra block takes part. `running_mean`: in evaluation, in place of the own one.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& uses_extra,
                     const at::Tensor& running_mean = {}) {
    at::Tensor y = (is_tied ? at::matmul(x, table) : first(x)) * scale;
    if (empty.defined()) y = y + empty.sum();
    if (offset.defined()) y = y + offset;
    for (Block& block : blocks) y = run(block, y);
    if (runs_twice) y = run(blocks.front(), y);
    if (extra && uses_extra.sum().item<double>() > 0) y = y + uses_extra * extra(y);
    hidden = y.detach();
    if (mean.defined() && is_training() && keeps_statistics) {
      const at::NoGradGuard no_grad;
      mean.mul_(0.5).add_(hidden.mean(0), 0.5);
      count.add_(1);
    } else if (mean.defined() && !is_training()) {
      y = y + (running_mean.defined() ? running_mean : mean);
    }
    return is_tied ? at::matmul(y, table.t()) : last(y);
  }

  std::vector<torch::nn::Module*> units() {
    std::vector<torch::nn::Module*> all;
    for (Block& block : blocks) all.push_back(block.get());
    return all;
  }

  bool is_tied, runs_twice;
  Recompute recompute;
  bool keeps_statistics = true;
  at::Tensor table, scale, empty, offset, mean, count;
  at::Tensor hidden;  // of the last forward: what running means are of
  torch::nn::Linear first{nullptr}, last{nullptr};
  std::vector<Block> blocks;
  Block extra{nullptr};
};
TORCH_MODULE(Net);

inline torch::nn::Linear make_head(const RandomCase& c) {
  torch::nn::Linear head(kInputs, 2);
  fill(*head, c.seed + 7, 0);
  head->to(c.single ? at::kFloat : at::kDouble);
  return head;
}

// One batch of one rank.
struct Batch {
  at::Tensor x, uses_extra;
};

inline Batch batch_of(const RandomCase& c, int rank, int step, int index) {
  const auto which = static_cast<uint64_t>((step * 8 + index) * 8 + rank);
  const auto type = c.single ? at::kFloat : at::kDouble;
  const bool uses = (c.seed / 3 + which * 5 + static_cast<uint64_t>(step)) % 3 != 0;
  return {values(c.seed, which, {c.rows, kInputs}).to(type),
          at::full({c.rows, 1}, uses ? 1 : 0, type)};
}

inline int num_steps_of(const RandomCase& c, int rank) {
  return c.join == 0 || rank == 0
             ? kSteps
             : 1 + static_cast<int>((static_cast<uint64_t>(rank * c.join) + c.seed) % 5);
}

// Adam or SGD, of tensors with names.
class Optimizer {
 public:
  Optimizer(std::vector<std::pair<std::string, at::Tensor>> named, bool sgd)
      : named_(std::move(named)) {
    std::vector<at::Tensor> tensors;
    for (const auto& [name, tensor] : named_) tensors.push_back(tensor);
    if (sgd) {
      sgd_.emplace(tensors, torch::optim::SGDOptions(kSgdRate).momentum(kMomentum));
    } else {
      adam_.emplace(named_, optim::AdamOptions{.eps = kAdamEps});
    }
  }
  void step(double factor) {
    if (adam_) return adam_->step(kAdamRate, factor);
    const at::NoGradGuard no_grad;
    for (const auto& [name, tensor] : named_)
      if (tensor.grad().defined()) tensor.mutable_grad().mul_(factor);
    sgd_->step();
  }
  void zero_grad() { adam_ ? adam_->zero_grad() : sgd_->zero_grad(); }
  // Undefined before the first step with a gradient.
  std::map<std::string, at::Tensor> moments() {
    std::map<std::string, at::Tensor> found;
    if (adam_)
      for (const auto& [name, tensor] : adam_->state()) found[name] = tensor;
    for (const auto& [name, tensor] : named_) {
      if (adam_) break;
      const auto state = sgd_->state().find(tensor.unsafeGetTensorImpl());
      if (state == sgd_->state().end()) continue;
      found[name + ".momentum"] =
          static_cast<torch::optim::SGDParamState&>(*state->second).momentum_buffer();
    }
    return found;
  }

 private:
  std::vector<std::pair<std::string, at::Tensor>> named_;
  std::optional<optim::Adam> adam_;
  std::optional<torch::optim::SGD> sgd_;
};

inline std::vector<std::pair<std::string, at::Tensor>> trained(const torch::nn::Module& module) {
  auto named = optim::named_parameters(module);
  std::erase_if(named, [](const auto& each) { return !each.second.requires_grad(); });
  return named;
}

struct Buffers {
  at::Tensor mean, count;
};

// One process, in float64: what every rank must find.
class OneProcess {
 public:
  explicit OneProcess(const RandomCase& c)
      : net(c, 0), shared_head(make_head(c)), c_(c), buffers_(static_cast<size_t>(c.ranks)) {
    net->recompute = Recompute::kNone;
    net->keeps_statistics = false;
    const auto double_precision = [](torch::nn::Module& module) {
      for (at::Tensor& each : module.parameters()) each.set_data(each.detach().to(at::kDouble));
    };
    double_precision(*net);
    double_precision(*shared_head);
    if (net->offset.defined()) net->offset.set_data(net->offset.to(at::kDouble));
    for (int rank = 0; rank < c.ranks; ++rank) {
      if (c.buffers)
        buffers_[static_cast<size_t>(rank)] = {net->mean.to(at::kDouble).clone(),
                                               net->count.clone()};
      leaves.push_back(at::full({}, 1.5, at::kDouble).requires_grad_(true));
      heads.push_back(make_head(c));
      double_precision(*heads.back());
    }
    adam.emplace(trained(*net), c.sgd);
    head_adam.emplace(trained(*shared_head), c.sgd);
  }

  // Forward and backward of one batch of each rank that has one.
  void add_batch(int step, int index) {
    const std::vector<int> active = active_in(step);
    std::vector<at::Tensor> xs, uses, factors;
    inputs.assign(static_cast<size_t>(c_.ranks), {});
    for (const int rank : active) {
      const Batch batch = batch_of(c_, rank, step, index);
      at::Tensor x = batch.x.to(at::kDouble);
      if (c_.input) x.requires_grad_(true);
      inputs[static_cast<size_t>(rank)] = x;
      xs.push_back(x);
      uses.push_back(batch.uses_extra.to(at::kDouble));
      factors.push_back(leaves[static_cast<size_t>(rank)].expand({c_.rows, 1}));
    }
    at::Tensor y = net->forward(at::cat(xs), at::cat(uses));
    if (c_.head == Head::kPlain) {
      std::vector<at::Tensor> parts;
      for (size_t i = 0; i < active.size(); ++i)
        parts.push_back(heads[static_cast<size_t>(active[i])](
            y.narrow(0, static_cast<int64_t>(i) * c_.rows, c_.rows)));
      y = at::cat(parts);
    } else if (c_.head != Head::kNone) {
      y = shared_head(y);
    }
    if (c_.leaf) y = y * at::cat(factors);
    const auto num_active = static_cast<double>(active.size());
    const double share = c_.divide_by_active ? 1 : num_active / c_.ranks;
    // What is a rank's own has the gradient of that rank's loss, not of the mean.
    own_factor = num_active / share;
    (y.square().mean() * share).backward();
    share_buffers(active, /*differ_after=*/c_.synchronize_always || index + 1 == c_.accumulation);
    update_buffers(active);
  }

  // One step of all; the norm of the gradient.
  void step() {
    norm = std::sqrt(optim::gradient_norm_squared(net->parameters()));
    adam->step(clip_factor(c_, norm));
    head_adam->step(1);
  }
  void zero_grad() {
    adam->zero_grad();
    head_adam->zero_grad();
    for (at::Tensor& each : leaves) each.mutable_grad().reset();
    for (auto& head : heads) head->zero_grad();
  }

  static double clip_factor(const RandomCase& c, double norm) {
    return c.clip > 0 && norm > c.clip ? c.clip / norm : 1;
  }

  // What `rank` finds when all that have batches evaluate.
  at::Tensor evaluate(const Batch& batch, int rank, int step) {
    const at::NoGradGuard no_grad;
    share_buffers(active_in(step), /*differ_after=*/false);
    net->eval();
    at::Tensor y = net->forward(batch.x.to(at::kDouble), batch.uses_extra.to(at::kDouble),
                                buffers_of(rank).mean);
    net->train();
    return y;
  }

  const Buffers& buffers_of(int rank) const { return buffers_[static_cast<size_t>(rank)]; }

  Net net;
  torch::nn::Linear shared_head;
  std::vector<torch::nn::Linear> heads;    // by rank
  std::vector<at::Tensor> leaves, inputs;  // by rank
  std::optional<Optimizer> adam, head_adam;
  double norm = 0;
  double own_factor = 1;

 private:
  std::vector<int> active_in(int step) const {
    std::vector<int> active;
    for (int rank = 0; rank < c_.ranks; ++rank)
      if (step < num_steps_of(c_, rank)) active.push_back(rank);
    return active;
  }

  // DistributedDataParallel brings those of the first rank that has batches to all, before every forward that follows a
  // synchronized one.
  void share_buffers(const std::vector<int>& active, bool differ_after) {
    if (!c_.buffers) return;
    if (differ_ && !is_sharded(c_) && !c_.own_buffers) {
      const Buffers root = buffers_of(active.front());
      for (Buffers& each : buffers_) each = {root.mean.clone(), root.count.clone()};
    }
    differ_ = differ_after;
  }

  void update_buffers(const std::vector<int>& active) {
    if (!c_.buffers) return;
    for (size_t i = 0; i < active.size(); ++i) {
      Buffers& own = buffers_[static_cast<size_t>(active[i])];
      const at::Tensor rows = net->hidden.narrow(0, static_cast<int64_t>(i) * c_.rows, c_.rows);
      own.mean = own.mean * 0.5 + rows.mean(0) * 0.5;
      own.count = own.count + 1;
    }
  }

  RandomCase c_;
  std::vector<Buffers> buffers_;  // by rank
  bool differ_ = true;
};

}  // namespace cohort::test::random_cases
