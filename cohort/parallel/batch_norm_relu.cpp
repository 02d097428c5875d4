// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/batch_norm_relu.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <algorithm>
#include <torch/csrc/autograd/custom_function.h>

#include "cohort/base/instruction_set.h"
#include "cohort/parallel/batch_norm_loops.h"
#include "cohort/parallel/batch_statistics.h"
#include "cohort/parallel/saved_group.h"

namespace cohort::parallel {

// One for each instruction set, by batch_norm_loops.cpp.
namespace batch_norm {
extern const BatchNormLoops avx512;
extern const BatchNormLoops avx2;
extern const BatchNormLoops sse2;
}  // namespace batch_norm

namespace {

const BatchNormLoops*& in_use() {
  static const BatchNormLoops* loops = supported_batch_norm_loops()[0];
  return loops;
}

}  // namespace

const BatchNormLoops* const* supported_batch_norm_loops() {
  static const BatchNormLoops* const all[] = {&batch_norm::avx512, &batch_norm::avx2,
                                              &batch_norm::sse2, nullptr};
  const InstructionSet has = instruction_set();
  return all + (has == InstructionSet::kAvx512 ? 0 : has == InstructionSet::kAvx2 ? 1 : 2);
}

const BatchNormLoops& batch_norm_loops() {
  return *in_use();
}

void use_batch_norm_loops(const BatchNormLoops& loops) {
  in_use() = &loops;
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = std::optional<at::Tensor>;

constexpr auto kChannelsLast = at::MemoryFormat::ChannelsLast;

// [B, C, H, W] as rows of channels.
struct Rows {
  explicit Rows(const at::Tensor& x) : channels(x.size(1)), count(x.numel() / channels) {}
  int64_t channels, count;
};

// Calls body(loops of x's type, typed null pointer).
template <class Body>
void for_type(const at::Tensor& x, const Body& body) {
  if (x.scalar_type() == at::kFloat) {
    body(batch_norm_loops().f32, static_cast<float*>(nullptr));
  } else {
    body(batch_norm_loops().bf16, static_cast<BFloat16Rows*>(nullptr));
  }
}

// From element `first` on; null for an undefined tensor.
template <class T>
T* data(const at::Tensor& tensor, int64_t first = 0) {
  return tensor.defined() ? static_cast<T*>(tensor.data_ptr()) + first : nullptr;
}

template <class Body>
void for_rows(const Rows& rows, const Body& body) {
  constexpr int64_t kElementsOfATask = 32768;
  at::parallel_for(0, rows.count, 1 + kElementsOfATask / rows.channels,
                   [&](int64_t begin, int64_t end) { body(begin * rows.channels, end - begin); });
}

// Returns float64 [2, C], the sums of what body(first element, rows, sums of a part) adds. The number of threads changes
// neither the parts nor the order in which they are summed.
template <class Body>
at::Tensor sums_over(const Rows& rows, const Body& body) {
  constexpr int64_t kParts = 32, kLeast = 64;
  const int64_t each = std::max(kLeast, (rows.count + kParts - 1) / kParts);
  const int64_t parts = (rows.count + each - 1) / each;
  const at::Tensor sums = at::zeros({parts, 2, rows.channels}, at::kDouble);
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      body(part * each * rows.channels, std::min(each, rows.count - part * each),
           data<double>(sums[part]));
    }
  });
  at::Tensor total = sums[0];
  for (int64_t part = 1; part < parts; ++part) total.add_(sums[part]);
  return total;
}

