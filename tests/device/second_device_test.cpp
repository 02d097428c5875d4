// SPDX-License-Identifier: Apache-2.0
#include "tests/device/second_device.h"

#include <ATen/autocast_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <csignal>
#include <gtest/gtest.h>
#include <thread>
#include <torch/nn/functional.h>
#include <torch/nn/init.h>
#include <torch/nn/modules.h>
#include <torch/nn/utils.h>
#include <torch/optim.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "tests/device/host_operators.h"
#include "tests/support/message_of.h"

namespace cohort::test {
namespace second_device_test {

using Tensors = std::vector<at::Tensor>;
using Function = std::function<Tensors(const Tensors&)>;

// What `function` makes of `inputs` moved to `device`, and the gradients of those of floating point; all on the CPU.
Tensors results_on(at::Device device, const Function& function, const Tensors& inputs) {
  torch::manual_seed(7);
  Tensors moved;
  for (const auto& input : inputs) {
    moved.push_back(input.to(device).detach());
    moved.back().set_requires_grad(input.is_floating_point());
  }
  const Tensors outputs = function(moved);
  Tensors results;
  at::Tensor loss = at::zeros({}, device);
  for (const auto& output : outputs) {
    EXPECT_EQ(output.device(), device);
    results.push_back(output.detach().cpu());
    if (output.requires_grad()) loss = loss + (output * output).sum();
  }
  if (!loss.requires_grad()) return results;
  loss.backward();
  for (const auto& input : moved) {
    if (!input.grad().defined()) continue;
    EXPECT_EQ(input.grad().device(), device);
    results.push_back(input.grad().cpu());
  }
  return results;
}

void expect_same_bits(const Function& function, const Tensors& inputs) {
  const Tensors expected = results_on(at::kCPU, function, inputs);
  const Tensors got = results_on(second_device(), function, inputs);
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
}

TEST(SecondDeviceTest, OperatorsAndTheirGradientsHaveTheBitsOfTheCpu) {
  torch::manual_seed(1);
  const at::Tensor a = at::randn({6, 8}), b = at::randn({8, 5}), c = at::randn({3, 6, 8});
  const at::Tensor bias = at::randn({5}), scale = at::randn({8});
  const at::Tensor ids = at::randint(0, 5, {6}, at::kLong);
  const std::vector<std::pair<const char*, std::pair<Function, Tensors>>> cases{
      {"mm", {[](auto& t) { return Tensors{t[0].mm(t[1])}; }, {a, b}}},
      {"bmm", {[](auto& t) { return Tensors{t[0].bmm(t[0].transpose(1, 2))}; }, {c}}},
      {"linear", {[](auto& t) { return Tensors{at::linear(t[0], t[1].t(), t[2])}; }, {c, b, bias}}},
      {"softmax", {[](auto& t) { return Tensors{t[0].transpose(0, 1).softmax(-1)}; }, {c}}},
      {"layer_norm",
       {[](auto& t) { return Tensors{at::layer_norm(t[0], {8}, t[1], t[1])}; }, {c, scale}}},
      {"gelu", {[](auto& t) { return Tensors{at::gelu(t[0])}; }, {a}}},
      {"dropout", {[](auto& t) { return Tensors{at::dropout(t[0], 0.3, true)}; }, {a}}},
      {"embedding", {[](auto& t) { return Tensors{at::embedding(t[0], t[1])}; }, {a, ids}}},
      {"index_select", {[](auto& t) { return Tensors{t[0].index_select(0, t[1])}; }, {a, ids}}},
      {"cross entropy",
       {[](auto& t) { return Tensors{at::cross_entropy_loss(t[0].mm(t[1]), t[2])}; }, {a, b, ids}}},
      {"cat, sum, pieces",
       {[](auto& t) {
          return Tensors{at::cat({t[0], t[0].flip(0)}, 1).sum({1}), t[0].split(2)[1],
                         t[0].unbind(0)[2]};
        },
        {a}}},
      {"scalars",
       {[](auto& t) {
          return Tensors{t[0] * 2 + at::scalar_tensor(3.0), at::where(t[0] > 0, t[0], 0.0)};
        },
        {a}}},
      {"sorted",
       {[](auto& t) {
          return Tensors{std::get<0>(t[0].topk(3)), std::get<1>(t[0].sort(1)), t[0].cumsum(0)};
        },
        {a}}},
      {"convolution",
       {[](auto& t) {
          return Tensors{at::conv1d(t[0],
                                    t[1].unsqueeze(-1)
                                        .expand({8, 5, 3})
                                        .narrow(1, 0, 5)
                                        .transpose(0, 1)
                                        .contiguous()
                                        .narrow(1, 0, 6),
                                    t[2])};
        },
        {c, b, bias}}},
      {"masks and indices",
       {[](auto& t) {
          return Tensors{t[0].masked_select(t[0] > 0), t[0].index({t[1]}), t[0].index({t[0] > 1}),
                         (t[0] > 0).nonzero()};
        },
        {a, ids}}},
      {"factories",
       {[](auto& t) {
          const auto o = t[0].options().requires_grad(false);
          return Tensors{at::randn({3}, o),
                         at::arange(7, o),
                         at::full({2, 2}, 3, o),
                         at::randperm(9, o.dtype(at::kLong)),
                         at::tril(at::ones({3, 3}, o)),
                         at::empty({0}, o)};
        },
        {a}}},
  };
  for (const auto& [name, run] : cases) {
    SCOPED_TRACE(name);
    expect_same_bits(run.first, run.second);
  }
}

TEST(SecondDeviceTest, ViewsShareTheirBase) {
  const auto written = [](at::Device device) {
    const at::Tensor base = at::zeros({4, 6}, device);
    base.t().narrow(0, 1, 2).select(1, 3).fill_(5);
    base.view({24}).as_strided({2}, {6}, 1).add_(base[3][1] + 1);
    base.unsqueeze(0).expand({2, 4, 6})[0].diagonal().mul_(2);
    base.split(2)[1].unbind(1)[5].copy_(base.chunk(2, 0)[0].select(1, 1));
    return base;
  };
  const at::Tensor base = written(second_device());
  EXPECT_TRUE(at::equal(base.cpu(), written(at::kCPU)));
  EXPECT_TRUE(base.t().is_alias_of(base));
  EXPECT_TRUE(base.detach().is_alias_of(base));
}

TEST(SecondDeviceTest, AResultInPlaceOrInAnOutputIsThatTensor) {
  const at::Tensor a = at::arange(6, second_device());
  at::Tensor out = at::empty({0}, a.options());
  const at::Tensor& result = at::add_out(out, a, a);
  EXPECT_TRUE(result.is_same(out));
  EXPECT_TRUE(at::equal(out.cpu(), at::arange(0, 12, 2)));
  out.resize_({2, 2});
  EXPECT_EQ(out.sizes(), at::IntArrayRef({2, 2}));
  out.resize_({40});
  out.fill_(1).mul_(out);
  EXPECT_EQ(out.sum().item<int64_t>(), 40);
  EXPECT_EQ(at::empty({0}, a.options()).set_(a).data_ptr(), a.data_ptr());
}

TEST(SecondDeviceTest, TensorsOfTwoDevicesAreAnError) {
  const at::Tensor here = at::ones({3, 3}), there = here.to(second_device());
  const at::Tensor ids = at::zeros({2}, at::kLong);
  const std::string error = message_of<c10::Error>([&] { (void)(here + there); });
  EXPECT_NE(error.find("Expected all tensors to be on the same device"), std::string::npos)
      << error;
  const std::vector<std::function<void()>> calls{
      [&] { (void)there.mm(here); },
      [&] {
        (void)at::cat({there, here});
      },
      [&] { (void)at::equal(here, there); },
      [&] { (void)there.index_select(0, ids); },
      [&] { (void)at::scalar_tensor(1).add_(there[0][0]); },
      [&] { (void)at::linear(there, here); },
      [&] { (void)at::rand({2}, at::detail::createCPUGenerator(1), there.options()); }};
  for (size_t i = 0; i < calls.size(); ++i) EXPECT_THROW(calls[i](), c10::Error) << i;
  EXPECT_TRUE(at::equal((there * at::scalar_tensor(2)).cpu(), here * 2));
  EXPECT_TRUE(at::equal(there.index({ids}).cpu(), here.index({ids})));
}

TEST(SecondDeviceDeathTest, AHostReadOrWriteOfDeviceMemoryEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const at::Tensor there = at::ones({3}, second_device());
  EXPECT_EXIT((void)static_cast<volatile const float*>(there.const_data_ptr<float>())[1],
              testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EXIT(there.mutable_data_ptr<float>()[0] = 2, testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EQ(host_alias(there).const_data_ptr<float>()[1], 1);
}

torch::nn::Sequential small_model() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(6, 16), torch::nn::GELU(),
                               torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})),
                               torch::nn::Dropout(0.2), torch::nn::Linear(16, 4));
}

