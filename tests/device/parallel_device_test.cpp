// SPDX-License-Identifier: Apache-2.0
// What stands beside the wrappers, on a device whose memory the host may not touch: batch
// normalisation over ranks, loss scaling, activation checkpoints, tensor parallelism, Muon.
#include <c10/util/accumulate.h>
#include <gtest/gtest.h>
#include <limits>
#include <torch/nn/functional/dropout.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/base/tensor_part.h"
#include "cohort/parallel/activation_checkpoint.h"
#include "cohort/parallel/distributed_data_parallel.h"
#include "cohort/parallel/grad_scaler.h"
#include "cohort/parallel/muon.h"
#include "cohort/parallel/sharding/fully_sharded_data_parallel.h"
#include "cohort/parallel/sync_batch_norm.h"
#include "cohort/parallel/tensor_parallel.h"

#include "tests/device/same_bits.h"

namespace cohort {
namespace parallel_device_test {

using comm::ProcessGroup;
using parallel::LocalShard;
using test::Results;

at::Tensor waves(at::IntArrayRef sizes, double step, const ProcessGroup& group) {
  const int64_t count = c10::multiply_integers(sizes);
  return at::arange(count, at::kFloat).mul(step).cos().view(sizes).to(group.device());
}

void add_gradients(const torch::nn::Module& module, Results& results) {
  for (const auto& parameter : module.parameters()) results.push_back(parameter.grad());
}

// Two batches; rank 1 has none in the second.
template <class Norm>
Results normalised(const ProcessGroup& group, Norm norm, at::ScalarType type) {
  norm->to(group.device());
  Results results;
  for (int step = 0; step < 2; ++step) {
    const int64_t rows = step == 1 && group.rank() == 1 ? 0 : 3 + group.rank();
    const at::Tensor x = waves({rows, 5, 4}, 0.7 + group.rank() + step, group).to(type).detach();
    x.set_requires_grad(true);
    const at::Tensor y = norm(x);
    y.pow(3).sum().backward();
    results.insert(results.end(), {y.detach(), x.grad()});
  }
  add_gradients(*norm, results);
  for (const auto& buffer : norm->buffers()) results.push_back(buffer);
  norm->eval();
  results.push_back(norm(waves({2, 5, 4}, 0.3, group).to(type)).detach());
  return results;
}

TEST(ParallelDeviceTest, BatchNormalisationOverRanksHasTheBitsOfTheCpu) {
  test::device_ranks(2, [](const ProcessGroup& group) {
    const ProcessGroup cpu = test::on_cpu(group);
    using torch::nn::BatchNormOptions;
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      for (const auto& options :
           {BatchNormOptions(5), BatchNormOptions(5).momentum(std::nullopt),
            BatchNormOptions(5).track_running_stats(false), BatchNormOptions(5).affine(false)}) {
        const auto own = [&](const ProcessGroup& on) {
          return normalised(on, parallel::SyncBatchNorm(options, on), type);
        };
        test::expect_same_bits(own(group), own(cpu));
      }
      const auto converted = [&](const ProcessGroup& on) {
        torch::nn::BatchNorm1d norm(5);
        parallel::convert_sync_batchnorm(*norm, on);
        return normalised(on, norm, type);
      };
      test::expect_same_bits(converted(group), converted(cpu));
    }
  });
}

TEST(ParallelDeviceTest, BatchNormalisationWaitsForTheDeviceToCountBatchesOnly) {
  test::device_ranks(2, [](const ProcessGroup& group) {
    for (const bool cumulative : {false, true}) {
      auto options = torch::nn::BatchNormOptions(5);
      if (cumulative) options.momentum(std::nullopt);
      parallel::SyncBatchNorm norm(options, group);
      norm->to(group.device());
      const at::Tensor x = waves({4, 5}, 0.7 + group.rank(), group).set_requires_grad(true);
      test::reset_device_counts();
      norm(x).pow(3).sum().backward();
      const test::DeviceCounts counts = test::device_counts();
      EXPECT_EQ(counts.synchronisations, cumulative ? 1 : 0);
      EXPECT_EQ(counts.host_to_device + counts.device_to_host, 0);
    }
  });
}

// Gradients of two types; in step 1 rank 1's overflow.
TEST(ParallelDeviceTest, LossScalingReadsOneNumberBackAStep) {
  test::device_ranks(2, [](const ProcessGroup& group) {
    const auto run = [](const ProcessGroup& on) {
      parallel::GradScaler scaler(on, {.init_scale = 256, .growth_interval = 2});
      const at::Tensor a = waves({7}, 0.3, on), b = waves({5}, 0.7, on).to(at::kDouble);
      std::vector<at::Tensor> parameters{a.set_requires_grad(true), b.set_requires_grad(true)};
      Results results;
      for (int step = 0; step < 4; ++step) {
        for (const at::Tensor& each : parameters) each.mutable_grad().reset();
        at::Tensor loss = (a.pow(2).sum() + b.pow(3).sum()) * (1 + on.rank());
        if (step == 1 && on.rank() == 1) loss = loss * std::numeric_limits<float>::infinity();
        scaler.scale(loss).backward();
        test::reset_device_counts();
        EXPECT_EQ(scaler.unscale(parameters), step != 1);
        scaler.update();
        const test::DeviceCounts counts = test::device_counts();
        const int64_t one = on.device().is_cpu() ? 0 : 1;
        EXPECT_EQ(counts.synchronisations, one);
        EXPECT_EQ(counts.device_to_host, one);
        EXPECT_EQ(counts.host_to_device, 0);
        results.push_back(at::full({}, scaler.scale(), at::kDouble));
        if (step == 1) continue;  // Not a number.
        for (const at::Tensor& each : parameters) results.push_back(each.grad());
      }
      return results;
    };
    test::expect_same_bits(run(group), run(test::on_cpu(group)));
  });
}

// The body draws random numbers: the second run must draw the same ones.
TEST(ParallelDeviceTest, AnActivationCheckpointHasTheBitsOfAPlainCall) {
  const auto run = [](at::Device device, bool checkpointed) {
    torch::manual_seed(5);
    torch::nn::Linear layer(6, 6);
    layer->to(device);
    const auto body = [&layer](const at::Tensor& x) {
      return torch::nn::functional::dropout(at::gelu(layer(x)));
    };
    const at::Tensor x = at::arange(24, at::kFloat).cos().view({4, 6}).to(device);
    x.set_requires_grad(true);
    at::Tensor y = checkpointed ? parallel::activation_checkpoint(
                                      parallel::ActivationCheckpointOptions{}, body, x)
                                : body(x);
    y = y * at::rand_like(y);
    test::reset_device_counts();
    y.pow(2).sum().backward();
    EXPECT_EQ(test::device_counts().synchronisations, 0);
    Results results{y.detach(), x.grad(), at::rand({2}, at::TensorOptions(device))};
    add_gradients(*layer, results);
    return results;
  };
  const Results expected = run(at::kCPU, false);
  test::expect_same_bits(run(test::second_device(), true), expected);
  test::expect_same_bits(run(test::second_device(), false), expected);
}

constexpr int64_t kVocabulary = 11, kWidth = 6;

// Embeds, two products, and the loss of the embedding's own table, each cut between the ranks.
struct CutImpl : torch::nn::Module {
  explicit CutImpl(const ProcessGroup& group) : group_(group) {
    torch::manual_seed(7);
    const auto own = [&](const at::Tensor& whole, int64_t dim) {
      const auto [begin, end] = cut_of(whole.size(dim), group.rank(), group.size());
      return whole.narrow(dim, begin, end - begin).clone().to(group.device());
    };
    table = register_parameter("table", own(at::randn({kVocabulary, kWidth}), 0));
    up = register_parameter("up", own(at::randn({9, kWidth}), 0));
    up_bias = register_parameter("up_bias", own(at::randn({9}), 0));
    down = register_parameter("down", own(at::randn({kWidth, 9}), 1));
    down_bias = register_parameter("down_bias", at::randn({kWidth}).to(group.device()));
  }
  parallel::VocabularyLoss forward(const at::Tensor& ids, const at::Tensor& labels) {
    using namespace parallel;
    const at::Tensor x = vocabulary_parallel_embedding(table, ids, kVocabulary, group_);
    const at::Tensor y = at::gelu(column_parallel_linear(x, up, up_bias, group_));
    const at::Tensor z = row_parallel_linear(y, down, down_bias, group_);
    return vocabulary_parallel_cross_entropy(z, table, labels, 0.1, kVocabulary, group_);
  }
  at::Tensor table, up, up_bias, down, down_bias;

