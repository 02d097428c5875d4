// SPDX-License-Identifier: Apache-2.0
// The click model on a device whose memory the host may not touch.
#include <cstdlib>
#include <gtest/gtest.h>
#include <optional>
#include <torch/types.h>
#include <torch/utils.h>

#include "examples/ctr/click_generator.h"
#include "examples/ctr/trainer.h"
#include "tests/base/temporary_folder.h"
#include "tests/device/one_server.h"
#include "tests/device/same_bits.h"
#include "tests/device/second_device.h"
#include "tests/support/shared_folder.h"

namespace ctr {
namespace ctr_device_test {

TEST(CtrDeviceTest, FactorizesAsOnTheCpu) {
  torch::manual_seed(1);
  const at::Tensor numbers = torch::randn({7, kNumbersWidth});
  const auto gradients_on = [&](at::Device device) {
    torch::manual_seed(2);
    const at::Tensor rows = torch::randn({7, 26, 16}).to(device).requires_grad_();
    const auto [x, pairs] = factorize(numbers.to(device), rows);
    ((x * 3).sum() + (pairs * pairs).sum()).backward();
    return std::vector<at::Tensor>{x.detach().cpu(), pairs.detach().cpu(), rows.grad().cpu()};
  };
  const auto expected = gradients_on(at::kCPU), got = gradients_on(cohort::test::second_device());
  // Pairs: the difference of two sums of 26 * 15 terms, which come to some 400 and are rounded at 6e-8 of that each time. The
  // gradient has twice that as a factor, beside sums of 26 rows.
  const double pairs_bound = 26 * 15 * 400 * 6e-8;
  EXPECT_TRUE(at::equal(got[0], expected[0]));
  EXPECT_TRUE(at::allclose(got[1], expected[1], 0, pairs_bound));
  EXPECT_TRUE(at::allclose(got[2], expected[2], 1e-5, 2 * 26 * pairs_bound));
}

Metrics trained_on(const std::string& backend, const std::string& folder) {
  const cohort::comm::ProcessGroup alone(cohort::comm::RankInfo{}, {.backend = backend});
  Options options;
  options.data = folder;
  options.mode = "local";
  options.batch_size = 64;
  Trainer trainer(options, alone);
  trainer.train();
  return trainer.evaluate().value();
}

// The order of sums differs, and 30 steps of Adam make 1e-3 of that at most.
TEST(CtrDeviceTest, LearnsAsOnTheCpu) {
  cohort::test::register_second_backend();
  const cohort::TemporaryFolder folder;
  const std::string data = folder / "data";
  generate_clicks({.rows = 2000, .test_rows = 500, .seed = 3}, data);
  const Metrics expected = trained_on("gloo", data), got = trained_on("second", data);
  EXPECT_EQ(got.count, expected.count);
  EXPECT_NEAR(got.log_loss, expected.log_loss, 1e-3);
  EXPECT_NEAR(got.auc, expected.auc, 1e-2);
}

// Every rank is a trainer; the server runs beside rank 0.
std::optional<Metrics> trained_by(const cohort::comm::ProcessGroup& group,
                                  const std::string& folder) {
  std::optional<cohort::test::OneServer> server;
  if (group.rank() == 0) server.emplace();
  const std::string endpoint = group.broadcast_object(server ? server->endpoint() : "");
  setenv("PADDLE_TRAINING_ROLE", "TRAINER", 1);
  setenv("PADDLE_PSERVERS_IP_PORT_LIST", endpoint.c_str(), 1);
  setenv("PADDLE_TRAINERS_NUM", std::to_string(group.size()).c_str(), 1);
  setenv("PADDLE_TRAINER_ID", std::to_string(group.rank()).c_str(), 1);
  Options options;
  options.data = folder;
  options.mode = "sync";
  options.batch_size = 64;
  Trainer trainer(options, group);
  trainer.train();
  const auto metrics = trainer.evaluate();
  trainer.finish();
  group.barrier("all have left the server");
  return metrics;
}

// Bounds as above; there are 10 steps.
TEST(CtrDeviceTest, ThreeTrainersOfAServerLearnAsOnTheCpu) {
  const cohort::test::SharedFolder folder;
  const std::string data = folder / "data";
  if (folder.is_parent()) generate_clicks({.rows = 2000, .test_rows = 500, .seed = 3}, data);
  cohort::test::device_ranks(3, [&](const cohort::comm::ProcessGroup& group) {
    EXPECT_EQ(group.device(), cohort::test::second_device());
    const auto expected = trained_by(cohort::test::on_cpu(group), data);
    const auto got = trained_by(group, data);
    ASSERT_EQ(got.has_value(), group.rank() == 0);
    if (!got) return;
    EXPECT_EQ(got->count, 500);
    EXPECT_NEAR(got->log_loss, expected->log_loss, 1e-3);
    EXPECT_NEAR(got->auc, expected->auc, 1e-2);
  });
}

}  // namespace ctr_device_test
}  // namespace ctr