struct Trained {
  Tensors parameters;  // On the CPU.
  DeviceCounts last_step;
};

template <class Optimizer, class Options>
Trained train(at::Device device, const Options& options) {
  auto model = small_model();
  model->to(device);
  Optimizer optimizer(model->parameters(), options);
  Trained trained;
  for (int step = 0; step < 3; ++step) {
    const at::Tensor x = at::randn({5, 6}), labels = at::randint(0, 4, {5}, at::kLong);
    reset_device_counts();
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(model->forward(x.to(device)), labels.to(device))
        .backward();
    optimizer.step();
    trained.last_step = device_counts();
  }
  for (const auto& parameter : model->parameters()) {
    EXPECT_EQ(parameter.device(), device);
    trained.parameters.push_back(parameter.detach().cpu());
  }
  return trained;
}

void expect_equal(const Tensors& got, const Tensors& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
}

TEST(SecondDeviceTest, TrainingHasTheBitsOfTheCpu) {
  using torch::optim::AdamW, torch::optim::AdamWOptions;
  expect_equal(train<AdamW>(second_device(), AdamWOptions(0.01)).parameters,
               train<AdamW>(at::kCPU, AdamWOptions(0.01)).parameters);
  using torch::optim::SGD, torch::optim::SGDOptions;
  expect_equal(train<SGD>(second_device(), SGDOptions(0.1).momentum(0.9)).parameters,
               train<SGD>(at::kCPU, SGDOptions(0.1).momentum(0.9)).parameters);
}

