#include "cohort/parallel/sync_batch_norm.h"

#include <ATen/ops/addcmul.h>
#include <ATen/ops/batch_norm.h>
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
#include <map>
#include <optional>
#include <set>
#include <string>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/container/sequential.h>
#include <utility>
#include <vector>

#include "cohort/parallel/saved_group.h"

namespace cohort::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Over all ranks, per channel, float64.
struct Statistics {
  at::Tensor count;  // [1]
  at::Tensor mean;   // [C]
  at::Tensor m2;     // [C], sum of squared differences from the mean
};

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

Statistics combined_statistics(const at::Tensor& local, const comm::ProcessGroup& group) {
  const int64_t channels = (local.numel() - 1) / 2;
  at::Tensor gathered = at::empty({group.size() * local.numel()}, local.options());
  group.all_gather_into(gathered, local);
  const at::Tensor all = gathered.view({group.size(), local.numel()});
  const at::Tensor means = all.narrow(1, 0, channels);
  const at::Tensor counts = all.narrow(1, 2 * channels, 1);
  Statistics result;
  result.count = counts.sum(0);
  // Batches that are empty everywhere give 0 / 0, which the caller reports.
  result.mean = (means * counts).sum(0) / result.count;
  result.m2 =
      (all.narrow(1, channels, channels) + (means - result.mean).square_().mul_(counts)).sum(0);
  return result;
}

