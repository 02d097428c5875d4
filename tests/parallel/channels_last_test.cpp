// SPDX-License-Identifier: Apache-2.0
// Convolutions whose images, and with them gradients, or weights lie in memory as
// torch.channels_last. Ranks against one process on all their batches, which makes the same sums:
// halves and quarters are exact, so all bits agree.
#include <cmath>
#include <gtest/gtest.h>
#include <string>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/optim/adam.h"
#include "cohort/optim/exponential_average.h"
#include "cohort/parallel/clip_grad.h"
#include "cohort/parallel/comm_hooks/compress.h"
#include "cohort/parallel/comm_hooks/local_sgd.h"
#include "cohort/parallel/strategy.h"
#include "cohort/train/model_checkpoint.h"

#include "tests/support/ranks.h"
#include "tests/support/shared_folder.h"

namespace cohort {
namespace channels_last_test {

using comm::ProcessGroup;
using parallel::DistributedDataParallel;
using parallel::ParallelModel;
using parallel::Strategy;

constexpr auto kContiguous = at::MemoryFormat::Contiguous;
constexpr auto kChannelsLast = at::MemoryFormat::ChannelsLast;
constexpr double kRate = 0.25;
constexpr double kClip = 0x1p-6;

struct ConvolutionsImpl : torch::nn::Module {
  explicit ConvolutionsImpl(at::MemoryFormat weights = kContiguous) {
    torch::manual_seed(3);
    using Options = torch::nn::Conv2dOptions;
    first = register_module("first", torch::nn::Conv2d(Options(3, 16, 3).padding(1).bias(false)));
    norm = register_module("norm", torch::nn::BatchNorm2d(16));
    second = register_module("second", torch::nn::Conv2d(Options(16, 8, 3).stride(2)));
    third = register_module("third", torch::nn::Conv2d(Options(8, 8, 1)));
    last = register_module("last", torch::nn::Linear(8, 4));
    for (const auto& conv : {first, second, third})
      conv->weight.set_data(conv->weight.detach().contiguous(weights));
  }
  at::Tensor forward(const at::Tensor& images) {
    const at::Tensor x = norm(first(images)).relu();
    return last(third(second(x).relu()).relu().mean({2, 3}));
  }
  torch::nn::Conv2d first{nullptr}, second{nullptr}, third{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Convolutions);

at::Tensor images_of(int rank, int step) {
  const at::Tensor images = at::arange(4 * 3 * 8 * 8, at::kFloat).mul(1 + rank + 0.37 * step).cos();
  return images.view({4, 3, 8, 8}).contiguous(kChannelsLast);
}

at::Tensor loss_of(const at::Tensor& output) {
  return output.square().mean();
}

// Gradients of the mean of all ranks' losses, in the ranks' order.
void backward_of_all(Convolutions& model, int world_size, int step) {
  model->zero_grad();
  for (int rank = 0; rank < world_size; ++rank)
    (loss_of(model(images_of(rank, step))) / world_size).backward();
}

void expect_same_parameters(const Convolutions& got, const Convolutions& expected) {
  const auto parameters = expected->named_parameters();
  for (const auto& item : got->named_parameters())
    EXPECT_TRUE(at::equal(item.value(), parameters[item.key()])) << item.key();
}

TEST(ChannelsLastTest, ImagesTrainEveryStrategyAsOneProcess) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const Strategy strategy :
         {Strategy::kDdp, Strategy::kZero1, Strategy::kZero2, Strategy::kZero3}) {
      SCOPED_TRACE(to_string(strategy));
      Convolutions plain;
      Convolutions net;
      ParallelModel<Convolutions> model(net, group, {.strategy = strategy});
      torch::optim::SGD sgd(model.parameters(), kRate);
      torch::optim::SGD plain_sgd(plain->parameters(), kRate);
      for (int step = 0; step < 3; ++step) {
        loss_of(model(images_of(group.rank(), step))).backward();
        backward_of_all(plain, group.size(), step);
        // A norm in float32 of at most 1,152 elements: relative error 1,152 x 2^-24 each.
        const double norm = std::sqrt(optim::gradient_norm_squared(plain->parameters()));
        EXPECT_NEAR(model.gradient_norm(), norm, 1.4e-4 * norm);
        parallel::clip_grad_value_(model, kClip);
        const at::NoGradGuard no_grad;
        for (at::Tensor& parameter : plain->parameters())
          parameter.mutable_grad().clamp_(-kClip, kClip);
        sgd.step();
        sgd.zero_grad();
        plain_sgd.step();
      }
      const auto whole = model.unsharded();
      expect_same_parameters(net, plain);
      EXPECT_FALSE(at::equal(net->first->weight, Convolutions()->first->weight));
    }
  });
}