 private:
  ProcessGroup group_;
};
TORCH_MODULE(Cut);

const parallel::TensorParallelPlan kPlan{
    {"table", {.dim = 0}}, {"up", {.dim = 0}}, {"up_bias", {.dim = 0}}, {"down", {.dim = 1}}};

struct LossImpl : torch::nn::Module {
  explicit LossImpl(const ProcessGroup& group) : cut(register_module("cut", Cut(group))) {}
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& labels) {
    return cut->forward(ids, labels).loss;
  }
  Cut cut;
};
TORCH_MODULE(Loss);

parallel::TensorParallelPlan plan_of_loss() {
  parallel::TensorParallelPlan plan;
  for (const auto& [name, cut] : kPlan) plan["cut." + name] = cut;
  return plan;
}

// 1,100 rows are two chunks of the loss.
at::Tensor numbers(int64_t factor, const ProcessGroup& group) {
  return at::arange(1100, at::kLong).mul(factor).remainder(kVocabulary).to(group.device());
}

TEST(ParallelDeviceTest, TensorParallelLayersHaveTheBitsOfTheCpuAndDoNotWait) {
  test::device_ranks(2, [](const ProcessGroup& group) {
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      const auto run = [type](const ProcessGroup& on) {
        Cut model(on);
        model->to(type);
        const at::Tensor ids = numbers(3, on), labels = numbers(7, on);
        test::reset_device_counts();
        const auto sums = model->forward(ids, labels);
        (sums.loss * 0.25).backward();
        const test::DeviceCounts counts = test::device_counts();
        EXPECT_EQ(counts.synchronisations + counts.host_to_device + counts.device_to_host, 0);
        EXPECT_EQ(sums.loss.device(), on.device());
        const auto [begin, end] = cut_of(7, on.rank(), on.size());
        const at::Tensor columns = waves({3, end - begin}, 0.7 + on.rank(), on).to(type).detach();
        columns.set_requires_grad(true);
        const at::Tensor all = parallel::gather_from_group(columns, 7, on);
        all.pow(2).sum().backward();
        Results results{sums.loss.detach(), sums.nll, all.detach(), columns.grad()};
        add_gradients(*model, results);
        return results;
      };
      test::expect_same_bits(run(group), run(test::on_cpu(group)));
    }
  });
}

