// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/optimizer_state.h"

#include <algorithm>
#include <c10/core/TensorImpl.h>
#include <map>
#include <set>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/manifest.h"

namespace cohort::train {
namespace {

namespace torch_optim = torch::optim;

// Calls field(name, tensor or counter, whether a step needs it) for what a parameter's state has.
template <class Field>
void visit(torch_optim::SGDParamState& state, const torch_optim::SGDOptions& options,
           const Field& field) {
  field("momentum_buffer", state.momentum_buffer(), options.momentum() != 0);
}
template <class State, class Options, class Field>
void visit_adam(State& state, const Options& options, const Field& field) {
  field("step", state.step(), true);
  field("exp_avg", state.exp_avg(), true);
  field("exp_avg_sq", state.exp_avg_sq(), true);
  field("max_exp_avg_sq", state.max_exp_avg_sq(), options.amsgrad());
}
template <class Field>
void visit(torch_optim::AdamParamState& state, const torch_optim::AdamOptions& options,
           const Field& field) {
  visit_adam(state, options, field);
}
template <class Field>
void visit(torch_optim::AdamWParamState& state, const torch_optim::AdamWOptions& options,
           const Field& field) {
  visit_adam(state, options, field);
}
template <class Field>
void visit(torch_optim::RMSpropParamState& state, const torch_optim::RMSpropOptions& options,
           const Field& field) {
  field("step", state.step(), true);
  field("square_avg", state.square_avg(), true);
  field("momentum_buffer", state.momentum_buffer(), options.momentum() > 0);
  field("grad_avg", state.grad_avg(), options.centered());
}
template <class Field>
void visit(torch_optim::AdagradParamState& state, const torch_optim::AdagradOptions&,
           const Field& field) {
  field("step", state.step(), true);
  field("sum", state.sum(), true);
}

// What state of a class has: by every options, and by some.
struct ClassFields {
  const char* name;
  std::set<std::string> always;
  std::set<std::string> sometimes;
};
const ClassFields kClasses[] = {
    {"torch::optim::SGD", {"momentum_buffer"}, {}},
    {"torch::optim::Adam", {"step", "exp_avg", "exp_avg_sq"}, {"max_exp_avg_sq"}},
    {"torch::optim::AdamW", {"step", "exp_avg", "exp_avg_sq"}, {"max_exp_avg_sq"}},
    {"torch::optim::RMSprop", {"step", "square_avg"}, {"momentum_buffer", "grad_avg"}},
    {"torch::optim::Adagrad", {"step", "sum"}, {}},
    {"cohort::optim::Adam", {"exp_avg", "exp_avg_sq"}, {}},
};

template <class State, class Options>
struct Kind {
  using StateType = State;
  using OptionsType = Options;
  const char* name;
};

// Calls call(Kind) of the optimizer's type.
template <class Call>
void with_kind(const torch_optim::Optimizer& optimizer, const Call& call) {
  if (dynamic_cast<const torch_optim::SGD*>(&optimizer) != nullptr)
    return call(Kind<torch_optim::SGDParamState, torch_optim::SGDOptions>{"torch::optim::SGD"});
  if (dynamic_cast<const torch_optim::Adam*>(&optimizer) != nullptr)
    return call(Kind<torch_optim::AdamParamState, torch_optim::AdamOptions>{"torch::optim::Adam"});
  if (dynamic_cast<const torch_optim::AdamW*>(&optimizer) != nullptr)
    return call(
        Kind<torch_optim::AdamWParamState, torch_optim::AdamWOptions>{"torch::optim::AdamW"});
  if (dynamic_cast<const torch_optim::RMSprop*>(&optimizer) != nullptr)
    return call(
        Kind<torch_optim::RMSpropParamState, torch_optim::RMSpropOptions>{"torch::optim::RMSprop"});
  if (dynamic_cast<const torch_optim::Adagrad*>(&optimizer) != nullptr)
    return call(
        Kind<torch_optim::AdagradParamState, torch_optim::AdagradOptions>{"torch::optim::Adagrad"});
  TORCH_CHECK_VALUE(
      false,
      "checkpoint: expected an optimizer whose state is by element: SGD, Adam, AdamW, "
      "RMSprop or Adagrad");
}

// Calls call(parameter's tensor, its shard, its group's options) for each that has elements.
template <class Options, class Call>
void for_each_parameter(torch_optim::Optimizer& optimizer,
                        const std::vector<TensorShard>& parameters, const Call& call) {
  std::map<const void*, const TensorShard*> shards;
  for (const TensorShard& shard : parameters)
    shards.emplace(shard.tensor.unsafeGetTensorImpl(), &shard);
  for (torch_optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    const auto& options = static_cast<const Options&>(group.options());
    for (const at::Tensor& parameter : group.params()) {
      const auto found = shards.find(parameter.unsafeGetTensorImpl());
      TORCH_CHECK_VALUE(found != shards.end(), "checkpoint: the optimizer, ", class_of(optimizer),
                        ", updates a tensor of shape ", to_string(parameter.sizes().vec()),
                        " that is none of the wrapped model's parameters(): make it from those, "
                        "after wrapping; FullyShardedDataParallel trains shards of its own in the "
                        "place of the module's parameters");
      if (num_elements(found->second->shape) != 0) call(parameter, *found->second, options);
    }
  }
}

}  // namespace

std::vector<TensorShard> optimizer_slices(torch_optim::Optimizer& optimizer,
                                          const std::vector<TensorShard>& parameters) {
  std::vector<TensorShard> shards;
  with_kind(optimizer, [&]<class Each>(const Each&) {
    using Options = typename Each::OptionsType;
    const auto add = [&](const at::Tensor& parameter, const TensorShard& of,
                         const Options& options) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) return;
      const auto field = [&]<class Value>(const char* name, const Value& value, bool) {
        const std::string whole = of.name + "." + name;
        if constexpr (std::is_same_v<Value, int64_t>) {
          if (of.begin == 0 && of.end > 0)
            shards.push_back({whole, {}, 0, 1, at::tensor(value, at::kLong)});
        } else if (value.defined()) {
          shards.push_back({whole, of.shape, of.begin, of.end, value});
        }
      };
      visit(static_cast<typename Each::StateType&>(*found->second), options, field);
    };
    for_each_parameter<Options>(optimizer, parameters, add);
  });
  return shards;
}