TEST(SecondDeviceTest, AStepCopiesItsBatchAndWaitsForNothing) {
  const DeviceCounts counts =
      train<torch::optim::AdamW>(second_device(), torch::optim::AdamWOptions(0.01)).last_step;
  EXPECT_EQ(counts.host_to_device, 2);  // Examples and labels.
  EXPECT_EQ(counts.device_to_host, 0);
  EXPECT_EQ(counts.synchronisations, 0);
  EXPECT_EQ(counts.new_blocks, 0);  // The third step asks for what the second freed.
  EXPECT_GT(counts.reused_blocks, 0);
}

TEST(SecondDeviceTest, WhatWaitsForTheDeviceIsCounted) {
  const at::Tensor x = at::arange(4, second_device());
  const auto waits = [](const std::function<void()>& call) {
    reset_device_counts();
    call();
    return device_counts().synchronisations;
  };
  EXPECT_EQ(waits([&] { (void)(x + 1).sum().mul_(2); }), 0);
  EXPECT_EQ(waits([&] { (void)x[1].item(); }), 1);
  EXPECT_EQ(waits([&] { (void)x.cpu(); }), 1);
  EXPECT_EQ(device_counts().device_to_host, 1);
  EXPECT_EQ(waits([&] { (void)x.nonzero(); }), 1);
  EXPECT_EQ(waits([&] { (void)x.masked_select(x > 1); }), 1);
  EXPECT_EQ(waits([&] { (void)x.index({x > 1}); }), 1);
  EXPECT_EQ(waits([&] { (void)std::get<0>(at::_unique(x)); }), 1);
  EXPECT_EQ(waits([&] { (void)at::equal(x, x); }), 1);
  const at::Tensor pinned = at::empty({4}, x.options().device(at::kCPU).pinned_memory(true));
  EXPECT_EQ(waits([&] { pinned.copy_(x, /*non_blocking=*/true); }), 0);
  EXPECT_TRUE(at::equal(pinned, at::arange(4)));
}

