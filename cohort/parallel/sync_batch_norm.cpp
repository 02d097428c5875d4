// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/sync_batch_norm.h"

#include <ATen/ops/addcmul.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/batch_norm_native.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <algorithm>
#include <memory>
#include <optional>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>
#include <utility>
#include <vector>

#include "cohort/parallel/batch_statistics.h"
#include "cohort/parallel/saved_group.h"

namespace cohort::parallel {

BatchStatistics combined_statistics(const at::Tensor& local, const comm::ProcessGroup& group) {
  const int64_t channels = (local.numel() - 1) / 2;
  at::Tensor gathered = at::empty({group.size() * local.numel()}, local.options());
  group.all_gather_into(gathered, local);
  const at::Tensor all = gathered.view({group.size(), local.numel()});
  const at::Tensor means = all.narrow(1, 0, channels);
  const at::Tensor counts = all.narrow(1, 2 * channels, 1);
  BatchStatistics result;
  result.count = counts.sum(0);
  // Batches that are empty everywhere give 0 / 0, which the caller reports.
  result.mean = (means * counts).sum(0) / result.count;
  result.m2 =
      (all.narrow(1, channels, channels) + (means - result.mean).square_().mul_(counts)).sum(0);
  return result;
}

void update_running_statistics(at::Tensor running_mean, at::Tensor running_var,
                               const BatchStatistics& statistics, double momentum) {
  const auto mix = [momentum](at::Tensor& running, const at::Tensor& now) {
    running.copy_(running.to(at::kDouble).mul_(1 - momentum).add_(now, momentum));
  };
  mix(running_mean, statistics.mean);
  mix(running_var, statistics.m2 / (statistics.count - 1));
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = std::optional<at::Tensor>;

// A Function takes a tensor that may be undefined as an optional one.
MaybeTensor only_defined(const MaybeTensor& tensor) {
  return tensor && tensor->defined() ? tensor : std::nullopt;
}

// Of statistics and coefficients beside `input`: never of 16 bits, whatever the weight is.
at::ScalarType parameter_type(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor cast(const at::Tensor& maybe, at::ScalarType type) {
  return maybe.defined() ? maybe.to(type) : maybe;
}

// [mean | m2 | count] of this rank's batch, float64 [2 C + 1]; zeros if it is empty.
at::Tensor local_statistics(const at::Tensor& input) {
  const int64_t channels = input.size(1);
  const auto options = input.options().dtype(at::kDouble);
  if (input.numel() == 0) return at::zeros({2 * channels + 1}, options);
  at::Tensor type_mean;
  at::Tensor type_var;
  if (input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16) {
    // Their presence makes ATen return float32 statistics of a 16-bit input; momentum 0 leaves them
    // alone.
    type_mean = at::zeros({channels}, input.options().dtype(at::kFloat));
    type_var = at::ones({channels}, input.options().dtype(at::kFloat));
  }
  const auto [mean, variance] =
      at::batch_norm_update_stats(input, type_mean, type_var, /*momentum=*/0);
  const int64_t count = input.numel() / channels;
  return at::cat({mean.to(at::kDouble), variance.to(at::kDouble).mul_(count),
                  at::full({1}, static_cast<double>(count), options)});
}

void check_channels(const at::Tensor& input, int64_t channels) {
  TORCH_CHECK_VALUE(input.dim() >= 2 && input.size(1) == channels,
                    "batch normalisation: expected an input [B, ", channels, ", ...], got ",
                    input.sizes());
}

void check_count(const at::Tensor& input, const BatchStatistics& statistics) {
  // A rank with two values or more need not wait for the device to know; with fewer in all, every
  // rank asks.
  if (input.numel() / std::max<int64_t>(input.size(1), 1) > 1) return;
  const auto count = statistics.count.item<double>();
  TORCH_CHECK_VALUE(
      count > 1,
      "batch normalisation in training: expected more than one value per channel on all "
      "ranks together, got ",
      static_cast<int64_t>(count));
}

// input * scale + shift, per channel, in one pass.
at::Tensor affine(const at::Tensor& input, const at::Tensor& scale, const at::Tensor& shift) {
  return std::get<0>(at::native_batch_norm(input, scale, shift, at::zeros_like(scale),
                                           at::ones_like(scale),
                                           /*training=*/false, /*momentum=*/0, /*eps=*/0));
}

// A weight or bias beside running statistics of another type: a wrapper that computes in 16 bits
// casts parameters alone, and libtorch wants the two alike.
MaybeTensor as_statistics(const MaybeTensor& parameter, const MaybeTensor& running_mean) {
  if (!parameter || !parameter->defined() || !running_mean || !running_mean->defined())
    return parameter;
  return parameter->to(running_mean->scalar_type());
}

struct SyncBatchNormFunction : torch::autograd::Function<SyncBatchNormFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& any_input,
                            const MaybeTensor& maybe_weight, const MaybeTensor& maybe_bias,
                            const MaybeTensor& running_mean, const MaybeTensor& running_var,
                            double momentum, double eps, const comm::ProcessGroup& group) {
    const at::Tensor weight = maybe_weight.value_or(at::Tensor());
    const at::Tensor input = any_input.contiguous(any_input.suggest_memory_format());
    const BatchStatistics statistics = combined_statistics(local_statistics(input), group);
    check_count(input, statistics);
    if (running_mean) update_running_statistics(*running_mean, *running_var, statistics, momentum);
    const at::ScalarType type = parameter_type(input);
    const at::Tensor mean = statistics.mean.to(type);
    const at::Tensor variance = (statistics.m2 / statistics.count).to(type);
    context->save_for_backward({input, weight, mean, variance, statistics.count});
    context->saved_data["eps"] = eps;
    save_group(context, group);
    if (input.numel() == 0) return at::empty_like(input);
    const at::Tensor bias = maybe_bias.value_or(at::Tensor());
    return std::get<0>(at::native_batch_norm(input, cast(weight, type), cast(bias, type), mean,
                                             variance, /*training=*/false, /*momentum=*/0, eps));
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    TORCH_CHECK_VALUE(!at::GradMode::is_enabled(),
                      "synchronised batch normalisation has no second derivative");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& input = saved[0];
    const at::Tensor& weight = saved[1];
    const at::Tensor grad = grad_outputs[0].contiguous(input.suggest_memory_format());
    const double eps = context->saved_data["eps"].toDouble();
    const auto [grad_weight, grad_bias] = parameter_gradients(
        grad, input, cast(weight, saved[2].scalar_type()), saved[2], saved[3], eps);
    at::Tensor grad_input;
    if (context->needs_input_grad(0)) {
      at::Tensor sums = at::cat({grad_bias.to(at::kDouble), grad_weight.to(at::kDouble)});
      saved_group(context).all_reduce(sums);
      grad_input = input_gradient(grad, saved, sums.div_(saved[4]), eps);
    }
    const at::Tensor none;
    return {grad_input,
            weight.defined() ? grad_weight.to(weight.scalar_type()) : none,
            weight.defined() ? grad_bias.to(weight.scalar_type()) : none,
            none,
            none,
            none,
            none,
            none};
  }

  // This rank's sums of dy * normalised x, and of dy.
  static std::pair<at::Tensor, at::Tensor> parameter_gradients(
      const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
      const at::Tensor& mean, const at::Tensor& variance, double eps) {
    if (input.numel() == 0) return {at::zeros_like(mean), at::zeros_like(mean)};
    auto [unused, grad_weight, grad_bias] =
        at::native_batch_norm_backward(grad, input, weight, mean, variance, {}, {},
                                       /*train=*/false, eps, {false, true, true});
    return {std::move(grad_weight), std::move(grad_bias)};
  }

  // `means_2C`: means over the N values of dy, and of dy * normalised x.
  //   dx = weight * invstd * (dy - mean(dy) - (x - mean) * invstd * mean(dy * normalised x))
  // The terms are summed in at least float32 and rounded to the input's type once.
  static at::Tensor input_gradient(const at::Tensor& grad, const variable_list& saved,
                                   const at::Tensor& means_2C, double eps) {
    const at::Tensor& input = saved[0];
    const at::Tensor& weight = saved[1];
    if (input.numel() == 0) return at::empty_like(input);
    const int64_t channels = input.size(1);
    const at::Tensor invstd = (saved[3].to(at::kDouble) + eps).rsqrt_();
    const at::Tensor grad_scale = weight.defined() ? invstd * weight : invstd;
    const at::Tensor input_scale = -grad_scale * invstd * means_2C.narrow(0, channels, channels);
    const at::Tensor shift = -grad_scale * means_2C.narrow(0, 0, channels) - input_scale * saved[2];
    const at::ScalarType type = saved[2].scalar_type();
    std::vector<int64_t> per_channel(static_cast<size_t>(input.dim()), 1);
    per_channel[1] = channels;
    at::Tensor result = affine(input.to(type), input_scale.to(type), shift.to(type));
    result.addcmul_(grad.to(type), grad_scale.to(type).view(per_channel));
    return result.to(input.scalar_type());
  }
};

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options_,
                                     const comm::ProcessGroup& group)
    : options(options_) {
  synchronize_over(group);
  SyncBatchNormImpl::reset();
}