// [mean | m2 | count] of this rank's batch. Sums are of differences from an estimate of the mean, the mean of rows from all over
// the batch, so that they hardly cancel.
at::Tensor statistics_of_rows(const at::Tensor& x) {
  const Rows rows(x);
  const int64_t samples = std::min<int64_t>(64, rows.count);
  const at::Tensor zeros = at::zeros({rows.channels}, at::kFloat);
  const at::Tensor sample_sums = at::zeros({2, rows.channels}, at::kDouble);
  at::Tensor sums, shift;
  for_type(x, [&]<class T>(const BatchNormLoopsOf<T>& loops, T*) {
    for (int64_t i = 0; i < samples; ++i) {
      const int64_t row = i * rows.count / samples;
      loops.statistics(data<T>(x, row * rows.channels), 1, rows.channels, data<float>(zeros),
                       data<double>(sample_sums));
    }
    shift = (sample_sums[0] / samples).to(at::kFloat);
    sums = sums_over(rows, [&](int64_t begin, int64_t count, double* part) {
      loops.statistics(data<T>(x, begin), count, rows.channels, data<float>(shift), part);
    });
  });
  const at::Tensor difference = sums[0] / rows.count;
  return at::cat({shift + difference, (sums[1] - sums[0] * difference).clamp_min_(0),
                  at::full({1}, static_cast<double>(rows.count), at::kDouble)});
}

BatchStatistics statistics_of(const at::Tensor& x, const comm::ProcessGroup& group) {
  const at::Tensor local = statistics_of_rows(x);
  if (group) return combined_statistics(local, group);
  const int64_t channels = x.size(1);
  return {.count = local.narrow(0, 2 * channels, 1),
          .mean = local.narrow(0, 0, channels),
          .m2 = local.narrow(0, channels, channels)};
}

struct BatchNormRelu : torch::autograd::Function<BatchNormRelu> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const MaybeTensor& maybe_residual, const at::Tensor& weight,
                            const at::Tensor& bias, const at::Tensor& running_mean,
                            const at::Tensor& running_var, double momentum, double eps,
                            const comm::ProcessGroup& group) {
    RECORD_USER_SCOPE("batch_norm_relu");
    const at::Tensor residual = maybe_residual.value_or(at::Tensor());
    const BatchStatistics statistics = statistics_of(x, group);
    update_running_statistics(running_mean, running_var, statistics, momentum);
    const at::Tensor invstd = (statistics.m2 / statistics.count).add_(eps).rsqrt_();
    const at::Tensor mean = statistics.mean.to(at::kFloat);
    const at::Tensor scale = (invstd * weight).to(at::kFloat), shift = bias.contiguous();
    const at::Tensor out = at::empty_like(x);
    for_type(x, [&]<class T>(const BatchNormLoopsOf<T>& loops, T*) {
      for_rows(Rows(x), [&](int64_t begin, int64_t count) {
        loops.forward(data<T>(x, begin), data<T>(residual, begin), count, x.size(1),
                      data<float>(mean), data<float>(scale), data<float>(shift),
                      data<T>(out, begin));
      });
    });
    context->save_for_backward({x, out, weight, mean, invstd, statistics.count});
    context->saved_data["has_residual"] = residual.defined();
    if (group) save_group(context, group);
    return out;
  }

  // With h = (x - mean) * invstd, g the gradient behind the ReLU, and N values of a channel:
  //   grad_x = weight * invstd * (g - sum(g) / N - h * sum(g * h) / N)
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    TORCH_CHECK_VALUE(!at::GradMode::is_enabled(),
                      "batch_norm_relu has no second derivative: expected backward without "
                      "create_graph");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[2], &invstd = saved[4];
    const at::Tensor grad = grads[0].contiguous(kChannelsLast);
    variable_list results(9);
    if (context->saved_data["has_residual"].toBool() && context->needs_input_grad(1))
      results[1] = at::empty_like(x);
    at::Tensor sums = sums_of_gradients(grad, saved, results[1]);
    sums[1].mul_(invstd);
    results[2] = sums[1].to(weight.scalar_type());
    results[3] = sums[0].to(weight.scalar_type());
    if (!context->needs_input_grad(0)) return results;
    // SyncBatchNorm's message, for ranks that do not fuse.
    at::Tensor message = sums.view({-1});
    if (context->saved_data.count("group") != 0) saved_group(context).all_reduce(message);
    results[0] = input_gradient(grad, saved, results[1], sums.div_(saved[5]));
    return results;
  }

 private:
  // Float64 [2, C]: of g, and of g * (x - mean). Writes g to `masked`, if it is defined.
  static at::Tensor sums_of_gradients(const at::Tensor& grad, const variable_list& saved,
                                      const at::Tensor& masked) {
    const at::Tensor &x = saved[0], &out = saved[1], &mean = saved[3];
    at::Tensor sums;
    for_type(x, [&]<class T>(const BatchNormLoopsOf<T>& loops, T*) {
      sums = sums_over(Rows(x), [&](int64_t begin, int64_t count, double* part) {
        loops.backward_sums(data<T>(grad, begin), data<T>(out, begin), data<T>(x, begin), count,
                            x.size(1), data<float>(mean), data<T>(masked, begin), part);
      });
    });
    return sums;
  }

  // `means`: [2, C], of g and of g * h.
  static at::Tensor input_gradient(const at::Tensor& grad, const variable_list& saved,
                                   const at::Tensor& masked, const at::Tensor& means) {
    const at::Tensor &x = saved[0], &mean = saved[3], &invstd = saved[4];
    const at::Tensor factor = invstd * saved[2];
    const at::Tensor scale = factor.to(at::kFloat);
    const at::Tensor slope = (-factor * invstd * means[1]).to(at::kFloat);
    const at::Tensor offset = (-factor * means[0]).to(at::kFloat);
    // What is masked already is read in place of two tensors.
    const at::Tensor g = masked.defined() ? masked : grad;
    const at::Tensor mask = masked.defined() ? at::Tensor() : saved[1];
    at::Tensor result = at::empty_like(x);
    for_type(x, [&]<class T>(const BatchNormLoopsOf<T>& loops, T*) {
      for_rows(Rows(x), [&](int64_t begin, int64_t count) {
        loops.backward(data<T>(g, begin), data<T>(mask, begin), data<T>(x, begin), count, x.size(1),
                       data<float>(mean), data<float>(scale), data<float>(slope),
                       data<float>(offset), data<T>(result, begin));
      });
    });
    return result;
  }
};

