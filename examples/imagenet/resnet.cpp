// SPDX-License-Identifier: Apache-2.0
#include "examples/imagenet/resnet.h"

#include <array>
#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/pooling.h>
#include <torch/nn/init.h>

#include "cohort/base/error.h"
#include "cohort/parallel/batch_norm_relu.h"

namespace imagenet {
namespace {

namespace nn = torch::nn;
using cohort::parallel::batch_norm_relu;

struct Architecture {
  const char* name;
  bool bottleneck;
  std::array<int, 4> blocks;  // Of each layer.
};
constexpr std::array<Architecture, 5> kArchitectures = {{{"resnet18", false, {2, 2, 2, 2}},
                                                         {"resnet34", false, {3, 4, 6, 3}},
                                                         {"resnet50", true, {3, 4, 6, 3}},
                                                         {"resnet101", true, {3, 4, 23, 3}},
                                                         {"resnet152", true, {3, 8, 36, 3}}}};

const Architecture& find_architecture(const std::string& name) {
  std::string known;
  for (const auto& architecture : kArchitectures) {
    if (architecture.name == name) return architecture;
    known += (known.empty() ? "" : ", ") + std::string(architecture.name);
  }
  throw cohort::ConfigError("--arch " + name + ": expected one of " + known);
}

nn::Conv2d convolution(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  return nn::Conv2d(
      nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

struct BlockOptions {
  bool bottleneck;
  int64_t in, width, stride;
  int64_t out() const { return bottleneck ? 4 * width : width; }
};

// Two convolutions of 3 x 3, or three of 1, 3 and 1, beside a short cut.
class BlockImpl : public nn::Module {
 public:
  explicit BlockImpl(const BlockOptions& o) {
    if (o.bottleneck) {
      add(o.in, o.width, 1, 1);
      add(o.width, o.width, 3, o.stride);
      add(o.width, o.out(), 1, 1);
    } else {
      add(o.in, o.width, 3, o.stride);
      add(o.width, o.width, 3, 1);
    }
    if (o.stride != 1 || o.in != o.out()) {
      downsample_ = register_module("downsample", nn::Sequential());
      downsample_->push_back(convolution(o.in, o.out(), 1, o.stride));
      downsample_->push_back(nn::BatchNorm2d(o.out()));
    }
  }

  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = input;
    for (size_t i = 0; i + 1 < convolutions_.size(); ++i)
      x = batch_norm_relu(norms_[i], convolutions_[i](x));
    x = convolutions_.back()(x);
    return batch_norm_relu(norms_.back(), x, downsample_ ? downsample_->forward(input) : input);
  }

 private:
  void add(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
    const std::string number = std::to_string(convolutions_.size() + 1);
    convolutions_.push_back(register_module("conv" + number, convolution(in, out, kernel, stride)));
    norms_.push_back(register_module("bn" + number, nn::BatchNorm2d(out)));
  }

  std::vector<nn::Conv2d> convolutions_;
  std::vector<nn::BatchNorm2d> norms_;
  nn::Sequential downsample_{nullptr};
};
TORCH_MODULE(Block);

}  // namespace

std::vector<std::string> architectures() {
  std::vector<std::string> names;
  for (const auto& architecture : kArchitectures) names.emplace_back(architecture.name);
  return names;
}

ResNetImpl::ResNetImpl(const ResNetOptions& options) {
  const Architecture& architecture = find_architecture(options.arch);
  int64_t in = 64;
  conv1_ = register_module("conv1", convolution(3, in, 7, 2));
  bn1_ = register_module("bn1", nn::BatchNorm2d(in));
  for (size_t layer = 0; layer < architecture.blocks.size(); ++layer) {
    cohort::parallel::Unit<Layer> blocks;
    for (int i = 0; i < architecture.blocks[layer]; ++i) {
      const BlockOptions block{.bottleneck = architecture.bottleneck,
                               .in = in,
                               .width = int64_t{64} << layer,
                               .stride = i == 0 && layer > 0 ? 2 : 1};
      blocks->push_back(Block(block));
      in = block.out();
    }
    layers_.push_back(register_module("layer" + std::to_string(layer + 1), blocks));
  }
  fc_ = register_module("fc", nn::Linear(in, options.num_classes));
  for (const auto& module : modules(/*include_self=*/false)) {
    if (auto* conv = module->as<nn::Conv2d>()) {
      nn::init::kaiming_normal_(conv->weight, 0, torch::kFanOut, torch::kReLU);
    }
  }
}

at::Tensor ResNetImpl::forward(const at::Tensor& pictures_BCHW) {
  at::Tensor x = batch_norm_relu(bn1_, conv1_(pictures_BCHW));
  x = nn::functional::max_pool2d(x, nn::functional::MaxPool2dFuncOptions(3).stride(2).padding(1));
  for (auto& layer : layers_) x = layer(x);
  return fc_->forward(x.mean({2, 3}));
}

}  // namespace imagenet