TEST(ChannelsLastTest, WeightsAndTheirGradientsStaySoUnderDdp) {
  const parallel::DistributedDataParallelOptions kCases[] = {
      {.bucket_cap_mb = 0.001},
      {.bucket_cap_mb = 0.001, .gradient_as_bucket_view = true},
      {.rebuild_buckets = true},
      {.delay_all_reduce_named_params = {"first.weight", "third.weight"},
       .param_to_hook_all_reduce = "second.weight"}};
  test::ranks(2, [&](const ProcessGroup& group) {
    for (const auto& options : kCases) {
      SCOPED_TRACE(&options - kCases);
      Convolutions plain(kChannelsLast);
      Convolutions net(kChannelsLast);
      if (group.rank() == 1) {
        const at::NoGradGuard no_grad;
        for (at::Tensor& parameter : net->parameters()) parameter.zero_();  // DDP repairs that.
      }
      DistributedDataParallel<Convolutions> model(net, group, options);
      optim::ExponentialAverage average(net->parameters(), 0.5);
      optim::ExponentialAverage plain_average(plain->parameters(), 0.5);
      torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(kRate).momentum(0.5));
      torch::optim::SGD plain_sgd(plain->parameters(),
                                  torch::optim::SGDOptions(kRate).momentum(0.5));
      for (int step = 0; step < 3; ++step) {
        loss_of(model(images_of(group.rank(), step))).backward();
        backward_of_all(plain, group.size(), step);
        const auto parameters = plain->named_parameters();
        for (const auto& item : net->named_parameters()) {
          const at::Tensor& gradient = item.value().grad();
          EXPECT_TRUE(at::equal(gradient, parameters[item.key()].grad())) << item.key();
          EXPECT_TRUE(gradient.dim() != 4 || gradient.is_contiguous(kChannelsLast)) << item.key();
        }
        sgd.step();
        sgd.zero_grad();
        plain_sgd.step();
        average.update();
        plain_average.update();
      }
      expect_same_parameters(net, plain);
      EXPECT_TRUE(net->second->weight.is_contiguous(kChannelsLast));
      EXPECT_FALSE(net->second->weight.is_contiguous());
      average.swap();
      plain_average.swap();
      expect_same_parameters(net, plain);
    }
  });
}

TEST(ChannelsLastTest, CompressedGradientsAreThoseOfOneProcess) {
  test::ranks(2, [](const ProcessGroup& group) {
    for (const auto& hook :
         {parallel::bf16_compress_hook(),
          parallel::bf16_compress_wrapper(parallel::compress_hook(at::kBFloat16))}) {
      std::vector<at::Tensor> expected;
      for (int rank = 0; rank < group.size(); ++rank) {
        Convolutions plain(kChannelsLast);
        loss_of(plain(images_of(rank, 0))).backward();
        for (size_t i = 0; const at::Tensor& parameter : plain->parameters()) {
          const at::Tensor sent = (parameter.grad() / 2).to(at::kBFloat16);
          if (rank == 0) {
            expected.push_back(sent);
          } else {
            expected[i] = expected[i] + sent;
          }
          ++i;
        }
      }
      Convolutions net(kChannelsLast);
      DistributedDataParallel<Convolutions> model(net, group, {.bucket_cap_mb = 0.001});
      model.register_comm_hook(hook);
      loss_of(model(images_of(group.rank(), 0))).backward();
      for (size_t i = 0; const at::Tensor& parameter : net->parameters())
        EXPECT_TRUE(at::equal(parameter.grad(), expected[i++].to(at::kFloat))) << i;
    }
  });
}

