// SPDX-License-Identifier: Apache-2.0
// Trains a small model under DistributedDataParallel on weights and data that ddp_parity.py made,
// and writes the weights. Usage: ddp_parity convolution|transformer START.safetensors
// RESULT.safetensors BUCKET_CAP_MB, on two ranks.
#include <cmath>
#include <torch/nn.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/base/safetensors.h"
#include "cohort/comm/process_group.h"
#include "cohort/parallel/distributed_data_parallel.h"

namespace {

using namespace cohort;
namespace nn = torch::nn;

struct ConvolutionImpl : nn::Module {
  nn::Conv2d first{nullptr}, second{nullptr};
  nn::Linear out{nullptr};
  ConvolutionImpl() {
    first = register_module("first", nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)));
    second = register_module("second", nn::Conv2d(nn::Conv2dOptions(8, 16, 3).stride(2)));
    out = register_module("out", nn::Linear(16 * 5 * 5, 10));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = torch::relu(second(torch::relu(first(x))));
    return out(h.flatten(1));
  }
};
TORCH_MODULE(Convolution);

struct BlockImpl : nn::Module {
  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  nn::Linear qkv{nullptr}, proj{nullptr}, up{nullptr}, down{nullptr};
  BlockImpl() {
    norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({32})));
    qkv = register_module("qkv", nn::Linear(32, 96));
    proj = register_module("proj", nn::Linear(32, 32));
    norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({32})));
    up = register_module("up", nn::Linear(32, 64));
    down = register_module("down", nn::Linear(64, 32));
  }
  at::Tensor forward(at::Tensor x) {
    const int64_t batch = x.size(0), length = x.size(1);
    const auto parts =
        qkv(norm1(x)).view({batch, length, 3, 4, 8}).permute({2, 0, 3, 1, 4}).unbind(0);
    const at::Tensor scores = torch::matmul(parts[0], parts[1].transpose(-2, -1)) / std::sqrt(8.0);
    const at::Tensor mixed = torch::matmul(torch::softmax(scores, -1), parts[2]);
    x = x + proj(mixed.transpose(1, 2).reshape({batch, length, 32}));
    return x + down(torch::gelu(up(norm2(x))));
  }
};
TORCH_MODULE(Block);

struct TransformerImpl : nn::Module {
  nn::Embedding embed{nullptr};
  Block block0{nullptr}, block1{nullptr};
  nn::Linear out{nullptr};
  TransformerImpl() {
    embed = register_module("embed", nn::Embedding(50, 32));
    block0 = register_module("block0", Block());
    block1 = register_module("block1", Block());
    out = register_module("out", nn::Linear(32, 50));
  }
  at::Tensor forward(const at::Tensor& x) { return out(block1(block0(embed(x)))).flatten(0, 1); }
};
TORCH_MODULE(Transformer);

at::Tensor tensor_of(const TensorView& view) {
  const auto dtype = view.dtype == DType::kI64 ? at::kLong : at::kFloat;
  return torch::from_blob(const_cast<std::byte*>(view.bytes.data()), view.shape, dtype).clone();
}

template <class Holder>
void train(Holder model, const SafetensorsFile& start, const std::string& result, double cap_mb) {
  comm::ProcessGroup group(comm::rank_info_from_environment(), {.backend = "gloo"});
  {
    const at::NoGradGuard no_grad;
    for (auto& item : model->named_parameters())
      item.value().copy_(tensor_of(start.at(item.key())));
  }
  // As PyTorch cuts: one bucket first, then in the order in which gradients came.
  parallel::DistributedDataParallel<Holder> ddp(
      model, group, {.bucket_cap_mb_list = {cap_mb}, .rebuild_buckets = true});
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const at::Tensor x = tensor_of(start.at("data.x")), y = tensor_of(start.at("data.y"));
  for (int64_t step = 0; step < x.size(0); ++step) {
    sgd.zero_grad();
    torch::nn::functional::cross_entropy(ddp(x[step][group.rank()]),
                                         y[step][group.rank()].flatten())
        .backward();
    sgd.step();
  }
  if (group.rank() == 0) {
    std::vector<at::Tensor> kept;
    std::vector<TensorView> views;
    for (const auto& item : model->named_parameters()) {
      kept.push_back(item.value().detach().contiguous());
      const auto* bytes = static_cast<const std::byte*>(kept.back().data_ptr());
      views.push_back(
          {item.key(), DType::kF32, kept.back().sizes().vec(), {bytes, kept.back().nbytes()}});
    }
    write_safetensors(result, views);
  }
  group.close();
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("ddp_parity", [&] {
    if (argc != 5)
      throw ConfigError("usage: ddp_parity convolution|transformer START RESULT BUCKET_CAP_MB");
    const SafetensorsFile start(argv[2]);
    const double cap_mb = std::stod(argv[4]);
    if (std::string(argv[1]) == "convolution") {
      train(Convolution(), start, argv[3], cap_mb);
    } else {
      train(Transformer(), start, argv[3], cap_mb);
    }
    return 0;
  });
}