void SyncBatchNormImpl::reset() {
  const int64_t channels = options.num_features();
  const bool affine = options.affine();
  const bool tracks = options.track_running_stats();
  const at::Tensor none;
  weight = register_parameter("weight", affine ? at::ones({channels}) : none, affine);
  bias = register_parameter("bias", affine ? at::zeros({channels}) : none, affine);
  running_mean = register_buffer("running_mean", tracks ? at::zeros({channels}) : none);
  running_var = register_buffer("running_var", tracks ? at::ones({channels}) : none);
  num_batches_tracked =
      register_buffer("num_batches_tracked", tracks ? at::zeros({}, at::kLong) : none);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "cohort::parallel::SyncBatchNorm(" << options.num_features()
         << ", eps=" << options.eps() << ", momentum=";
  if (options.momentum()) {
    stream << *options.momentum();
  } else {
    stream << "cumulative";
  }
  stream << ", affine=" << options.affine()
         << ", track_running_stats=" << options.track_running_stats() << ", ranks=" << num_ranks_
         << ")";
}

// Returns the weight of the new batch in the running statistics.
double SyncBatchNormImpl::count_batch() {
  if (!is_training() || !options.track_running_stats()) return 0;
  num_batches_tracked += 1;
  if (options.momentum()) return *options.momentum();  // Without waiting for the device.
  return 1.0 / static_cast<double>(num_batches_tracked.item<int64_t>());
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  check_channels(input, options.num_features());
  const double momentum = count_batch();
  if (is_training() && num_ranks_ > 1) {
    return SyncBatchNormFunction::apply(input, only_defined(weight), only_defined(bias),
                                        only_defined(running_mean), only_defined(running_var),
                                        momentum, options.eps(), group_);
  }
  const bool of_batch = is_training() || !options.track_running_stats();
  TORCH_CHECK_VALUE(
      !is_training() || input.numel() / std::max<int64_t>(input.size(1), 1) > 1,
      "batch normalisation in training: expected more than one value per channel, got an input ",
      input.sizes());
  return at::batch_norm(input, as_statistics(weight, running_mean),
                        as_statistics(bias, running_mean), running_mean, running_var, of_batch,
                        momentum, options.eps(),
                        /*cudnn_enabled=*/true);
}