// Two steps of Muon for the matrices; the biases stay.
template <class Model>
void take_steps(Model& model, const std::vector<LocalShard>& shards, const ProcessGroup& sharing,
                const ProcessGroup& on, Results& results) {
  std::vector<LocalShard> matrices = shards;
  std::erase_if(matrices, [](const LocalShard& each) { return each.shape.size() < 2; });
  parallel::Muon muon(matrices, sharing,
                      {.weight_decay = 0.1, .tensor_parallel = model.ranks().tensor_parallel});
  for (int step = 0; step < 2; ++step) {
    const at::Tensor loss = model(numbers(3 + step, on), numbers(7, on));
    loss.backward();
    muon.step(0.02);
    for (const LocalShard& each : shards) each.tensor.mutable_grad().reset();
    results.push_back(loss.detach());
  }
  for (const LocalShard& each : shards) results.push_back(each.tensor.detach());
}

TEST(ParallelDeviceTest, MuonUnderEveryWrapperHasTheBitsOfTheCpu) {
  test::device_ranks(2, [](const ProcessGroup& group) {
    const auto run = [](const ProcessGroup& on) {
      const DeviceMesh mesh = init_device_mesh(on, {{"dp", 1}, {"tp", 2}});
      Results results;
      {
        Loss loss(mesh.group("tp"));
        parallel::DistributedDataParallel<Loss> model(loss, mesh,
                                                      {.tensor_parallel = plan_of_loss()});
        std::vector<LocalShard> whole;
        for (const auto& [name, tensor] : model.named_parameters())
          whole.push_back({name, tensor.sizes().vec(), 0, tensor.numel(), tensor});
        take_steps(model, whole, mesh.group("dp"), on, results);
      }
      Loss loss(mesh.group("tp"));
      parallel::FullyShardedDataParallel<Loss> model(loss, mesh,
                                                     {.tensor_parallel = plan_of_loss()});
      take_steps(model, model.local_shards(), mesh.group("dp"), on, results);
      return results;
    };
    test::expect_same_bits(run(group), run(test::on_cpu(group)));
  });
}

// The first rank has all of the table, the others nothing of it.
TEST(ParallelDeviceTest, MuonTakesAMatrixOfWhichARankHoldsNothing) {
  test::device_ranks(3, [](const ProcessGroup& group) {
    const auto run = [](const ProcessGroup& on, bool offload) {
      ProcessGroup alone;
      for (int rank = 0; rank < on.size(); ++rank)
        if (const ProcessGroup made = on.subgroup({rank}, "alone")) alone = made;
      Loss loss(alone);
      parallel::FullyShardedDataParallel<Loss> model(loss, on, {.cpu_offload = offload});
      Results results;
      take_steps(model, model.local_shards(), on, on, results);
      return results;
    };
    const ProcessGroup cpu = test::on_cpu(group);
    for (const bool offload : {false, true})
      test::expect_same_bits(run(group, offload), run(cpu, offload));
  });
}

}  // namespace parallel_device_test
}  // namespace cohort
