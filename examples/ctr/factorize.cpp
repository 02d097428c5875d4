// SPDX-License-Identifier: Apache-2.0
// Rows to the network's input and the factorization machine's value, and back.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>
#include <vector>

#include "examples/ctr/model.h"

namespace ctr {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Shape {
  size_t batch, numbers, slots, width;

  Shape(const at::Tensor& numbers_BN, const at::Tensor& rows_BSD)
      : batch(static_cast<size_t>(rows_BSD.size(0))),
        numbers(static_cast<size_t>(numbers_BN.size(1))),
        slots(static_cast<size_t>(rows_BSD.size(1))),
        width(static_cast<size_t>(rows_BSD.size(2))) {}
  size_t row_elements() const { return slots * width; }
};

// Element 0 is the linear model's weight; its products with others do not count.
float value_of(const float* row_SD, float* sum_D, const Shape& shape) {
  std::fill_n(sum_D, shape.width, 0.0f);
  float squares = 0;
  for (size_t slot = 0; slot < shape.slots; ++slot) {
    const float* row = row_SD + slot * shape.width;
    for (size_t i = 0; i < shape.width; ++i) sum_D[i] += row[i];
    for (size_t i = 1; i < shape.width; ++i) squares += row[i] * row[i];
  }
  float sum_squared = 0;
  for (size_t i = 1; i < shape.width; ++i) sum_squared += sum_D[i] * sum_D[i];
  return sum_D[0] + 0.5f * (sum_squared - squares);
}

struct Factorize : torch::autograd::Function<Factorize> {
  static variable_list forward(AutogradContext* context, const at::Tensor& numbers_BN,
                               const at::Tensor& rows_BSD) {
    const Shape shape(numbers_BN, rows_BSD);
    const auto row = static_cast<int64_t>(shape.numbers + shape.row_elements());
    at::Tensor x = at::empty({rows_BSD.size(0), row}, at::kFloat);
    at::Tensor values_B = at::empty({rows_BSD.size(0)}, at::kFloat);
    at::Tensor sums_BD = at::empty({rows_BSD.size(0), rows_BSD.size(2)}, at::kFloat);
    const float* numbers = numbers_BN.const_data_ptr<float>();
    const float* rows = rows_BSD.const_data_ptr<float>();
    float* out = x.mutable_data_ptr<float>();
    float* values = values_B.mutable_data_ptr<float>();
    float* sums = sums_BD.mutable_data_ptr<float>();
    for (size_t b = 0; b < shape.batch; ++b, rows += shape.row_elements()) {
      out = std::copy_n(numbers + b * shape.numbers, shape.numbers, out);
      out = std::copy_n(rows, shape.row_elements(), out);
      values[b] = value_of(rows, sums + b * shape.width, shape);
    }
    context->save_for_backward({numbers_BN, rows_BSD, sums_BD});
    return {x, values_B};
  }

  // d/dv_sf of the pairs is sum_f - v_sf; d/dw_s is 1.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor& rows_BSD = saved[1];
    const Shape shape(saved[0], rows_BSD);
    const at::Tensor x_gradient = gradients[0].contiguous();
    const at::Tensor value_gradient = gradients[1].contiguous();
    at::Tensor result_BSD = at::empty_like(rows_BSD);
    const float* of_x = x_gradient.const_data_ptr<float>();
    const float* of_value = value_gradient.const_data_ptr<float>();
    const float* rows = rows_BSD.const_data_ptr<float>();
    const float* sums = saved[2].const_data_ptr<float>();
    float* result = result_BSD.mutable_data_ptr<float>();
    for (size_t b = 0; b < shape.batch; ++b, sums += shape.width) {
      of_x += shape.numbers;
      for (size_t slot = 0; slot < shape.slots; ++slot) {
        result[0] = of_x[0] + of_value[b];
        for (size_t i = 1; i < shape.width; ++i) {
          result[i] = of_x[i] + of_value[b] * (sums[i] - rows[i]);
        }
        of_x += shape.width;
        rows += shape.width;
        result += shape.width;
      }
    }
    return {at::Tensor(), result_BSD};
  }
};

// The same in libtorch's operations, which other devices have, too.
std::pair<at::Tensor, at::Tensor> factorize_by_operations(const at::Tensor& numbers_BN,
                                                          const at::Tensor& rows_BSD) {
  const at::Tensor factors_BSF = rows_BSD.narrow(2, 1, rows_BSD.size(2) - 1);
  const at::Tensor sums_BF = factors_BSF.sum(1);
  return {at::cat({numbers_BN, rows_BSD.flatten(1)}, 1),
          rows_BSD.select(2, 0).sum(1) +
              0.5 * (sums_BF.square().sum(1) - factors_BSF.square().sum({1, 2}))};
}

}  // namespace

std::pair<at::Tensor, at::Tensor> factorize(const at::Tensor& numbers_BN,
                                            const at::Tensor& rows_BSD) {
  for (const at::Tensor& tensor : {numbers_BN, rows_BSD}) {
    TORCH_CHECK_VALUE(tensor.scalar_type() == at::kFloat, "factorize: expected float32, got ",
                      tensor.toString());
  }
  TORCH_CHECK_VALUE(
      numbers_BN.dim() == 2 && rows_BSD.dim() == 3 && numbers_BN.size(0) == rows_BSD.size(0),
      "factorize: expected [B, N] and [B, S, D], got ", numbers_BN.sizes(), " and ",
      rows_BSD.sizes());
  if (!rows_BSD.is_cpu()) return factorize_by_operations(numbers_BN, rows_BSD);
  const auto both = Factorize::apply(numbers_BN.contiguous(), rows_BSD.contiguous());
  return {both[0], both[1]};
}

}  // namespace ctr