namespace {

// The conversion of a torch::nn::BatchNorm, kept by its running mean. libtorch has one such object
// for each tensor and calls it when a leaf's gradient is ready, which a buffer never has. to() and
// load() leave it where it is, and it ends with the tensor.
struct Conversion final : torch::autograd::PostAccumulateGradHook {
  Conversion(comm::ProcessGroup g, std::weak_ptr<torch::nn::Module> module)
      : group(std::move(g)), untracked(std::move(module)) {}
  void operator()(const at::Tensor&) override {}

  const comm::ProcessGroup group;
  // The module, if it has no running statistics: then the tensor is there for this object alone.
  const std::weak_ptr<torch::nn::Module> untracked;
};

// nullptr: not converted.
const Conversion* conversion_of(const std::optional<at::Tensor>& running_mean) {
  namespace impl = torch::autograd::impl;
  if (!running_mean || !running_mean->defined() || !impl::get_autograd_meta(*running_mean))
    return nullptr;
  return dynamic_cast<const Conversion*>(impl::post_acc_grad_hooks(*running_mean).get());
}

// aten::batch_norm of the whole process.
at::Tensor batch_norm(const at::Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                      const MaybeTensor& running_mean, const MaybeTensor& running_var,
                      bool training, double momentum, double eps, bool cudnn_enabled) {
  const Conversion* conversion = conversion_of(running_mean);
  if (conversion == nullptr)
    return at::native::batch_norm(input, weight, bias, running_mean, running_var, training,
                                  momentum, eps, cudnn_enabled);
  const bool tracked = running_var && running_var->defined();
  const MaybeTensor mean = tracked ? running_mean : std::nullopt;
  // Without running statistics `training` is always set.
  const auto module = conversion->untracked.lock();
  const bool in_training = training && (tracked || (module && module->is_training()));
  if (!in_training || conversion->group.size() == 1)
    return at::native::batch_norm(input, as_statistics(weight, mean), as_statistics(bias, mean),
                                  mean, running_var, training, momentum, eps, cudnn_enabled);
  check_channels(input, running_mean->numel());
  return SyncBatchNormFunction::apply(input, only_defined(weight), only_defined(bias), mean,
                                      only_defined(running_var), momentum, eps, conversion->group);
}

// Takes the place of libtorch's kernel, which warns of that.
const torch::Library kKernel = [] {
  struct : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CompositeImplicitAutograd,
                         __FILE__, __LINE__);
  library.impl("batch_norm", TORCH_FN(batch_norm));
  return library;
}();

}  // namespace

