// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/sync_batch_norm.h"

#include <c10/core/InferenceMode.h>
#include <functional>
#include <gtest/gtest.h>
#include <sstream>
#include <torch/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/parallel/distributed_data_parallel.h"

#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace cohort::parallel {
namespace sync_batch_norm_test {

using comm::ProcessGroup;
using torch::nn::BatchNormOptions;

// float64 sums of at most some 1,000 terms of size 1 in another order: 1,000 eps = 2e-13.
constexpr double kBound64 = 2e-13;

struct Case {
  std::vector<int64_t> rows;  // by rank
  std::vector<int64_t> rest;  // dimensions after [B, C]
  BatchNormOptions options{4};
  at::MemoryFormat format = at::MemoryFormat::Contiguous;
};

double difference(const at::Tensor& a, const at::Tensor& b) {
  EXPECT_EQ(a.sizes(), b.sizes());
  return a.numel() == 0 ? 0 : (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

at::Tensor summed(const ProcessGroup& group, const at::Tensor& tensor) {
  at::Tensor sum = tensor.detach().clone();
  group.all_reduce(sum);
  return sum;
}

// The same on every rank: whole batch, upstream gradient, and where this rank's rows are.
struct Batch {
  at::Tensor x, dy;
  int64_t start = 0;
  int64_t rows = 0;
};

Batch make_batch(const Case& c, int rank, int step) {
  torch::manual_seed(17 + step);
  int64_t all = 0;
  Batch batch;
  for (size_t i = 0; i < c.rows.size(); ++i) {
    if (static_cast<int>(i) == rank) batch.start = all;
    all += c.rows[i];
  }
  batch.rows = c.rows[static_cast<size_t>(rank)];
  std::vector<int64_t> shape{all, c.options.num_features()};
  shape.insert(shape.end(), c.rest.begin(), c.rest.end());
  batch.x = at::randn(shape, at::kDouble).mul_(2).add_(3).contiguous(c.format);
  batch.dy = at::randn(shape, at::kDouble).contiguous(c.format);
  return batch;
}

// As libtorch's users write it: typed members, of which one takes inputs of a given dimension.
struct TypedImpl : torch::nn::Module {
  explicit TypedImpl(const BatchNormOptions& options)
      : one(register_module("one", torch::nn::BatchNorm1d(options))),
        two(register_module("two", torch::nn::BatchNorm2d(options))),
        three(register_module("three", torch::nn::BatchNorm3d(options))) {
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    if (x.dim() <= 3) return one(x);
    return x.dim() == 4 ? two(x) : three(x);
  }
  torch::nn::Module& member(int64_t dim) {
    if (dim <= 3) return *one;
    if (dim == 4) return *two;
    return *three;
  }
  torch::nn::BatchNorm1d one;
  torch::nn::BatchNorm2d two;
  torch::nn::BatchNorm3d three;
};

void randomise(torch::nn::Module& module) {
  torch::manual_seed(5);
  for (auto& parameter : module.parameters()) parameter.set_data(at::randn_like(parameter));
}

// `norm`: one that spans the group; `forward` calls it.
void expect_equals_whole_batch(const ProcessGroup& group, const Case& c, torch::nn::Module& norm,
                               const std::function<at::Tensor(const at::Tensor&)>& forward) {
  TypedImpl reference(c.options);
  torch::nn::Module& whole = reference.member(static_cast<int64_t>(c.rest.size()) + 2);
  randomise(norm);
  randomise(whole);
  for (int step = 0; step < 3; ++step) {
    const Batch batch = make_batch(c, group.rank(), step);
    at::Tensor x =
        batch.x.narrow(0, batch.start, batch.rows).clone().contiguous(c.format).requires_grad_();
    at::Tensor whole_x = batch.x.clone().requires_grad_();
    const at::Tensor y = forward(x);
    const at::Tensor whole_y = reference.forward(whole_x);
    EXPECT_EQ(y.suggest_memory_format(), x.suggest_memory_format());
    EXPECT_LE(difference(y, whole_y.narrow(0, batch.start, batch.rows)), kBound64);
    (y * batch.dy.narrow(0, batch.start, batch.rows)).sum().backward();
    (whole_y * batch.dy).sum().backward();
    EXPECT_LE(difference(x.grad(), whole_x.grad().narrow(0, batch.start, batch.rows)), kBound64);
    const auto parameters = norm.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_LE(difference(summed(group, parameters[i].grad()), whole.parameters()[i].grad()),
                kBound64);
    }
    const auto buffers = norm.named_buffers();
    ASSERT_EQ(buffers.size(), whole.named_buffers().size());
    for (const auto& buffer : buffers) {
      EXPECT_LE(difference(buffer.value(), whole.named_buffers()[buffer.key()]), kBound64)
          << buffer.key();
    }
    norm.zero_grad();
    whole.zero_grad();
  }
  norm.eval();
  whole.eval();
  const Batch batch = make_batch(c, group.rank(), 9);
  EXPECT_LE(difference(forward(batch.x), reference.forward(batch.x)), kBound64)
      << "evaluation is local";
}

void expect_layer_equals_whole_batch(const ProcessGroup& group, const Case& c) {
  SyncBatchNorm norm(c.options, group);
  norm->to(at::kDouble);
  expect_equals_whole_batch(group, c, *norm, [&](const at::Tensor& x) { return norm(x); });
}

// The layer, and typed members that are converted.
void expect_equals_whole_batch(const ProcessGroup& group, const Case& c) {
  expect_layer_equals_whole_batch(group, c);
  const auto typed = std::make_shared<TypedImpl>(c.options);
  convert_sync_batchnorm(*typed, group);
  expect_equals_whole_batch(group, c, typed->member(static_cast<int64_t>(c.rest.size()) + 2),
                            [&](const at::Tensor& x) { return typed->forward(x); });
}

TEST(SyncBatchNormTest, TwoUnevenRanksEqualTheWholeBatch) {
  test::ranks(2, [](const ProcessGroup& group) {
    expect_layer_equals_whole_batch(group, {.rows = {3, 1}, .rest = {}});
    expect_equals_whole_batch(group, {.rows = {3, 2}, .rest = {}});
    expect_equals_whole_batch(group, {.rows = {2, 5}, .rest = {3}});
    expect_equals_whole_batch(group, {.rows = {1, 3}, .rest = {3, 5}});
    expect_equals_whole_batch(group, {.rows = {2, 1}, .rest = {2, 3, 2}});
  });
}

TEST(SyncBatchNormTest, ThreeRanksWithAnEmptyOneEqualTheWholeBatch) {
  test::ranks(3, [](const ProcessGroup& group) {
    expect_equals_whole_batch(group, {.rows = {2, 0, 3}, .rest = {3, 2}});
    expect_equals_whole_batch(group, {.rows = {0, 2, 0}, .rest = {}});
    expect_equals_whole_batch(group, {.rows = {1, 1, 1}, .rest = {4}});
  });
}

TEST(SyncBatchNormTest, OptionsMeanWhatTheyMeanInBatchNorm) {
  test::ranks(2, [](const ProcessGroup& group) {
    expect_equals_whole_batch(
        group,
        {.rows = {2, 3}, .rest = {2, 2}, .options = BatchNormOptions(4).momentum(std::nullopt)});
    expect_equals_whole_batch(
        group,
        {.rows = {2, 3}, .rest = {2, 2}, .options = BatchNormOptions(4).momentum(0.7).eps(0.5)});
    expect_equals_whole_batch(
        group, {.rows = {2, 3}, .rest = {2, 2}, .options = BatchNormOptions(4).affine(false)});
    expect_equals_whole_batch(group, {.rows = {2, 3},
                                      .rest = {2, 2},
                                      .options = BatchNormOptions(4).track_running_stats(false)});
  });
}

TEST(SyncBatchNormTest, ChannelsLastEqualsTheWholeBatchAndStaysChannelsLast) {
  test::ranks(2, [](const ProcessGroup& group) {
    expect_equals_whole_batch(
        group, {.rows = {2, 3}, .rest = {3, 5}, .format = at::MemoryFormat::ChannelsLast});
    expect_equals_whole_batch(
        group, {.rows = {2, 3}, .rest = {3, 2, 2}, .format = at::MemoryFormat::ChannelsLast3d});
  });
}

TEST(SyncBatchNormTest, GradientsAreThoseOfTheMeanWhenTheLossIsWeighedForDdp) {
  test::ranks(2, [](const ProcessGroup& group) {
    SyncBatchNorm norm(BatchNormOptions(2), group);
    torch::nn::Linear before(3, 2);
    torch::nn::BatchNorm1d whole_norm(2);
    torch::nn::Linear whole_before(3, 2);
    for (torch::nn::Module* module : std::initializer_list<torch::nn::Module*>{
             norm.get(), before.get(), whole_norm.get(), whole_before.get()}) {
      module->to(at::kDouble);
      randomise(*module);
    }
    torch::manual_seed(1);
    const at::Tensor x = at::randn({5, 3}, at::kDouble);
    const int64_t mine = group.rank() == 0 ? 2 : 3;
    // DDP: weight W / N_global, then the mean over ranks.
    const at::Tensor part = x.narrow(0, group.rank() == 0 ? 0 : 2, mine);
    (norm(before(part)).pow(3).sum() * (group.size() / 5.0)).backward();
    (whole_norm(whole_before(x)).pow(3).sum() / 5.0).backward();
    EXPECT_LE(difference(summed(group, before->weight.grad()) / group.size(),
                         whole_before->weight.grad()),
              kBound64);
    EXPECT_LE(
        difference(summed(group, norm->weight.grad()) / group.size(), whole_norm->weight.grad()),
        kBound64);
  });
}

// Mean 10,000, deviation 1: sums of squares in float32 would leave nothing of the variance. Squared
// differences keep it to float32's error in x itself, 1e4 * 2^-24 = 6e-4 per value.
TEST(SyncBatchNormTest, LargeMeansDoNotCancelTheVariance) {
  test::ranks(2, [](const ProcessGroup& group) {
    SyncBatchNorm norm(BatchNormOptions(3).momentum(1.0), group);
    torch::manual_seed(2);
    const at::Tensor x = at::randn({8, 3, 50}).add_(1e4);
    norm(x.narrow(0, 4 * group.rank(), 4));
    const at::Tensor expected = x.to(at::kDouble).permute({1, 0, 2}).reshape({3, -1}).var(1);
    EXPECT_LE(difference(norm->running_var, expected), 1e-3);
  });
}

// All inside is float32, so what comes out is rounded to bfloat16 once: 2^-8 of each value. 2e-5:
// some 100 roundings of float32 of values of size 1.
void expect_rounded_once(const at::Tensor& got, const at::Tensor& exact, const char* what) {
  EXPECT_EQ(got.scalar_type(), at::kBFloat16) << what;
  const at::Tensor error = (got.to(at::kDouble) - exact).abs();
  EXPECT_TRUE((error <= exact.abs() / 256 + 2e-5).all().item<bool>()) << what << ' ' << error;
}

// `type` of weight and bias.
void expect_bfloat16_equals_whole_batch(const ProcessGroup& group, at::ScalarType type) {
  SyncBatchNorm norm(BatchNormOptions(3), group);
  torch::nn::BatchNorm1d reference(3);
  reference->to(at::kDouble);
  torch::manual_seed(2);
  for (const char* name : {"weight", "bias"}) {
    const at::Tensor value = at::randn({3}).to(at::kBFloat16);
    norm->named_parameters()[name].set_data(value.to(type));
    reference->named_parameters()[name].set_data(value.to(at::kDouble));
  }
  const at::Tensor x = at::randn({6, 3, 5}).add_(3).to(at::kBFloat16);
  const at::Tensor dy = at::randn({6, 3, 5}).to(at::kBFloat16);
  const auto mine = [&](const at::Tensor& whole) { return whole.narrow(0, 3 * group.rank(), 3); };
  const at::Tensor part = mine(x).clone().requires_grad_();
  const at::Tensor whole = x.to(at::kDouble).requires_grad_();
  const at::Tensor y = norm(part);
  const at::Tensor whole_y = reference(whole);
  expect_rounded_once(y, mine(whole_y), "output");
  y.backward(mine(dy));
  whole_y.backward(dy.to(at::kDouble));
  expect_rounded_once(part.grad(), mine(whole.grad()), "input's gradient");
  for (const char* name : {"weight", "bias"}) {
    const at::Tensor gradient = norm->named_parameters()[name].grad();
    EXPECT_EQ(gradient.scalar_type(), type);
    // Each rank's part is rounded to its type.
    const at::Tensor parts = summed(group, gradient.abs().to(at::kDouble));
    const at::Tensor error =
        (summed(group, gradient.to(at::kDouble)) - reference->named_parameters()[name].grad())
            .abs();
    const double rounding = type == at::kBFloat16 ? 1.0 / 255 : 0;
    EXPECT_TRUE((error <= parts * rounding + 1e-4).all().item<bool>()) << name << ' ' << error;
  }
}

TEST(SyncBatchNormTest, BFloat16InputTakesFloatParameters) {
  test::ranks(
      2, [](const ProcessGroup& group) { expect_bfloat16_equals_whole_batch(group, at::kFloat); });
}

TEST(SyncBatchNormTest, BFloat16ParametersLeaveStatisticsInFloat) {
  test::ranks(2, [](const ProcessGroup& group) {
    expect_bfloat16_equals_whole_batch(group, at::kBFloat16);
  });
}

TEST(SyncBatchNormTest, CheckpointsAreBatchNorms) {
  test::ranks(2, [](const ProcessGroup& group) {
    torch::nn::BatchNorm2d source(4);
    randomise(*source);
    source->running_mean.fill_(3);
    std::stringstream file;
    torch::save(source, file);
    SyncBatchNorm norm(BatchNormOptions(4), group);
    torch::load(norm, file);
    const auto state = norm->named_parameters();
    EXPECT_TRUE(at::equal(state["weight"], source->weight));
    EXPECT_TRUE(at::equal(norm->running_mean, source->running_mean));
  });
}

TEST(SyncBatchNormTest, BadInputIsExplainedOnEveryRank) {
  test::ranks(2, [](const ProcessGroup& group) {
    SyncBatchNorm norm(BatchNormOptions(4), group);
    EXPECT_NE(test::message_of<c10::ValueError>([&] {
                norm(at::ones({2, 3}));
              }).find("expected an input [B, 4, ...], got [2, 3]"),
              std::string::npos);
    EXPECT_NE(test::message_of<c10::ValueError>([&] {
                norm(at::ones({group.rank(), 4}));
              }).find("more than one value per channel on all ranks together, got 1"),
              std::string::npos);
    norm(at::ones({1, 4}));  // two in all are enough
    at::Tensor x = at::randn({3, 4}).requires_grad_();
    EXPECT_NE(test::message_of<c10::ValueError>([&] {
                torch::autograd::grad({norm(x).square().sum()}, {x}, {}, {}, /*create_graph=*/true);
              }).find("no second derivative"),
              std::string::npos);
  });
}

// 1 rank: the union is its own batch.
TEST(ConvertSyncBatchNormTest, OneRankComputesWhatItDidBefore) {
  const ProcessGroup group(comm::RankInfo{});
  TypedImpl model{BatchNormOptions(4)};
  TypedImpl before{BatchNormOptions(4)};
  convert_sync_batchnorm(model, group);
  const at::Tensor x = at::randn({6, 4, 5}, at::kDouble);
  EXPECT_TRUE(at::equal(model.forward(x), before.forward(x)));
  EXPECT_TRUE(at::equal(model.one->running_var, before.one->running_var));
}

// As under a wrapper with param_dtype, on one rank and in evaluation.
TEST(ConvertSyncBatchNormTest, SixteenBitParametersBesideFloatStatistics) {
  const ProcessGroup group(comm::RankInfo{});
  torch::nn::BatchNorm2d converted(4), reference(4);
  convert_sync_batchnorm(*converted, group);
  SyncBatchNorm layer(BatchNormOptions(4), group);
  for (auto* parameter : {&converted->weight, &converted->bias, &layer->weight, &layer->bias})
    parameter->set_data(parameter->detach().to(at::kBFloat16));
  const at::Tensor x = at::randn({6, 4, 5, 3}).to(at::kBFloat16);
  for (const bool training : {true, false}) {
    for (torch::nn::Module* module :
         std::initializer_list<torch::nn::Module*>{&*converted, &*layer, &*reference})
      module->train(training);
    const at::Tensor expected = reference(x.to(at::kFloat));
    const std::vector<at::Tensor> outputs{converted(x), layer(x)};
    for (const at::Tensor& found : outputs) {
      EXPECT_EQ(found.scalar_type(), at::kBFloat16);
      EXPECT_TRUE(at::allclose(found.to(at::kFloat), expected, 1.0 / 128, 1e-2)) << training;
    }
    outputs[0].sum().backward();
    EXPECT_EQ(converted->weight.grad().scalar_type(), at::kBFloat16);
  }
  EXPECT_EQ(converted->running_mean.scalar_type(), at::kFloat);
}

struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    to(at::kDouble);
    randomise(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return any.forward(own(stack->forward(norm(x)))); }
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(3));
  torch::nn::Sequential stack =
      register_module("stack", torch::nn::Sequential({{"linear", torch::nn::Linear(3, 3)},
                                                      {"norm", torch::nn::BatchNorm1d(3)}}));
  SyncBatchNorm own =
      register_module("own", SyncBatchNorm(BatchNormOptions(3), ProcessGroup(comm::RankInfo{})));
  torch::nn::AnyModule any{
      register_module("any", std::make_shared<torch::nn::BatchNorm1dImpl>(BatchNormOptions(3)))};
};

