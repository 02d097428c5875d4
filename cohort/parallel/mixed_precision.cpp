// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/mixed_precision.h"

#include <ATen/ops/empty_strided.h>
#include <algorithm>
#include <sstream>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/variable.h>
#include <unordered_set>
#include <utility>

#include "cohort/comm/libtorch_version.h"

namespace cohort::parallel {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

namespace {

constexpr struct {
  const char* name;
  std::optional<c10::ScalarType> MixedPrecision::*type;
} kTypes[] = {{"mixed_precision.param_dtype", &MixedPrecision::param_dtype},
              {"mixed_precision.reduce_dtype", &MixedPrecision::reduce_dtype},
              {"mixed_precision.buffer_dtype", &MixedPrecision::buffer_dtype},
              {"mixed_precision.output_dtype", &MixedPrecision::output_dtype}};

}  // namespace

void check_types(const MixedPrecision& types) {
  for (const auto& [name, type] : kTypes)
    TORCH_CHECK_VALUE(!(types.*type) || at::isFloatingType(*(types.*type)), name,
                      ": expected a floating-point type, got ", c10::toString(*(types.*type)));
}

std::string describe(const MixedPrecision& types) {
  std::ostringstream out;
  for (const auto& [name, type] : kTypes)
    out << name << ' ' << (types.*type ? c10::toString(*(types.*type)) : "unset") << '\n';
  out << "mixed_precision.cast_forward_inputs " << types.cast_forward_inputs << '\n';
  return out.str();
}

struct LowPrecisionParameters::Swap {
  std::string name;
  at::Tensor parameter;
  comm::NodePointer accumulator;  // the master's; none for a frozen parameter
  at::Tensor master;              // defined while the parameter is swapped in

  void swap_out() {
    if (!master.defined()) return;
    const at::NoGradGuard no_grad;
    if (accumulator) torch::autograd::impl::set_gradient_edge(parameter, Edge());
    parameter.set_data(master);
    // set_data forgets the accumulator of another type, and with it the hooks that hang there.
    if (accumulator) comm::set_grad_accumulator(parameter, accumulator);
    master.reset();
  }
};

struct LowPrecisionParameters::Swaps {
  std::vector<std::shared_ptr<Swap>> all;
  bool end_awaited = false;  // a backward runs and will call swap_out when it ends

  void swap_out() {
    end_awaited = false;
    for (const auto& swap : all) swap->swap_out();
  }
};

class LowPrecisionParameters::CastBackward : public Node {
 public:
  CastBackward(std::shared_ptr<Swap> swap, std::weak_ptr<Swaps> all)
      : swap_(std::move(swap)), all_(std::move(all)) {}

  variable_list apply(variable_list&& gradients) override {
    // Frozen parameters are consumed by what has still to run: they wait for the end.
    if (const auto all = all_.lock(); all && !std::exchange(all->end_awaited, true)) {
      torch::autograd::Engine::get_default_engine().queue_callback([weak = all_] {
        if (const auto swaps = weak.lock()) swaps->swap_out();
      });
    }
    swap_->swap_out();
    const at::Tensor& gradient = gradients[0];
    const at::Tensor& to = swap_->parameter;
    if (!gradient.defined() || gradient.scalar_type() == to.scalar_type())
      return std::move(gradients);
    if (gradient.is_sparse()) return {gradient.to(to.scalar_type())};
    // In the parameter's own layout, so that the accumulator keeps this tensor instead of a copy.
    at::Tensor cast =
        at::empty_strided(to.sizes(), to.strides(), to.options().requires_grad(false));
    return {cast.copy_(gradient)};
  }

 private:
  std::shared_ptr<Swap> swap_;
  std::weak_ptr<Swaps> all_;
};

at::Tensor cast_floating(const at::Tensor& tensor, c10::ScalarType type) {
  if (!tensor.defined() || !tensor.is_floating_point() || tensor.scalar_type() == type)
    return tensor;
  return tensor.to(type);
}

at::Tensor cast_input(const MixedPrecision& types, const at::Tensor& input) {
  return types.param_dtype && types.cast_forward_inputs ? cast_floating(input, *types.param_dtype)
                                                        : input;
}

at::Tensor cast_output(const MixedPrecision& types, const at::Tensor& output) {
  return types.output_dtype ? cast_floating(output, *types.output_dtype) : output;
}

LowPrecisionParameters::LowPrecisionParameters(
    const std::vector<std::pair<std::string, at::Tensor>>& parameters, c10::ScalarType type)
    : type_(type), swaps_(std::make_shared<Swaps>()) {
  std::unordered_set<c10::TensorImpl*> seen;
  for (const auto& [name, parameter] : parameters) {
    if (!parameter.is_floating_point() || parameter.scalar_type() == type) continue;
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    auto swap = std::make_shared<Swap>();
    swap->name = name;
    swap->parameter = parameter;
    if (parameter.requires_grad())
      swap->accumulator = torch::autograd::impl::grad_accumulator(parameter);
    swaps_->all.push_back(std::move(swap));
  }
}

LowPrecisionParameters::~LowPrecisionParameters() {
  swap_out();
}

void LowPrecisionParameters::swap_in() {
  for (const auto& swap : swaps_->all) {
    const at::NoGradGuard no_grad;
    if (swap->master.defined()) {
      // Optimizers write through data(), which leaves a tensor's version as it was.
      const at::Tensor cast = swap->master.to(type_);
      TORCH_CHECK_VALUE(!cast.ne(swap->parameter).logical_and_(cast.eq(cast)).any().item<bool>(),
                        swap->name, " was changed while in ", c10::toString(type_),
                        ", after a forward without a backward: expected a backward, or forwards "
                        "without gradients, before an optimizer's step");
      continue;
    }
    const at::Tensor& parameter = swap->parameter;
    swap->master = parameter.detach();
    parameter.set_data(swap->master.to(type_));
    if (!swap->accumulator) continue;
    const auto cast = comm::make_node<CastBackward>(swap, swaps_);
    cast->set_next_edges({Edge(swap->accumulator, 0)});
    const uint32_t output = cast->add_input_metadata(parameter);
    torch::autograd::impl::set_gradient_edge(parameter, {cast, output});
  }
}

bool LowPrecisionParameters::is_swapped_in() const {
  return std::any_of(swaps_->all.begin(), swaps_->all.end(),
                     [](const auto& swap) { return swap->master.defined(); });
}

void LowPrecisionParameters::swap_out() {
  swaps_->swap_out();
}

}  // namespace cohort::parallel