const comm::ProcessGroup* batch_norm_group(const std::optional<at::Tensor>& running_mean) {
  const Conversion* conversion = conversion_of(running_mean);
  return conversion == nullptr ? nullptr : &conversion->group;
}

namespace {

template <class Impl>
void convert(torch::nn::Module& module, const comm::ProcessGroup& group) {
  auto* norm = module.as<Impl>();
  if (norm == nullptr) return;
  const bool tracked = norm->options.track_running_stats();
  TORCH_CHECK_VALUE(tracked || !module.weak_from_this().expired(),
                    "convert_sync_batchnorm: expected a batch normalisation without running "
                    "statistics to be held by a shared_ptr, as module holders do");
  if (!tracked) norm->running_mean = at::empty({norm->options.num_features()});
  torch::autograd::impl::set_post_acc_grad_hooks(
      norm->running_mean,
      std::make_unique<Conversion>(
          group, tracked ? std::weak_ptr<torch::nn::Module>() : module.weak_from_this()));
}

}  // namespace

void convert_sync_batchnorm(torch::nn::Module& module, const comm::ProcessGroup& group) {
  module.apply([&group](torch::nn::Module& each) {
    if (auto* own = each.as<SyncBatchNormImpl>()) own->synchronize_over(group);
    convert<torch::nn::BatchNorm1dImpl>(each, group);
    convert<torch::nn::BatchNorm2dImpl>(each, group);
    convert<torch::nn::BatchNorm3dImpl>(each, group);
  });
}

}  // namespace cohort::parallel