// Four layers in a row, each of which multiplies what its input differs by with weight / deviation,
// of 6 values some 3.
constexpr double kChainBound = 50 * kBound64;

// Trains `model` on this rank's rows of a batch of 6, and `whole` on all of it.
void expect_step_equals_one_process(const ProcessGroup& group, MixedImpl& model, MixedImpl& whole) {
  const at::Tensor x = at::randn({6, 3}, at::kDouble);
  const auto mine = [&](const at::Tensor& t) {
    const int64_t rows = group.rank() == 0 ? 2 : 4;
    return t.narrow(0, group.rank() == 0 ? 0 : 2, rows);
  };
  const at::Tensor y = model.forward(mine(x));
  const at::Tensor whole_y = whole.forward(x);
  EXPECT_LE(difference(y, mine(whole_y)), kChainBound);
  y.pow(3).sum().backward();
  whole_y.pow(3).sum().backward();
  for (const auto& item : whole.named_parameters()) {
    const at::Tensor sum = summed(group, model.named_parameters()[item.key()].grad());
    EXPECT_LE(difference(sum, item.value().grad()),
              kChainBound * std::max(1.0, item.value().grad().abs().max().item<double>()))
        << item.key();
  }
  for (const auto& item : whole.named_buffers())
    EXPECT_LE(difference(model.named_buffers()[item.key()], item.value()), kChainBound)
        << item.key();
  model.zero_grad();
  whole.zero_grad();
}