std::string class_of(const torch_optim::Optimizer& optimizer) {
  std::string name;
  with_kind(optimizer, [&](const auto& kind) { name = kind.name; });
  return name;
}

void check_optimizer_class(const std::string& path, const std::vector<std::string>& state,
                           const std::string& own) {
  std::set<std::string> fields;
  for (const std::string& name : state) fields.insert(name.substr(name.rfind('.') + 1));
  std::string writers;
  for (const auto& [name, always, sometimes] : kClasses) {
    auto all = always;
    all.insert(sometimes.begin(), sometimes.end());
    if (!std::ranges::includes(fields, always) || !std::ranges::includes(all, fields)) continue;
    if (own == name) return;
    writers += (writers.empty() ? "" : " or ") + std::string(name);
  }
  if (writers.empty()) return;  // Nothing, or what no class has: names tell more.
  throw ConfigError(path + ": it has the state of " + writers + ", and the optimizer to load is " +
                    own +
                    ": load it into one of the same class, or the weights alone, by "
                    "checkpoint::load(model, path)");
}

OptimizerLoad::OptimizerLoad(torch_optim::Optimizer& optimizer,
                             const std::vector<TensorShard>& parameters,
                             const std::function<bool(const std::string&)>& has)
    : optimizer_(optimizer) {
  const bool always = dynamic_cast<torch_optim::Adagrad*>(&optimizer) != nullptr;  // has state
  with_kind(optimizer, [&]<class Each>(const Each&) {
    using State = typename Each::StateType;
    using Options = typename Each::OptionsType;
    const auto add = [&](const at::Tensor& parameter, const TensorShard& of,
                         const Options& options) {
      void* const key = parameter.unsafeGetTensorImpl();
      const auto state = std::make_shared<State>();
      bool any = always;
      visit(*state, options,
            [&](const char* name, auto&, bool) { any = any || has(of.name + "." + name); });
      if (!any) {
        installs_.emplace_back([this, key] { optimizer_.state().erase(key); });
        return;
      }
      std::vector<std::pair<int64_t*, at::Tensor>> counters;
      const auto field = [&]<class Value>(const char* name, Value& value, bool needed) {
        const std::string whole = of.name + "." + name;
        if (!needed && !has(whole)) return;
        if constexpr (std::is_same_v<Value, int64_t>) {
          counters.emplace_back(&value, at::zeros({}, at::kLong));
          slices_.push_back({whole, {}, 0, 1, counters.back().second});
        } else {
          value = at::zeros_like(parameter.detach());
          slices_.push_back({whole, of.shape, of.begin, of.end, value});
        }
      };
      visit(*state, options, field);
      installs_.emplace_back([this, key, state, counters] {
        for (const auto& [counter, value] : counters) *counter = value.template item<int64_t>();
        optimizer_.state()[key] = std::make_unique<State>(*state);
      });
    };
    for_each_parameter<Options>(optimizer, parameters, add);
  });
}

void OptimizerLoad::install() {
  for (const auto& install : installs_) install();
}

}  // namespace cohort::train
