// SPDX-License-Identifier: Apache-2.0
// Models that are cut between ranks train, save and load as one process, in float64.
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>

#include "cohort/base/tensor_part.h"
#include "cohort/parallel/clip_grad.h"
#include "cohort/parallel/muon.h"
#include "cohort/parallel/tensor_parallel.h"
#include "cohort/train/model_checkpoint.h"

#include "tests/support/message_of.h"
#include "tests/support/ranks.h"
#include "tests/support/shared_folder.h"

namespace cohort::checkpoint {
namespace tensor_parallel_training_test {

using comm::ProcessGroup;
using parallel::DeviceMesh;

constexpr int64_t kInner = 7;  // uneven on 2 and 3 ranks
constexpr int kRows = 8;
// AdamW divides what 1e-16 is in a gradient by its size; a wrong one moves parameters by 1e-2.
constexpr double kBound = 1e-8;

const parallel::TensorParallelPlan kPlan{{"fused", {.dim = 0, .blocks = 2}},
                                         {"fused_bias", {.dim = 0, .blocks = 2}},
                                         {"second", {.dim = 1}},
                                         {"seen", {.dim = 0}}};

// Two matrices in one, cut by their outputs, and one cut by its inputs; a buffer of what is cut,
// one that is not, a number, a frozen parameter, and one that uneven parts before it make ranks shard
// at another element.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(const ProcessGroup& tensor, double first = 0.5, int64_t inner = kInner)
      : group(tensor) {
    const auto wave = [&](at::IntArrayRef shape) {
      const int64_t count = c10::multiply_integers(shape);
      return at::arange(count, at::kDouble).add(first).sin().view(shape);
    };
    fused = register_parameter("fused", own(wave({2 * inner, 5}), 0, 2));
    fused_bias = register_parameter("fused_bias", own(wave({2 * inner}), 0, 2));
    second = register_parameter("second", own(wave({3, inner}), 1));
    bias = register_parameter("bias", wave({3}));
    number = register_parameter("number", at::full({}, first + 1, at::kDouble));
    scale = register_parameter("scale", wave({50}) + 2);
    frozen = register_parameter("frozen", wave({3}), /*requires_grad=*/false);
    seen = register_buffer("seen", own(wave({inner}), 0));
    steps = register_buffer("steps", at::full({}, 3, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto halves = parallel::column_parallel_linear(x, fused, fused_bias, group).chunk(2, -1);
    const at::Tensor h = at::tanh(halves[0]) * at::sigmoid(halves[1]) + seen;
    return parallel::row_parallel_linear(h, second, bias, group) * number * scale.mean() + frozen;
  }

  at::Tensor own(const at::Tensor& whole, int64_t dim, int64_t blocks = 1) const {
    std::vector<at::Tensor> pieces;
    for (const at::Tensor& block : whole.chunk(blocks, dim)) {
      const auto [begin, end] = cut_of(block.size(dim), group.rank(), group.size());
      pieces.push_back(block.narrow(dim, begin, end - begin));
    }
    return at::cat(pieces, dim);
  }

  ProcessGroup group;
  at::Tensor fused, fused_bias, second, bias, number, scale, frozen, seen, steps;
};
TORCH_MODULE(Net);

Net plain_net(double first = 0.5, int64_t inner = kInner) {
  return Net(ProcessGroup(comm::RankInfo{}), first, inner);
}

// Of the rows of batch `step`, those of a rank of `data`; the mean over ranks is the batch's.
template <class Model>
at::Tensor loss_of(Model& model, int step, const ProcessGroup& data) {
  const at::Tensor all = at::arange(kRows * 5, at::kDouble).add(step).cos().view({kRows, 5});
  const int64_t count = kRows / data.size();
  return model(all.narrow(0, data.rank() * count, count)).square().sum() / count;
}

// Makes updates [first, last), and returns the norms before clipping.
template <class Model>
std::vector<double> train(Model& model, torch::optim::Optimizer& optimizer, int first, int last,
                          const ProcessGroup& data) {
  std::vector<double> norms;
  for (int step = first; step < last; ++step) {
    loss_of(model, step, data).backward();
    norms.push_back(parallel::clip_grad_norm_(model, 0.5));
    EXPECT_GT(norms.back(), 0.5);
    optimizer.step();
    optimizer.zero_grad();
  }
  return norms;
}

using Plain = parallel::DistributedDataParallel<Net>;
using torch::optim::AdamW;

// One process with its optimizer.
struct OneProcess {
  explicit OneProcess(double first = 0.5, int64_t inner = kInner)
      : model(plain_net(first, inner), alone) {}
  std::vector<double> run(int first, int last) {
    return train(model, optimizer, first, last, alone);
  }
  const ProcessGroup alone{comm::RankInfo{}};
  Plain model;
  AdamW optimizer{model.parameters(), 0.02};
};

void expect_equal(const Net& found, const Net& expected, const std::string& what) {
  for (const auto& item : expected->named_parameters())
    EXPECT_TRUE(found->named_parameters()[item.key()].allclose(item.value(), kBound, kBound))
        << what << ": " << item.key();
  for (const auto& item : expected->named_buffers())
    EXPECT_TRUE(at::equal(found->named_buffers()[item.key()], item.value()))
        << what << ": " << item.key();
}

void expect_norms(const std::vector<double>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], kBound);
}

// Three updates of the ranks, then one of one process that resumes, then one of the ranks that
// resume from that.
template <class Model>
void expect_one_processs_training(Model& model, const ProcessGroup& data, const ProcessGroup& world,
                                  const std::string& path) {
  AdamW optimizer(model.parameters(), 0.02);
  OneProcess expected;
  expect_norms(train(model, optimizer, 0, 3, data), expected.run(0, 3));
  save(model, optimizer, path, {.step = 3});
  OneProcess resumed(7);
  resumed.run(9, 10);  // What it has is replaced.
  load(resumed.model, resumed.optimizer, path);
  expect_equal(resumed.model.module(), expected.model.module(), "loaded by one process");
  expect_norms(resumed.run(3, 4), expected.run(3, 4));
  expect_equal(resumed.model.module(), expected.model.module(), "trained by one process");

  if (world.rank() == 0) save(resumed.model, resumed.optimizer, path + "-plain", {.step = 4});
  world.barrier("the plain checkpoint");
  load(model, optimizer, path + "-plain");
  expect_norms(train(model, optimizer, 4, 5, data), expected.run(4, 5));
  auto saving = async_save(model, optimizer, path, {.step = 5});
  saving.wait();
  load(resumed.model, resumed.optimizer, path);
  expect_equal(resumed.model.module(), expected.model.module(), "of ranks that resumed");
}

void expect_every_wrapper(const ProcessGroup& world, int tensor, const std::string& folder) {
  const DeviceMesh mesh = init_device_mesh(world, {{"dp_shard", -1}, {"tp", tensor}});
  const DeviceMesh hybrid =
      init_device_mesh(world, {{"dp_replicate", -1}, {"dp_shard", 1}, {"tp", tensor}});
  const ProcessGroup data = mesh.group("dp_shard");
  const auto net = [&] { return Net(mesh.group("tp")); };
  {
    parallel::DistributedDataParallel<Net> model(net(), mesh, {.tensor_parallel = kPlan});
    expect_one_processs_training(model, data, world, folder + "/ddp");
  }
  {
    parallel::FullyShardedDataParallel<Net> model(net(), mesh["dp_shard"],
                                                  {.tensor_parallel = kPlan});
    expect_one_processs_training(model, data, world, folder + "/fsdp");
  }
  {
    parallel::FullyShardedDataParallel<Net> model(net(), hybrid, {.tensor_parallel = kPlan});
    expect_one_processs_training(model, data, world, folder + "/fsdp-hybrid");
  }
  for (const auto strategy : {parallel::Strategy::kDdp, parallel::Strategy::kZero1,
                              parallel::Strategy::kZero2, parallel::Strategy::kHybrid}) {
    SCOPED_TRACE(parallel::to_string(strategy));
    parallel::ParallelModel<Net> model(net(),
                                       strategy == parallel::Strategy::kHybrid ? hybrid : mesh,
                                       {.strategy = strategy, .tensor_parallel = kPlan});
    expect_one_processs_training(model, data, world, folder + "/" + to_string(strategy));
  }
}

TEST(TensorParallelTrainingTest, TwoRanksOfOneModelTrainAndSaveAsOneProcess) {
  const test::SharedFolder folder;
  test::ranks(2, [&](const ProcessGroup& world) { expect_every_wrapper(world, 2, folder / "2"); });
}

TEST(TensorParallelTrainingTest, ThreeRanksOfOneModelTrainAndSaveAsOneProcess) {
  const test::SharedFolder folder;
  test::ranks(3, [&](const ProcessGroup& world) { expect_every_wrapper(world, 3, folder / "3"); });
}

TEST(TensorParallelTrainingTest, TwoModelsOfTwoRanksTrainAndSaveAsOneProcess) {
  const test::SharedFolder folder;
  test::ranks(4, [&](const ProcessGroup& world) { expect_every_wrapper(world, 2, folder / "4"); });
}

// Three steps of Muon on the two matrices that are cut, against one process.
template <class Model>
void expect_muon_of_one_process(Model& model, const ProcessGroup& data, int64_t inner) {
  const auto matrices = [](std::vector<parallel::LocalShard> shards) {
    std::erase_if(shards, [](const auto& each) { return each.shape.size() < 2; });
    return shards;
  };
  const auto run = [&](auto& any, parallel::Muon& muon, const ProcessGroup& of) {
    for (int step = 0; step < 3; ++step) {
      for (const at::Tensor& parameter : any.parameters()) parameter.mutable_grad().reset();
      loss_of(any, step, of).backward();
      muon.step(0.02);
    }
  };
  const ModelState state = state_of(model);
  parallel::Muon parts(matrices(state.trained), data,
                       {.weight_decay = 0.1, .tensor_parallel = model.ranks().tensor_parallel});
  run(model, parts, data);
  OneProcess expected(0.5, inner);
  parallel::Muon whole(matrices(state_of(expected.model).trained), expected.alone,
                       {.weight_decay = 0.1});
  run(expected.model, whole, expected.alone);
  const auto guard = model.unsharded();
  Net& net = model.module();
  Net& plain = expected.model.module();
  EXPECT_TRUE(net->fused.allclose(net->own(plain->fused, 0, 2), kBound, kBound));
  EXPECT_TRUE(net->second.allclose(net->own(plain->second, 1), kBound, kBound));
  EXPECT_FALSE(plain->second.allclose(plain_net(0.5, inner)->second, 1e-2, 1e-2))
      << "nothing was trained";
}

TEST(TensorParallelTrainingTest, MuonTakesWholeMatricesUnderEveryWrapper) {
  const auto body = [](const ProcessGroup& world) {
    const DeviceMesh mesh = init_device_mesh(world, {{"dp", -1}, {"tp", 2}});
    const ProcessGroup data = mesh.group("dp");
    for (const auto strategy : {parallel::Strategy::kDdp, parallel::Strategy::kZero1,
                                parallel::Strategy::kZero2, parallel::Strategy::kZero3}) {
      SCOPED_TRACE(parallel::to_string(strategy));
      parallel::ParallelModel<Net> model(Net(mesh.group("tp")), mesh,
                                         {.strategy = strategy, .tensor_parallel = kPlan});
      expect_muon_of_one_process(model, data, kInner);
      if (strategy != parallel::Strategy::kZero3 || data.size() == 1) continue;
      const std::string refusal = test::message_of<c10::ValueError>([&] {
        std::vector<parallel::LocalShard> matrices = state_of(model).trained;
        std::erase_if(matrices, [](const auto& each) { return each.shape.size() < 2; });
        parallel::Muon(matrices, world, {.tensor_parallel = model.ranks().tensor_parallel});
      });
      EXPECT_NE(refusal.find("such as mesh.group(\"dp\"), got one that holds"), std::string::npos)
          << refusal << " of ranks of two parts";
    }
  };
  test::ranks(2, body);
  test::ranks(4, body);
}

TEST(TensorParallelTrainingTest, MuonTakesAMatrixOfWhichOnePartIsEmpty) {
  const auto body = [](const ProcessGroup& world) {
    const DeviceMesh mesh = init_device_mesh(world, {{"dp", -1}, {"tp", 2}});
    for (const auto strategy : {parallel::Strategy::kDdp, parallel::Strategy::kZero1,
                                parallel::Strategy::kZero2, parallel::Strategy::kZero3}) {
      SCOPED_TRACE(parallel::to_string(strategy));
      parallel::ParallelModel<Net> model(Net(mesh.group("tp"), 0.5, 1), mesh,
                                         {.strategy = strategy, .tensor_parallel = kPlan});
      expect_muon_of_one_process(model, mesh.group("dp"), 1);
    }
  };
  test::ranks(2, body);
  test::ranks(4, body);
}

TEST(TensorParallelTrainingTest, PlansThatDoNotFitAreRefusedOnEveryRank) {
  test::ranks(2, [](const ProcessGroup& world) {
    const DeviceMesh mesh = init_device_mesh(world, {{"dp", 1}, {"tp", 2}});
    const auto refused = [&](const parallel::TensorParallelPlan& plan) {
      return test::message_of<c10::ValueError>([&] {
        parallel::DistributedDataParallel<Net> model(Net(world), mesh, {.tensor_parallel = plan});
      });
    };
    const auto changed = [](const std::string& name, const parallel::TensorCut& cut) {
      parallel::TensorParallelPlan plan = kPlan;
      plan[name] = cut;
      return plan;
    };
    EXPECT_EQ(refused(changed("third", {})), "tensor_parallel: the model has no parameter third");
    EXPECT_EQ(refused(changed("second", {.dim = 2})),
              "tensor_parallel: second: expected a dimension of [3, " +
                  std::to_string(world.rank() == 0 ? 3 : 4) +
                  "] and at least 1 block, got dimension 2 and 1 blocks");
    EXPECT_EQ(refused(changed("fused", {.dim = 0})),
              "tensor_parallel: fused, cut along dimension 0 in 1 blocks: expected the ranks to "
              "have [7, 7] of 14, got [6, 8]");
    parallel::TensorParallelPlan without = kPlan;
    without.erase("second");
    EXPECT_EQ(refused(without),
              "the tensor-parallel models differ between ranks: rank 1 has second, shape [3, 4] "
              "where rank 0 has second, shape [3, 3]");
    const ProcessGroup alone(comm::RankInfo{});
    EXPECT_EQ(test::message_of<c10::ValueError>([&] {
                parallel::DistributedDataParallel<Net> model(
                    Net(alone, world.rank()), mesh,
                    {.tensor_parallel = parallel::TensorParallelPlan()});
              }),
              "tensor_parallel: bias is not in the plan, and differs between the ranks along "
              "\"tp\": name it if it is cut; else give it the same values, by the same seed");
    EXPECT_EQ(
        refused(changed("scale", {})),
        "tensor_parallel: scale is in the plan, and all ranks along \"tp\" have the same [50]: "
        "expected each to have its own part of dimension 0, by cut_of; take it out of the plan "
        "if each has the whole, or set equal_parts if they are to begin equal");
    EXPECT_EQ(refused(changed("scale", {.equal_parts = true})), "nothing was thrown");
    const auto expected = [](const std::string& got) {
      return "tensor_parallel: expected a mesh with an axis \"tp\", got " + got;
    };
    EXPECT_EQ(test::message_of<c10::ValueError>(
                  [&] { Plain model(plain_net(), world, {.tensor_parallel = kPlan}); }),
              expected("a process group"));
    EXPECT_EQ(test::message_of<c10::ValueError>([&] {
                Plain model(plain_net(), init_device_mesh(world, {{"dp", 2}}),
                            {.tensor_parallel = kPlan});
              }),
              expected("dp 2"));
  });
}

}  // namespace tensor_parallel_training_test
}  // namespace cohort::checkpoint