TEST(ConvertSyncBatchNormTest, EveryHolderIsConvertedAndKeepsItsModuleAndTensors) {
  test::ranks(2, [](const ProcessGroup& group) {
    MixedImpl model;
    MixedImpl whole;
    const auto before = model.named_parameters();
    const auto buffers = model.named_buffers();
    convert_sync_batchnorm(model, group);
    ASSERT_EQ(before.keys(), model.named_parameters().keys());
    ASSERT_EQ(buffers.keys(), model.named_buffers().keys());
    for (const auto& item : model.named_parameters())
      EXPECT_TRUE(item.value().is_same(before[item.key()])) << item.key();
    for (const auto& item : model.named_buffers())
      EXPECT_TRUE(item.value().is_same(buffers[item.key()])) << item.key();
    EXPECT_NE(model.stack[1]->as<torch::nn::BatchNorm1d>(), nullptr);
    torch::manual_seed(4);
    for (int step = 0; step < 2; ++step) expect_step_equals_one_process(group, model, whole);
  });
}

TEST(ConvertSyncBatchNormTest, ItOutlivesToAndLoad) {
  test::ranks(2, [](const ProcessGroup& group) {
    const auto model = std::make_shared<MixedImpl>();
    MixedImpl whole;
    convert_sync_batchnorm(*model, group);
    model->to(at::kFloat);
    model->to(at::kDouble);
    std::stringstream file;
    torch::save(std::make_shared<MixedImpl>(), file);
    torch::load(model, file);
    torch::manual_seed(4);
    expect_step_equals_one_process(group, *model, whole);
  });
}

