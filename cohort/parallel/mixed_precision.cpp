#include "cohort/parallel/mixed_precision.h"

#include <ATen/ops/empty_strided.h>
#include <algorithm>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/variable.h>
#include <unordered_set>
#include <utility>

namespace cohort::parallel {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

struct LentParameters::Loan {
  at::Tensor parameter;
  std::shared_ptr<Node> accumulator;  // the master's; none for a frozen parameter
  at::Tensor master;                  // defined while the parameter is lent

  void give_back() {
    if (!master.defined()) return;
    const at::NoGradGuard no_grad;
    if (accumulator) torch::autograd::impl::set_gradient_edge(parameter, Edge());
    parameter.set_data(master);
    // set_data forgets the accumulator of another type, and with it the hooks that hang there.
    if (accumulator) torch::autograd::impl::set_grad_accumulator(parameter, accumulator);
    master.reset();
  }
};

struct LentParameters::Loans {
  std::vector<std::shared_ptr<Loan>> all;
  bool end_awaited = false;  // a backward runs and will call give_back when it ends

  void give_back() {
    end_awaited = false;
    for (const auto& loan : all) loan->give_back();
  }
};

class LentParameters::CastBackward : public Node {
 public:
  CastBackward(std::shared_ptr<Loan> loan, std::weak_ptr<Loans> all)
      : loan_(std::move(loan)), all_(std::move(all)) {}

  variable_list apply(variable_list&& gradients) override {
    // Frozen parameters are consumed by what has still to run: they wait for the end.
    if (const auto all = all_.lock(); all && !std::exchange(all->end_awaited, true)) {
      torch::autograd::Engine::get_default_engine().queue_callback([weak = all_] {
        if (const auto loans = weak.lock()) loans->give_back();
      });
    }
    loan_->give_back();
    const at::Tensor& gradient = gradients[0];
    const at::Tensor& to = loan_->parameter;
    if (!gradient.defined() || gradient.scalar_type() == to.scalar_type())
      return std::move(gradients);
    if (gradient.is_sparse()) return {gradient.to(to.scalar_type())};
    // In the parameter's own layout, so that the accumulator keeps this tensor instead of a copy.
    at::Tensor cast =
        at::empty_strided(to.sizes(), to.strides(), to.options().requires_grad(false));
    return {cast.copy_(gradient)};
  }

 private:
  std::shared_ptr<Loan> loan_;
  std::weak_ptr<Loans> all_;
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

LentParameters::LentParameters(const std::vector<at::Tensor>& parameters, c10::ScalarType type)
    : type_(type), loans_(std::make_shared<Loans>()) {
  std::unordered_set<c10::TensorImpl*> seen;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.is_floating_point() || parameter.scalar_type() == type) continue;
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    auto loan = std::make_shared<Loan>();
    loan->parameter = parameter;
    if (parameter.requires_grad())
      loan->accumulator = torch::autograd::impl::grad_accumulator(parameter);
    loans_->all.push_back(std::move(loan));
  }
}

LentParameters::~LentParameters() {
  restore();
}

void LentParameters::lend() {
  for (const auto& loan : loans_->all) {
    if (loan->master.defined()) continue;
    const at::NoGradGuard no_grad;
    const at::Tensor& parameter = loan->parameter;
    loan->master = parameter.detach();
    parameter.set_data(loan->master.to(type_));
    if (!loan->accumulator) continue;
    const auto cast = std::make_shared<CastBackward>(loan, loans_);
    cast->set_next_edges({Edge(loan->accumulator, 0)});
    const uint32_t output = cast->add_input_metadata(parameter);
    torch::autograd::impl::set_gradient_edge(parameter, {cast, output});
  }
}

bool LentParameters::is_lent() const {
  return std::any_of(loans_->all.begin(), loans_->all.end(),
                     [](const auto& loan) { return loan->master.defined(); });
}

void LentParameters::restore() {
  loans_->give_back();
}

}  // namespace cohort::parallel
