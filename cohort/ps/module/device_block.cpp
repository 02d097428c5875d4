// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/module/device_block.h"

#include <cmath>
#include <torch/types.h>
#include <vector>

namespace cohort::ps {

namespace {

std::span<const float> floats_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<float>(), static_cast<size_t>(tensor.numel())};
}

at::Tensor copy_of(std::span<const float> values, const c10::Device& device) {
  return at::from_blob(const_cast<float*>(values.data()), {static_cast<int64_t>(values.size())},
                       at::kFloat)
      .to(device, at::kFloat, /*non_blocking=*/false, /*copy=*/true);
}

class DeviceBlock final : public BlockStore {
 public:
  DeviceBlock(const RuleOptions& rule, int64_t elements, const c10::Device& device)
      : rule_(rule), elements_(elements), device_(device) {
    TORCH_CHECK_VALUE(rule.rule != Rule::kRowwiseAdagrad,
                      "dense parameters on a device: rowwise_adagrad is a rule of rows");
    weights_ = at::zeros({elements}, at::TensorOptions(device).dtype(at::kFloat));
    std::vector<float> state(static_cast<size_t>(state_width(rule.rule, elements)));
    initialise_state(rule, state);
    set_state(state);
  }

  std::span<const float> weights() const override {
    if (!host_weights_.defined()) host_weights_ = weights_.to(at::kCPU).contiguous();
    return floats_of(host_weights_);
  }
  std::span<const float> state() const override {
    if (!host_state_.defined()) host_state_ = state_.to(at::kCPU).contiguous();
    return floats_of(host_state_);
  }
  void set_weights(std::span<const float> weights) override {
    host_weights_ = at::Tensor();
    weights_ = copy_of(weights, device_);
  }
  void set_state(std::span<const float> state) override {
    host_state_ = at::Tensor();
    state_ = copy_of(state, device_);
  }

  void update(int64_t step, std::span<const float> gradient) override {
    const at::NoGradGuard no_grad;
    host_weights_ = at::Tensor();
    host_state_ = at::Tensor();
    at::Tensor g = copy_of(gradient, device_);
    if (rule_.clip_value > 0) g.clamp_(-rule_.clip_value, rule_.clip_value);
    if (rule_.clip_norm > 0) {
      const double norm = std::sqrt(g.to(at::kDouble).square_().sum().item<double>());
      if (norm > rule_.clip_norm) g.mul_(rule_.clip_norm / norm);
    }
    apply(static_cast<double>(rule_.learning_rate) * rule_.schedule.factor(step), g);
  }

 private:
  // The n-th kind of state, one number an element; some rules have numbers for the whole before.
  at::Tensor part(int64_t n) const {
    return state_.narrow(0, state_width(rule_.rule, 0) + n * elements_, elements_);
  }

  void apply(double rate, const at::Tensor& g) {
    switch (rule_.rule) {
      case Rule::kAdd:
        weights_.add_(g);
        break;
      case Rule::kSgd:
        weights_.sub_(g, rate);
        break;
      case Rule::kMomentum:
        part(0).mul_(rule_.momentum).add_(g);
        weights_.sub_(part(0), rate);
        break;
      case Rule::kAdagrad:
        part(0).addcmul_(g, g);
        weights_.sub_(g / (part(0).sqrt() + rule_.eps), rate);
        break;
      case Rule::kAdam:
        adam(rate, g);
        break;
      case Rule::kFtrl:
        ftrl(rate, g);
        break;
      case Rule::kRowwiseAdagrad:
        break;  // Refused by the constructor.
    }
  }

  void adam(double rate, const at::Tensor& g) {
    state_.narrow(0, 0, 1).add_(1);
    const double count = state_.narrow(0, 0, 1).item<double>();
    const double correction1 = 1 - std::pow(static_cast<double>(rule_.beta1), count);
    const double correction2 = 1 - std::pow(static_cast<double>(rule_.beta2), count);
    at::Tensor m = part(0), v = part(1);
    m.mul_(rule_.beta1).add_(g, 1 - rule_.beta1);
    v.mul_(rule_.beta2).addcmul_(g, g, 1 - rule_.beta2);
    weights_.sub_(m / (v.sqrt() / std::sqrt(correction2) + rule_.eps), rate / correction1);
  }

  void ftrl(double rate, const at::Tensor& g) {
    at::Tensor z = part(0), n = part(1);
    const at::Tensor before = n.sqrt();
    n.addcmul_(g, g);
    const at::Tensor after = n.sqrt();
    z.add_(g).sub_((after - before) / rate * weights_);
    const at::Tensor shrunk = z.sign() * rule_.l1 - z;
    const at::Tensor weight = shrunk / ((after + rule_.eps) / rate + rule_.l2);
    weights_ = at::where(z.abs() <= rule_.l1, at::zeros_like(weight), weight);
  }

  RuleOptions rule_;
  int64_t elements_;
  c10::Device device_;
  at::Tensor weights_;
  at::Tensor state_;
  mutable at::Tensor host_weights_;  // Undefined: the device's have changed.
  mutable at::Tensor host_state_;
};

}  // namespace

BlockMaker device_blocks(const c10::Device& device) {
  return [device](const RuleOptions& rule, int64_t elements) -> std::unique_ptr<BlockStore> {
    return std::make_unique<DeviceBlock>(rule, elements, device);
  };
}

}  // namespace cohort::ps
