// SPDX-License-Identifier: Apache-2.0
#include <torch/nn/modules/embedding.h>

#include "cohort/parallel/join.h"

#include "tests/parallel/ddp_support.h"
#include "tests/support/ranks.h"

namespace cohort {
namespace ddp_join_test {

using comm::ProcessGroup;
using parallel::DistributedDataParallelOptions;
using parallel::JoinOptions;
using test::batch_of;
using test::Branches;
using test::Ddp;
using test::loss_of;

constexpr double kRate = 1e-3;
// Three steps of the rate times a gradient's bound, relative to parameters of size 1 and gradients
// below 1e3.
constexpr double kParameterBound = 3 * 1e-3 * 1e3 * test::kGradientBound;

struct Plan {
  std::vector<int> batches;  // by rank
  DistributedDataParallelOptions ddp;
  JoinOptions join;
};

// What one process computes: in each step the ranks that still have batches contribute.
Branches train_alone(const Plan& plan) {
  Branches model;
  const auto world_size = static_cast<int>(plan.batches.size());
  for (int step = 0; step < *std::max_element(plan.batches.begin(), plan.batches.end()); ++step) {
    int active = 0;
    for (const int count : plan.batches) active += step < count;
    const int divisor = plan.join.divide_by_initial_world_size ? world_size : active;
    for (int rank = 0; rank < world_size; ++rank) {
      if (step >= plan.batches[static_cast<size_t>(rank)]) continue;
      const bool use_extra = rank != 1 || !plan.ddp.find_unused_parameters;
      (loss_of(model->forward(batch_of(rank, step), use_extra)) / divisor).backward();
    }
    test::descend(*model, kRate);
  }
  return model;
}

void expect_join_equals_one_process(const Plan& plan) {
  test::ranks(static_cast<int>(plan.batches.size()), [&](const ProcessGroup& group) {
    const Branches expected = train_alone(plan);
    Branches model;
    Ddp ddp(model, group, plan.ddp);
    parallel::join(
        ddp,
        [&] {
          for (int step = 0; step < plan.batches[static_cast<size_t>(group.rank())]; ++step) {
            const bool use_extra = group.rank() != 1 || !plan.ddp.find_unused_parameters;
            loss_of(ddp(batch_of(group.rank(), step), use_extra)).backward();
            test::descend(*model, kRate);
            const at::NoGradGuard no_grad;
            ddp(batch_of(0));  // validation, by those that train
          }
        },
        plan.join);
    const auto wanted = expected->parameters();
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_LE((model->parameters()[i] - wanted[i]).abs().max().item<double>(), kParameterBound)
          << i;
    }
  });
}

TEST(DdpJoinTest, UnevenBatchesEqualOneProcess) {
  expect_join_equals_one_process({.batches = {3, 1, 2}});
}

TEST(DdpJoinTest, ARankWithoutAnyBatchFollows) {
  expect_join_equals_one_process({.batches = {0, 3}});
}

TEST(DdpJoinTest, DivisionByTheRanksThatHaveBatches) {
  expect_join_equals_one_process(
      {.batches = {1, 3, 2}, .join = {.divide_by_initial_world_size = false}});
}

TEST(DdpJoinTest, WithManyBucketsAndViews) {
  expect_join_equals_one_process(
      {.batches = {1, 3}, .ddp = {.bucket_cap_mb_list = {1e-6}, .gradient_as_bucket_view = true}});
}

// float64 in the hook of reduce_dtype: its divisor alone is of interest.
TEST(DdpJoinTest, WithAReduceTypeTheInitialNumberOfRanksDivides) {
  expect_join_equals_one_process({.batches = {1, 3},
                                  .ddp = {.mixed_precision = {.reduce_dtype = at::kDouble}},
                                  .join = {.divide_by_initial_world_size = true}});
}

TEST(DdpJoinTest, WithAReduceTypeTheNumberOfActiveRanksDivides) {
  expect_join_equals_one_process({.batches = {1, 3},
                                  .ddp = {.mixed_precision = {.reduce_dtype = at::kDouble}},
                                  .join = {.divide_by_initial_world_size = false}});
}

TEST(DdpJoinTest, WithRebuiltBuckets) {
  expect_join_equals_one_process(
      {.batches = {1, 3}, .ddp = {.bucket_cap_mb_list = {1e-4}, .rebuild_buckets = true}});
}

TEST(DdpJoinTest, WithUnusedParameters) {
  expect_join_equals_one_process({.batches = {1, 3, 2}, .ddp = {.find_unused_parameters = true}});
}

// The rank that shadows collectives has used the extra layer once; those that continue never do.
TEST(DdpJoinTest, WhatNoActiveRankUsesGetsNoGradient) {
  test::ranks(3, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group, {.find_unused_parameters = true});
    int steps = 0;
    parallel::join(ddp, [&] {
      for (int step = 0; step < (group.rank() == 0 ? 1 : 3); ++step) {
        loss_of(ddp(batch_of(group.rank(), step), group.rank() == 0)).backward();
        EXPECT_EQ(model->extra->weight.grad().defined(), step == 0) << "step " << step;
        EXPECT_TRUE(model->first->weight.grad().defined()) << "step " << step;
        test::descend(*model, kRate);
        ++steps;
      }
    });
    EXPECT_EQ(steps, group.rank() == 0 ? 1 : 3);
  });
}