// Of what `to` made and of what a kernel made.
TEST(SecondDeviceTest, AutocastMultipliesInALowPrecision) {
  const at::DeviceType type = second_device().type();
  const at::Tensor x = at::ones({2, 2}).to(second_device());
  at::autocast::set_autocast_dtype(type, at::kHalf);
  at::autocast::set_autocast_enabled(type, true);
  EXPECT_EQ(at::matmul(x, x).scalar_type(), at::kHalf);
  EXPECT_EQ(at::matmul(x + 1, x + 1).scalar_type(), at::kHalf);
  at::autocast::set_autocast_enabled(type, false);
  at::autocast::clear_cache();
}

TEST(SecondDeviceTest, AStreamWaitsForWhatAnotherOneWrites) {
  const auto* device = c10::impl::getDeviceGuardImpl(second_device().type());
  const c10::Stream other = device->getStreamFromGlobalPool(second_device());
  const c10::Stream own = device->getStream(second_device());
  EXPECT_NE(other, own);
  at::Tensor x;
  c10::Event written(second_device().type());
  {
    const c10::StreamGuard guard(other);
    x = at::ones({3}).to(second_device());
    written.record(other);
  }
  EXPECT_EQ(device->getStream(second_device()), own);
  EXPECT_NE(message_of<c10::Error>([&] { (void)x.neg(); }).find("it has not waited"),
            std::string::npos);
  reset_device_counts();
  written.block(own);
  EXPECT_TRUE(at::equal(x.neg(), -at::ones({3}).to(second_device())));
  EXPECT_EQ(device_counts().stream_waits, 1);
  x.reset();
  EXPECT_EQ(device_counts().early_frees, 1);
  {
    const c10::StreamGuard guard(other);
    x = at::ones({3}).to(second_device());
  }
  device->synchronizeDevice(0);
  x.neg();
  device->recordDataPtrOnStream(x.storage().data_ptr(), own);
  x.reset();
  EXPECT_EQ(device_counts().early_frees, 1) << "the allocator knows of this one";
}

TEST(SecondDeviceTest, AnOperatorOnTheHostIsNoticed) {
  const at::Tensor x = at::arange(8, at::TensorOptions(second_device()).dtype(at::kFloat));
  const at::Tensor host = at::ones({8});
  const auto noticed = [](const std::function<void()>& call) {
    const HostOperators operators(/*most_elements=*/4);
    call();
    EXPECT_GT(operators.on_device(), 0);
    return operators.found();
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(noticed([&] { (void)at::linear(x, x.view({1, 8}).relu()).softmax(0); }), Names());
  EXPECT_EQ(noticed([&] { (void)(x.cpu(), host.to(second_device())); }), Names());
  EXPECT_EQ(noticed([&] { (void)(x + 1).narrow(0, 0, 4).cpu().norm(); }), Names());
  EXPECT_EQ(noticed([&] { (void)x.cpu().add_(1); }), Names{"aten::add_ of 8 elements"});
  EXPECT_EQ(noticed([&] { (void)(at::empty({8}), x + 1); }), (Names{"aten::empty of 8 elements"}));
  EXPECT_EQ(noticed([&] {
              std::thread([&] { (void)host.neg(); }).join();
              (void)x.neg();
            }),
            Names{"aten::neg of 8 elements"});
}

}  // namespace second_device_test
}  // namespace cohort::test