// Local: neither waits for another rank, and both compute what libtorch does.
TEST(ConvertSyncBatchNormTest, OtherModulesAndClonesStayLocal) {
  test::ranks(2, [](const ProcessGroup& group) {
    const auto model = std::make_shared<TypedImpl>(BatchNormOptions(4));
    convert_sync_batchnorm(*model, group);
    if (group.rank() == 0) {
      torch::nn::BatchNorm1d other(4);
      torch::nn::BatchNorm1d copy(
          std::dynamic_pointer_cast<torch::nn::BatchNorm1dImpl>(model->one->clone()));
      copy->to(at::kFloat);
      const at::Tensor x = at::randn({5, 4}).add_(3);
      const at::Tensor expected = (x - x.mean(0)) * (x.var(0, false) + 1e-5).rsqrt();
      for (auto* local : {&other, &copy})
        EXPECT_LE(difference((*local)->forward(x), expected), 1e-5);
      EXPECT_TRUE(at::equal(other->running_mean, copy->running_mean));
    }
    EXPECT_EQ(group.all_reduce_sum(1), 2);
  });
}

TEST(ConvertSyncBatchNormTest, EachModelSpansItsOwnGroupAndTheLastCallCounts) {
  test::ranks(3, [](const ProcessGroup& world) {
    const auto pair = world.subgroup({0, 1}, "pair");
    const Case all{.rows = {2, 3, 4}, .rest = {2}};
    const auto wide = std::make_shared<TypedImpl>(all.options);
    const auto narrow = std::make_shared<TypedImpl>(all.options);
    convert_sync_batchnorm(*wide, world);
    if (world.rank() < 2) {
      const Case two{.rows = {3, 2}, .rest = {}};
      convert_sync_batchnorm(*narrow, world);
      convert_sync_batchnorm(*narrow, pair);
      expect_equals_whole_batch(pair, two, *narrow->one,
                                [&](const at::Tensor& x) { return narrow->forward(x); });
    }
    expect_equals_whole_batch(world, all, *wide->one,
                              [&](const at::Tensor& x) { return wide->forward(x); });
  });
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    to(at::kDouble);
    randomise(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return head(norm(conv(x)).relu().mean({2, 3})); }
  torch::nn::Conv2d conv =
      register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3)));
  torch::nn::BatchNorm2d norm = register_module("norm", torch::nn::BatchNorm2d(4));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(4, 1));
};
TORCH_MODULE(Net);