TEST(ChannelsLastTest, WeightsAreAveragedElementByElement) {
  test::ranks(2, [](const ProcessGroup& group) {
    // Formats that differ between ranks, too.
    Convolutions net(group.rank() == 0 ? kChannelsLast : kContiguous);
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : net->parameters())
      parameter.copy_(at::arange(parameter.numel()).view(parameter.sizes())).add_(2 * group.rank());
    parallel::PeriodicModelAverager(group, {}).average_parameters(net->parameters());
    for (const at::Tensor& parameter : net->parameters())
      EXPECT_TRUE(at::equal(
          parameter, at::arange(1, 1 + parameter.numel(), at::kFloat).view(parameter.sizes())));
  });
}

// Summed as they lie in memory, gradients of one element would go to another.
TEST(ChannelsLastTest, WeightsOfAnotherFormatOnOneRankAreRefused) {
  const auto ends = test::run_ranks(2, [](const ProcessGroup& group) {
    Convolutions net(group.rank() == 1 ? kChannelsLast : kContiguous);
    const DistributedDataParallel<Convolutions> model(net, group);
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.exit_code, 1);
    EXPECT_NE(end.output.find("the models differ between ranks: rank 1 has parameter first.weight "
                              "[16, 3, 3, 3] float strides [27, 1, 9, 3] where rank 0 has "
                              "parameter first.weight [16, 3, 3, 3] float"),
              std::string::npos)
        << end.output;
  }
}

// A checkpoint has elements row by row, whatever the format of the weights.
TEST(ChannelsLastTest, ACheckpointOfOneFormatIsLoadedIntoTheOther) {
  const test::SharedFolder folder;
  test::ranks(2, [&folder](const ProcessGroup& group) {
    const auto options = torch::optim::SGDOptions(kRate).momentum(0.5);
    for (const auto format : {kContiguous, kChannelsLast}) {
      SCOPED_TRACE(format);
      const std::string path = folder / (format == kContiguous ? "contiguous" : "channels-last");
      Convolutions net(format);
      ParallelModel<Convolutions> model(net, group);
      torch::optim::SGD sgd(model.parameters(), options);
      const auto advance = [&group](auto& trained, auto& optimizer, int step) {
        loss_of(trained(images_of(group.rank(), step))).backward();
        optimizer.step();
        optimizer.zero_grad();
      };
      advance(model, sgd, 0);
      checkpoint::save(model, sgd, path);
      checkpoint::async_save(model, sgd, path + "-async").wait();
      advance(model, sgd, 1);  // The second step takes the momentum.
      for (const Strategy strategy : {Strategy::kDdp, Strategy::kZero3}) {
        for (const std::string& from : {path, path + "-async"}) {
          // Shards are of contiguous weights alone.
          const bool turns = strategy == Strategy::kDdp && format == kContiguous;
          Convolutions other(turns ? kChannelsLast : kContiguous);
          ParallelModel<Convolutions> loaded(other, group, {.strategy = strategy});
          torch::optim::SGD its_sgd(loaded.parameters(), options);
          checkpoint::load(loaded, its_sgd, from);
          advance(loaded, its_sgd, 1);
          const auto whole = loaded.unsharded();
          expect_same_parameters(other, net);
        }
      }
    }
  });
}

}  // namespace channels_last_test
}  // namespace cohort
