// SPDX-License-Identifier: Apache-2.0
#include "examples/ctr/linear_relu.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <optional>
#include <string_view>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

namespace ctr {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// x W^T (+ b). libtorch has it for compiled models and gives it no C++ name.
at::Tensor product(const at::Tensor& x, const at::Tensor& weight,
                   const std::optional<at::Tensor>& bias = std::nullopt,
                   std::string_view activation = "none") {
  using Linear = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                            std::string_view, c10::List<std::optional<at::Scalar>>,
                            std::optional<std::string_view>);
  static const auto linear = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                                 .typed<Linear>();
  return linear.call(x, weight, bias, activation, c10::List<std::optional<at::Scalar>>(),
                     std::nullopt);
}

class LinearRelu : public torch::autograd::Function<LinearRelu> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_BI,
                            const at::Tensor& weight_OI, const at::Tensor& bias_O) {
    at::Tensor y_BO = product(x_BI, weight_OI, bias_O, "relu");
    context->save_for_backward({x_BI, weight_OI, y_BO});
    return y_BO;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &x_BI = saved[0], &weight_OI = saved[1], &y_BO = saved[2];
    const at::Tensor of_sum_BO = at::threshold_backward(gradients[0], y_BO, 0);
    at::Tensor of_x_BI;
    if (context->needs_input_grad(0)) of_x_BI = product(of_sum_BO, weight_OI.t());
    return {of_x_BI, product(of_sum_BO.t(), x_BI.t()), of_sum_BO.sum(0)};
  }
};

}  // namespace

bool prefers_linear_relu() {
  return __builtin_cpu_supports("avx512f") && !__builtin_cpu_is("intel") &&
         at::globalContext().hasMKLDNN() && at::globalContext().userEnabledMkldnn();
}

at::Tensor linear_relu(const at::Tensor& x_BI, const at::Tensor& weight_OI,
                       const at::Tensor& bias_O) {
  return LinearRelu::apply(x_BI, weight_OI, bias_O);
}

}  // namespace ctr