TEST(DdpJoinTest, WithAStaticGraph) {
  expect_join_equals_one_process({.batches = {1, 3, 2}, .ddp = {.static_graph = true}});
}

TEST(DdpJoinTest, AStaticGraphNeedsEveryRankInItsFirstStep) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group, {.static_graph = true});
    test::expect_error<c10::ValueError>(
        [&] {
          parallel::join(ddp, [&] {
            if (group.rank() == 0) ddp(batch_of(0));
          });
        },
        "expected a batch on every rank in the first step of a static graph");
  });
}

TEST(DdpJoinTest, EarlyTerminationThrowsOnEveryRank) {
  test::ranks(3, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group);
    int steps = 0;
    test::expect_error<c10::Error>(
        [&] {
          parallel::join(ddp,
                         [&] {
                           for (int step = 0; step < 2 + group.rank(); ++step) {
                             loss_of(ddp(batch_of(group.rank(), step))).backward();
                             ++steps;
                           }
                         },
                         {.throw_on_early_termination = true});
        },
        "join: 1 of 3 ranks have no batches left");
    EXPECT_EQ(steps, 2);
    group.barrier("the group lives on");
  });
}

TEST(DdpJoinTest, BuffersComeFromARankThatStillTrains) {
  test::ranks(3, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group);
    parallel::join(ddp, [&] {
      for (int step = 0; step < 1 + group.rank(); ++step) {
        loss_of(ddp(batch_of(group.rank(), step))).backward();
        model->zero_grad();
        // Steps 1 and 2 take rank 1's and rank 2's value: rank 0 has run out.
        EXPECT_EQ(model->calls.item<double>(), step == 0 ? 0 : step == 1 ? 11 : 12);
        model->calls.fill_(10 + group.rank());
      }
    });
    EXPECT_EQ(model->calls.item<double>(), 12) << "the last model is rank 2's";
  });
}

TEST(DdpJoinTest, AccumulationInsideNoSync) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group);
    // Rank 1 has no second pair of batches.
    parallel::join(ddp, [&] {
      for (int pair = 0; pair < 2 - group.rank(); ++pair) {
        {
          const auto guard = ddp.no_sync();
          loss_of(ddp(batch_of(group.rank(), 2 * pair))).backward();
        }
        loss_of(ddp(batch_of(group.rank(), 2 * pair + 1))).backward();
        test::descend(*model, kRate);
      }
    });
    Branches reference;
    for (int pair = 0; pair < 2; ++pair) {
      for (int rank = 0; rank < 2 - pair; ++rank) {
        for (int half = 0; half < 2; ++half) {
          (loss_of(reference->forward(batch_of(rank, 2 * pair + half))) / 2).backward();
        }
      }
      test::descend(*reference, kRate);
    }
    for (size_t i = 0; i < model->parameters().size(); ++i) {
      EXPECT_LE((model->parameters()[i] - reference->parameters()[i]).abs().max().item<double>(),
                kParameterBound);
    }
  });
}

TEST(DdpJoinTest, ARankThatNeverSawASparseGradientFollows) {
  test::ranks(2, [](const ProcessGroup& group) {
    torch::nn::EmbeddingBag bag(
        torch::nn::EmbeddingBagOptions(5, 3).sparse(true).mode(torch::kSum));
    parallel::DistributedDataParallel<torch::nn::EmbeddingBag> ddp(bag, group);
    parallel::join(ddp, [&] {
      if (group.rank() == 0) return;
      ddp(at::tensor({int64_t{4}}).view({1, 1})).sum().backward();
      EXPECT_EQ(bag->weight.grad().to_dense()[4][0].item<float>(), 0.5);
    });
  });
}

TEST(DdpJoinTest, RanksMustAgreeOnNoSync) {
  test::ranks(2, [](const ProcessGroup& group) {
    Branches model;
    Ddp ddp(model, group);
    test::expect_error<c10::ValueError>(
        [&] {
          parallel::join(ddp, [&] {
            std::optional<parallel::NoSync> guard;
            if (group.rank() == 0) guard.emplace(ddp);
            ddp(batch_of(0));
          });
        },
        "expected all ranks within no_sync or none, got 1 of 2 outside");
  });
}

}  // namespace ddp_join_test
}  // namespace cohort
