// SPDX-License-Identifier: Apache-2.0
// What a rank's trace, and so a launcher's table and an error, gives as the place of a call: the user's line, also where a
// function of the library is made of several collectives.
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "cohort/base/trace_page.h"
#include "cohort/cohort.h"

#include "tests/support/ranks.h"
#include "tests/support/shared_folder.h"

namespace cohort {
namespace call_site_test {

using parallel::Strategy;

// Where the last collective of this rank was called, with the rank's page in a file of its own.
std::string last_site() {
  const auto record = TracePage::read(std::getenv(kTraceFileVariable));
  return record ? record->call_site.data() : "no page";
}

#define EXPECT_THIS_LINE(...)                                                 \
  do {                                                                        \
    __VA_ARGS__;                                                              \
    EXPECT_EQ(last_site(), "call_site_test.cpp:" + std::to_string(__LINE__)); \
  } while (false)

TEST(CallSiteTest, IsTheUsersLine) {
  const test::SharedFolder folder;
  if (const char* rank = std::getenv("RANK"))
    setenv(kTraceFileVariable, (folder / "trace" + rank).c_str(), 1);
  test::ranks(2, [&](const comm::ProcessGroup& group) {
    torch::manual_seed(1);
    const auto linear = [] {
      return torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false));
    };
    torch::nn::Linear net = linear();
    const at::Tensor x = at::ones({2, 4});
    DeviceMesh mesh;
    EXPECT_THIS_LINE(mesh = init_device_mesh(group, {{"dp", 1}, {"tp", 2}}));
    EXPECT_THIS_LINE(parallel::DistributedDataParallel wrapper(linear(), group));
    EXPECT_THIS_LINE(parallel::FullyShardedDataParallel wrapper(linear(), group));
    EXPECT_THIS_LINE(parallel::ParallelModel wrapper(linear(), group));
    parallel::DistributedDataParallel ddp(net, group);
    parallel::ParallelModel model(linear(), group, {.strategy = Strategy::kZero3});
    torch::optim::SGD sgd(model.parameters(), 0.1);
    parallel::GradScaler scaler(group);
    model(x).sum().backward();
    EXPECT_THIS_LINE(scaler.unscale(model.parameters()));
    EXPECT_THIS_LINE(parallel::clip_grad_norm_(model, 1.0));
    EXPECT_THIS_LINE(model.gradient_norm());
    EXPECT_THIS_LINE(const auto whole = model.unsharded());
    EXPECT_THIS_LINE(checkpoint::save(model, sgd, folder / "run"));
    EXPECT_THIS_LINE(checkpoint::load(model, sgd, folder / "run"));
    EXPECT_THIS_LINE(checkpoint::save(model, folder / "run"));
    EXPECT_THIS_LINE(checkpoint::load(model, folder / "run"));
    auto saving = checkpoint::async_save(model, folder / "run");
    EXPECT_THIS_LINE(saving.wait());
    EXPECT_THIS_LINE(parallel::Muon muon(model.local_shards(), group));
    EXPECT_THIS_LINE(parallel::reduce_from_group(x, mesh.group("tp")));
    EXPECT_THIS_LINE(train::MeanMetric().mean(group));
    EXPECT_THIS_LINE(parallel::broadcast_model(*net, group));
    EXPECT_THIS_LINE(parallel::verify_same_model(*net, group));
    EXPECT_THIS_LINE(parallel::join(ddp, [] {}));
    group.barrier("end");
  });
}

}  // namespace call_site_test
}  // namespace cohort
