// ResNet, with the parameter names and the arithmetic of torchvision's: weights are
// interchangeable.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <vector>

namespace imagenet {

/// Makes a normalisation of so many channels: a module from [B, C, H, W] to the same.
using NormFactory = std::function<torch::nn::AnyModule(int64_t channels)>;

/// BatchNorm2d, on the rank's own examples.
torch::nn::AnyModule batch_norm(int64_t channels);

struct ResNetOptions {
  std::string arch = "resnet18";  ///< One of architectures().
  int64_t num_classes = 1000;
  NormFactory norm = batch_norm;
};

/// Returns the names that ResNetOptions::arch may have.
std::vector<std::string> architectures();

/// From pictures [B, 3, H, W] to scores [B, num_classes]. Parameters are drawn from torch's global
/// generator: convolutions as He et al., the rest as libtorch does.
/// Source: He et al. 2015, arXiv:1512.03385, table 1; the stride of a bottleneck is in its 3 x 3
///         convolution, as in torchvision.
class ResNetImpl : public torch::nn::Module {
 public:
  /// Errors: ConfigError that lists the architectures if `arch` is none of them.
  explicit ResNetImpl(const ResNetOptions& options);

  at::Tensor forward(const at::Tensor& pictures_BCHW);

  /// The four layers, which run through parallel::unit; not owned.
  std::vector<torch::nn::Module*> blocks();

 private:
  torch::nn::Conv2d conv1_{nullptr};
  torch::nn::AnyModule bn1_;
  std::vector<torch::nn::Sequential> layers_;
  torch::nn::Linear fc_{nullptr};
};
TORCH_MODULE(ResNet);

}  // namespace imagenet
