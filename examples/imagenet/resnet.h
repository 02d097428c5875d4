// SPDX-License-Identifier: Apache-2.0
// ResNet, with the parameter names and the arithmetic of torchvision's: weights are
// interchangeable.
#pragma once
#include <cstdint>
#include <string>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <vector>

#include "cohort/parallel/sharding/unit.h"

namespace imagenet {

struct ResNetOptions {
  std::string arch = "resnet18";  ///< One of architectures().
  int64_t num_classes = 1000;
};

/// Returns the names that ResNetOptions::arch may have.
std::vector<std::string> architectures();

/// Blocks one after the other: a Sequential whose forward is no template.
struct LayerImpl : torch::nn::SequentialImpl {
  at::Tensor forward(const at::Tensor& x) { return torch::nn::SequentialImpl::forward(x); }
};
TORCH_MODULE(Layer);

/// From images [B, 3, H, W] to scores [B, num_classes]. Parameters are drawn from torch's global
/// generator: convolutions as He et al., the rest as libtorch does.
/// Source: He et al. 2015, arXiv:1512.03385, table 1; the stride of a bottleneck is in its 3 x 3
///         convolution, as in torchvision.
class ResNetImpl : public torch::nn::Module {
 public:
  /// Errors: ConfigError that lists the architectures if `arch` is none of them.
  explicit ResNetImpl(const ResNetOptions& options);

  at::Tensor forward(const at::Tensor& pictures_BCHW);

 private:
  torch::nn::Conv2d conv1_{nullptr};
  torch::nn::BatchNorm2d bn1_{nullptr};
  std::vector<cohort::parallel::Unit<Layer>> layers_;  // what a sharded model gathers at once
  torch::nn::Linear fc_{nullptr};
};
TORCH_MODULE(ResNet);

}  // namespace imagenet