void check_count(const at::Tensor& input, const Statistics& statistics) {
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

void update_running(at::Tensor running_mean, at::Tensor running_var, const Statistics& statistics,
                    double momentum) {
  const auto mix = [momentum](at::Tensor& running, const at::Tensor& now) {
    running.copy_(running.to(at::kDouble).mul_(1 - momentum).add_(now, momentum));
  };
  mix(running_mean, statistics.mean);
  mix(running_var, statistics.m2 / (statistics.count - 1));
}

// input * scale + shift, per channel, in one pass.
at::Tensor affine(const at::Tensor& input, const at::Tensor& scale, const at::Tensor& shift) {
  return std::get<0>(at::native_batch_norm(input, scale, shift, at::zeros_like(scale),
                                           at::ones_like(scale),
                                           /*training=*/false, /*momentum=*/0, /*eps=*/0));
}

struct SyncBatchNormFunction : torch::autograd::Function<SyncBatchNormFunction> {
  // A Function takes a tensor that may be undefined as an optional one.
  using MaybeTensor = std::optional<at::Tensor>;

  static at::Tensor forward(AutogradContext* context, const at::Tensor& any_input,
                            const MaybeTensor& maybe_weight, const MaybeTensor& maybe_bias,
                            const MaybeTensor& running_mean, const MaybeTensor& running_var,
                            double momentum, double eps, const comm::ProcessGroup& group) {
    const at::Tensor weight = maybe_weight.value_or(at::Tensor());
    const at::Tensor input = any_input.contiguous(any_input.suggest_memory_format());
    const Statistics statistics = combined_statistics(local_statistics(input), group);
    check_count(input, statistics);
    if (running_mean) update_running(*running_mean, *running_var, statistics, momentum);
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

BatchNormImpl::Tensors fresh_tensors(const torch::nn::BatchNormOptions& options) {
  BatchNormImpl::Tensors tensors;
  const int64_t channels = options.num_features();
  if (options.affine()) {
    tensors.weight = at::ones({channels}).requires_grad_();
    tensors.bias = at::zeros({channels}).requires_grad_();
  }
  if (options.track_running_stats()) {
    tensors.running_mean = at::zeros({channels});
    tensors.running_var = at::ones({channels});
    tensors.num_batches_tracked = at::zeros({}, at::kLong);
  }
  return tensors;
}

}  // namespace

BatchNormImpl::BatchNormImpl(const torch::nn::BatchNormOptions& options_,
                             const comm::ProcessGroup& group)
    : BatchNormImpl(options_, fresh_tensors(options_), group) {}

BatchNormImpl::BatchNormImpl(const torch::nn::BatchNormOptions& options_, const Tensors& tensors,
                             const comm::ProcessGroup& group)
    : options(options_) {
  if (group) synchronize_over(group);
  register_tensors(tensors);
}

void BatchNormImpl::register_tensors(const Tensors& tensors) {
  const auto parameter = [this](const char* name, const at::Tensor& tensor) {
    return register_parameter(name, tensor, tensor.defined() && tensor.requires_grad());
  };
  weight = parameter("weight", tensors.weight);
  bias = parameter("bias", tensors.bias);
  running_mean = register_buffer("running_mean", tensors.running_mean);
  running_var = register_buffer("running_var", tensors.running_var);
  num_batches_tracked = register_buffer("num_batches_tracked", tensors.num_batches_tracked);
}

void BatchNormImpl::reset() {
  register_tensors(fresh_tensors(options));
}

void BatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "cohort::parallel::BatchNorm(" << options.num_features()
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
double BatchNormImpl::count_batch() {
  if (!is_training() || !options.track_running_stats()) return 0;
  num_batches_tracked += 1;
  return options.momentum().value_or(1.0 /
                                     static_cast<double>(num_batches_tracked.item<int64_t>()));
}

at::Tensor BatchNormImpl::forward(const at::Tensor& input) {
  TORCH_CHECK_VALUE(input.dim() >= 2 && input.size(1) == options.num_features(),
                    "batch normalisation: expected an input [B, ", options.num_features(),
                    ", ...], got ", input.sizes());
  const double momentum = count_batch();
  if (is_training() && num_ranks_ > 1) {
    const auto maybe = [](const at::Tensor& tensor) {
      return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
    };
    return SyncBatchNormFunction::apply(input, maybe(weight), maybe(bias), maybe(running_mean),
                                        maybe(running_var), momentum, options.eps(), group_);
  }
  const bool of_batch = is_training() || !options.track_running_stats();
  TORCH_CHECK_VALUE(
      !is_training() || input.numel() / std::max<int64_t>(input.size(1), 1) > 1,
      "batch normalisation in training: expected more than one value per channel, got an input ",
      input.sizes());
  return at::batch_norm(input, weight, bias, running_mean, running_var, of_batch, momentum,
                        options.eps(),
                        /*cudnn_enabled=*/true);
}

namespace {

using ModulePtr = std::shared_ptr<torch::nn::Module>;

template <class Impl>
std::shared_ptr<BatchNormImpl> convert_one(torch::nn::Module& module,
                                           const comm::ProcessGroup& group) {
  auto* found = module.as<Impl>();
  if (found == nullptr) return nullptr;
  const BatchNormImpl::Tensors tensors{found->weight, found->bias, found->running_mean,
                                       found->running_var, found->num_batches_tracked};
  auto result = std::make_shared<BatchNormImpl>(found->options, tensors, group);
  result->train(found->is_training());
  return result;
}

// nullptr if `module` is none of libtorch's batch normalisations.
std::shared_ptr<BatchNormImpl> convert_any(torch::nn::Module& module,
                                           const comm::ProcessGroup& group) {
  if (auto result = convert_one<torch::nn::BatchNorm1dImpl>(module, group)) return result;
  if (auto result = convert_one<torch::nn::BatchNorm2dImpl>(module, group)) return result;
  return convert_one<torch::nn::BatchNorm3dImpl>(module, group);
}

// What is to be done, found before anything is changed.
struct Conversion {
  const comm::ProcessGroup& group;
  std::map<const torch::nn::Module*, std::shared_ptr<BatchNormImpl>>
      replacements;  // one each, however often it occurs
  std::vector<std::pair<torch::nn::SequentialImpl*, size_t>> elements;
  std::vector<BatchNormImpl*> own;
  std::set<const torch::nn::Module*> seen;
  std::string refused;

  void visit(const std::string& name, torch::nn::Module& module, torch::nn::SequentialImpl* parent,
             size_t position) {
    if (auto* ours = module.as<BatchNormImpl>()) own.push_back(ours);
    if (auto converted = convert_any(module, group)) {
      if (parent != nullptr) {
        replacements.emplace(&module, std::move(converted));
        elements.emplace_back(parent, position);
      } else {
        refused += (refused.empty() ? "" : ", ") +
                   (name.empty() ? std::string("the module itself") : name);
      }
    }
    if (!seen.insert(&module).second) return;
    auto* sequential = module.as<torch::nn::SequentialImpl>();
    size_t index = 0;
    for (const auto& child : module.named_children()) {
      visit(name.empty() ? child.key() : name + "." + child.key(), *child.value(), sequential,
            index++);
    }
  }
};

void replace_element(torch::nn::SequentialImpl& sequential, size_t position,
                     const std::shared_ptr<BatchNormImpl>& replacement) {
  const std::string key = sequential.named_children()[position].key();
  *(sequential.begin() + static_cast<std::ptrdiff_t>(position)) = torch::nn::AnyModule(replacement);
  sequential.replace_module(key, replacement);
}

}  // namespace

void convert_sync_batchnorm(torch::nn::Module& module, const comm::ProcessGroup& group) {
  Conversion plan{
      .group = group, .replacements = {}, .elements = {}, .own = {}, .seen = {}, .refused = {}};
  plan.visit("", module, nullptr, 0);
  TORCH_CHECK_VALUE(plan.refused.empty(),
                    "convert_sync_batchnorm can replace elements of a Sequential only: write "
                    "cohort::parallel::BatchNorm instead of torch::nn::BatchNorm for ",
                    plan.refused);
  for (BatchNormImpl* own : plan.own) own->synchronize_over(group);
  for (const auto& [sequential, position] : plan.elements) {
    replace_element(*sequential, position, plan.replacements.at(sequential->ptr(position).get()));
  }
}

}  // namespace cohort::parallel