TEST(ConvertSyncBatchNormTest, UnderDdpTrainingEqualsOneProcess) {
  test::ranks(3, [](const ProcessGroup& group) {
    Net net;
    Net whole;
    convert_sync_batchnorm(*net, group);
    DistributedDataParallel<Net> ddp(net, group);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD whole_optimizer(whole->parameters(),
                                      torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::manual_seed(8);
    for (int step = 0; step < 4; ++step) {
      const at::Tensor x = at::randn({6, 2, 5, 5}, at::kDouble);
      (ddp(x.narrow(0, 2 * group.rank(), 2)).square().mean()).backward();
      whole->forward(x).square().mean().backward();
      for (auto* each : {&optimizer, &whole_optimizer}) {
        each->step();
        each->zero_grad();
      }
    }
    for (const auto& item : whole->named_parameters())
      EXPECT_LE(difference(net->named_parameters()[item.key()], item.value()), 1e-11) << item.key();
    for (const auto& item : whole->named_buffers())
      EXPECT_LE(difference(net->named_buffers()[item.key()], item.value()), 1e-11) << item.key();
  });
}

TEST(ConvertSyncBatchNormTest, InferenceModeIsNoWayPastIt) {
  test::ranks(2, [](const ProcessGroup& group) {
    TypedImpl model{BatchNormOptions(4).momentum(1.0)};
    convert_sync_batchnorm(model, group);
    const c10::InferenceMode inference;
    model.forward(at::full({2, 4}, 1.0 + group.rank(), at::kDouble));
    EXPECT_LE(difference(model.one->running_mean, at::full({4}, 1.5, at::kDouble)), kBound64);
  });
}

TEST(ConvertSyncBatchNormTest, BadInputsAndOwnersAreRefusedByName) {
  test::ranks(2, [](const ProcessGroup& group) {
    TypedImpl model{BatchNormOptions(4)};
    convert_sync_batchnorm(model, group);
    EXPECT_NE(test::message_of<c10::ValueError>([&] {
                model.forward(at::ones({2, 3}, at::kDouble));
              }).find("expected an input [B, 4, ...], got [2, 3]"),
              std::string::npos);
    EXPECT_NE(test::message_of<c10::Error>([&] {
                model.forward(at::ones({1, 4}, at::kDouble));
              }).find("Expected more than 1 value per channel"),
              std::string::npos);
    torch::nn::BatchNorm1dImpl nobodys(BatchNormOptions(3).track_running_stats(false));
    EXPECT_NE(test::message_of<c10::ValueError>([&] {
                convert_sync_batchnorm(nobodys, group);
              }).find("to be held by a shared_ptr"),
              std::string::npos);
  });
}

TEST(SyncBatchNormTest, AfterTheGroupIsClosedTrainingIsRefused) {
  test::ranks(2, [](const ProcessGroup& world) {
    auto group = world.subgroup({0, 1}, "pair");
    SyncBatchNorm norm(BatchNormOptions(3), group);
    const at::Tensor x = at::randn({4, 3}).requires_grad_(true);
    const at::Tensor loss = norm(x).sum();
    std::exchange(group, {}).close();
    for (const auto& call :
         std::vector<std::function<void()>>{[&] { loss.backward(); }, [&] { norm(x); }})
      EXPECT_EQ(test::message_of<c10::ValueError>(call),
                "expected an open group, but \"pair\" was closed");
    norm->eval();
    EXPECT_EQ(norm(x).sizes(), x.sizes());
    std::ostringstream text;
    text << *norm;
    EXPECT_NE(text.str().find("ranks=2"), std::string::npos) << text.str();
  });
}

TEST(SyncBatchNormTest, OnOneRankItIsLibtorchsBatchNorm) {
  SyncBatchNorm ours(BatchNormOptions(3), ProcessGroup(comm::RankInfo{}));
  torch::nn::BatchNorm1d theirs(3);
  const at::Tensor x = at::randn({4, 3});
  EXPECT_TRUE(at::equal(ours(x), theirs(x)));
  EXPECT_TRUE(at::equal(ours->running_var, theirs->running_var));
  const auto copy = std::dynamic_pointer_cast<SyncBatchNormImpl>(ours->clone());
  EXPECT_TRUE(at::equal(copy->forward(x), theirs(x)));
}

}  // namespace sync_batch_norm_test
}  // namespace cohort::parallel