bool is_fused(const torch::nn::BatchNorm2d& norm, const at::Tensor& x, const at::Tensor& residual) {
  const auto is_per_channel = [&norm](const at::Tensor& tensor) {
    return tensor.defined() && tensor.is_cpu() && tensor.scalar_type() == at::kFloat &&
           tensor.sizes() == at::IntArrayRef({norm->options.num_features()});
  };
  const auto is_rows = [&x](const at::Tensor& tensor) {
    return tensor.is_cpu() && tensor.scalar_type() == x.scalar_type() &&
           tensor.sizes() == x.sizes() && tensor.is_contiguous(kChannelsLast) &&
           // With one pixel both formats have the same order in memory, and strides alone tell
           // which of them the caller has chosen.
           tensor.suggest_memory_format() == kChannelsLast;
  };
  return norm->is_training() && norm->options.momentum() && norm->options.track_running_stats() &&
         norm->num_batches_tracked.defined() && is_per_channel(norm->weight) &&
         is_per_channel(norm->bias) && is_per_channel(norm->running_mean) &&
         is_per_channel(norm->running_var) && x.dim() == 4 &&
         x.size(1) == norm->options.num_features() &&
         // One value of a channel is refused by libtorch's forward.
         x.numel() > x.size(1) &&
         (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16) && is_rows(x) &&
         (!residual.defined() || is_rows(residual));
}

}  // namespace

at::Tensor batch_norm_relu(torch::nn::BatchNorm2d& norm, const at::Tensor& x,
                           const at::Tensor& residual) {
  if (!is_fused(norm, x, residual)) {
    at::Tensor y = norm->forward(x);
    if (residual.defined()) y.add_(residual);
    return y.relu_();
  }
  norm->num_batches_tracked += 1;
  const comm::ProcessGroup* group = batch_norm_group(norm->running_mean);
  return BatchNormRelu::apply(
      x, residual.defined() ? MaybeTensor(residual) : std::nullopt, norm->weight, norm->bias,
      norm->running_mean, norm->running_var, *norm->options.momentum(), norm->options.eps(),
      group != nullptr && group->size() > 1 ? *group : comm::ProcessGroup());
}

}  // namespace cohort::parallel
