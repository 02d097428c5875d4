// SPDX-License-Identifier: Apache-2.0
// Updates through parameter servers against those of DDP.
#include <array>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <optional>
#include <sstream>
#include <torch/types.h>

#include "cohort/base/log.h"
#include "cohort/ps/rpc/rpc_server.h"
#include "cohort/ps/server/server.h"
#include "cohort/train/metrics.h"
#include "cohort/translate/updater.h"

#include "tests/support/ranks.h"
#include "tests/support/sentences.h"

namespace cohort::translate {
namespace server_updater_test {

using ps::Training;

constexpr int kNumServers = 2;
constexpr int kNumUpdates = 20;

const UpdaterOptions kOptions{.schedule = {.factor = 0.05, .width = 16, .warmup = 5},
                              .clip_norm = 0,
                              .exponential_smoothing = 0.5};

// Servers of a job in rank 0's process, without a log; all ranks know where.
class Servers {
 public:
  explicit Servers(const comm::ProcessGroup& group) : group_(group) {
    std::string endpoints;
    if (group.rank() == 0) {
      for (int id = 0; id < kNumServers; ++id) {
        servers_.push_back(
            std::make_unique<ps::Server>(ps::ServerOptions{.server = id,
                                                           .servers = kNumServers,
                                                           .durability = ps::Durability::kApplied,
                                                           .snapshot_log_bytes = 0},
                                         log_));
        rpc_.push_back(std::make_unique<ps::RpcServer>(*servers_.back(), ps::RpcServerOptions{}));
        endpoints += "127.0.0.1:" + std::to_string(rpc_.back()->port()) + "\n";
      }
    }
    std::istringstream lines(group.broadcast_object(endpoints));
    for (std::string line; std::getline(lines, line);) endpoints_.push_back(line);
  }
  ~Servers() {
    if (!std::uncaught_exceptions()) group_.barrier("servers are needed no more");
  }
  Servers(const Servers&) = delete;
  Servers& operator=(const Servers&) = delete;

  UpdaterOptions options(Training training, UpdaterOptions options = kOptions) const {
    options.servers = ps::SessionOptions{.training = training,
                                         .servers = endpoints_,
                                         .trainer = group_.rank(),
                                         .trainers = group_.size()};
    options.servers->min_block_size = 64;  // Matrices are cut.
    return options;
  }

 private:
  comm::ProcessGroup group_;
  const Log log_{LogOptions{.console = LogConsole::kNever}};
  std::vector<std::unique_ptr<ps::Server>> servers_;
  std::vector<std::unique_ptr<ps::RpcServer>> rpc_;
  std::vector<std::string> endpoints_;
};

nmt::Transformer make_model() {
  nmt::Transformer model(test::tiny_options());
  model->initialise(7);
  return model;
}

// Of 16 sentences, 4 on rank 0 and 12 on rank 1, in two batches each.
std::vector<nmt::Batch> batches_of(int update, int rank) {
  const auto all = test::make_sentences(16, static_cast<uint32_t>(update));
  const auto part = [&](int begin, int end) {
    return test::make_test_batch({all.begin() + begin, all.begin() + end});
  };
  if (rank == 0) return {part(0, 2), part(2, 4)};
  return {part(4, 9), part(9, 16)};
}

double mean_loss(const comm::ProcessGroup& group, const UpdateReport& report) {
  EXPECT_FALSE(report.skipped);
  return train::reduce_sums(group, std::array{report.nll_sum})[0] /
         static_cast<double>(report.num_tokens);
}

std::string bytes_of(const nmt::Transformer& model) {
  std::string bytes;
  for (const at::Tensor& p : model->parameters())
    bytes.append(static_cast<const char*>(p.const_data_ptr()), p.nbytes());
  return bytes;
}

// Of all batches that the tests train on, one trainer's after the other's.
double loss_of(nmt::Transformer& model) {
  const at::NoGradGuard no_grad;
  model->eval();
  double sum = 0, tokens = 0;
  for (int update = 0; update < 4; ++update) {
    for (const int rank : {0, 1}) {
      for (const nmt::Batch& batch : batches_of(update, rank)) {
        sum += std::get<1>(model->forward(batch)).item<double>();
        tokens += static_cast<double>(batch.num_target_tokens);
      }
    }
  }
  model->train();
  return sum / tokens;
}

std::vector<at::Tensor> copies_of(const nmt::Transformer& model) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& p : model->parameters()) copies.push_back(p.detach().clone());
  return copies;
}

// Both begin with the same bits. An update rounds a parameter of at most 1 differently by a few
// 2^-24; with the gradient's norm of about 1 on each of 10,000 parameters, rounding in any
// direction, that moves a loss by 2^-24 * 100 = 6e-6 at the very most in an update, and 20 add up
// to 1.2e-4. A wrong rate or rule is seen from the second update on, by 1e-2 and more.
constexpr double kRounding = 1.2e-4;

TEST(ServerUpdaterTest, SyncMakesDdpsUpdates) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    const Servers servers(group);
    auto model = make_model();
    Updater through(model, group, servers.options(Training::kSync));
    Updater ddp(make_model(), group, kOptions);
    UpdaterOptions half = kOptions;
    half.schedule.factor /= 2;
    Updater slower(make_model(), group, half);
    double seen = 0;
    for (int update = 1; update <= kNumUpdates; ++update) {
      const auto batches = batches_of(update, group.rank());
      const double expected = mean_loss(group, ddp.update(batches));
      EXPECT_NEAR(mean_loss(group, through.update(batches)), expected, kRounding) << update;
      EXPECT_EQ(through.learning_rate(), ddp.learning_rate());
      const double slow = mean_loss(group, slower.update(batches));
      EXPECT_TRUE(std::isfinite(slow));
      seen = std::max(seen, std::abs(slow - expected));
    }
    EXPECT_GT(seen, 100 * kRounding) << "what another rate does";
    EXPECT_EQ(through.num_updates(), kNumUpdates);
    EXPECT_FALSE(through.parts().contains("optimizer"));
    const auto all = group.all_gather_object(bytes_of(model));
    EXPECT_TRUE(all[0] == all[1]) << "parameters are up to date after an update";
    const optim::AveragesInPlace smoothed(through.average());
    const auto averages = group.all_gather_object(bytes_of(model));
    EXPECT_TRUE(averages[0] == averages[1]);
    EXPECT_FALSE(averages[0] == all[0]);
    through.finish();
  });
}

TEST(ServerUpdaterTest, OneTrainerClipsAsDdpDoes) {
  comm::ProcessGroup alone(comm::RankInfo{});
  const Servers servers(alone);
  UpdaterOptions clipping = kOptions;
  clipping.clip_norm = 0.05;
  Updater through(make_model(), alone, servers.options(Training::kSync, clipping));
  Updater ddp(make_model(), alone, clipping);
  for (int update = 1; update <= kNumUpdates; ++update) {
    const auto batches = batches_of(update, 1);
    const UpdateReport expected = ddp.update(batches);
    const UpdateReport found = through.update(batches);
    EXPECT_GT(expected.gradient_norm, clipping.clip_norm);
    EXPECT_NEAR(found.gradient_norm, expected.gradient_norm, 0.01 * expected.gradient_norm);
    EXPECT_NEAR(mean_loss(alone, found), mean_loss(alone, expected), kRounding);
  }
  through.finish();
}

// The reports are each trainer's own: nothing is exchanged between trainers.
double own_loss(const UpdateReport& report) {
  EXPECT_FALSE(report.skipped);
  EXPECT_EQ(report.num_tokens, report.own_tokens);
  return report.nll_sum / static_cast<double>(report.own_tokens);
}

UpdaterOptions async_options() {
  UpdaterOptions options = kOptions;
  options.exponential_smoothing = 0;
  return options;
}

// As much as ddp learns from the same batches in as many updates, up to a fifth: each gradient is
// at most a few pushes old, and the order of pushes is left to chance.
TEST(ServerUpdaterTest, AsyncLearnsAsMuchAsDdpAndSettlesToOneModel) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    const Servers servers(group);
    auto model = make_model(), control = make_model(), untrained = make_model();
    Updater through(model, group, servers.options(Training::kAsync, async_options()));
    Updater ddp(control, group, async_options());
    for (int update = 1; update <= 3 * kNumUpdates; ++update) {
      own_loss(through.update(batches_of(update % 4, group.rank())));
      ddp.update(batches_of(update % 4, group.rank()));
    }
    through.wait_for_updates();
    const auto all = group.all_gather_object(bytes_of(model));
    EXPECT_TRUE(all[0] == all[1]);
    const double first = loss_of(untrained), expected = loss_of(control), found = loss_of(model);
    EXPECT_LT(expected, 0.8 * first);
    EXPECT_NEAR(found, expected, 0.2 * (first - expected)) << "untrained: " << first;
    through.finish();
  });
}

// Adam's first step moves an element by the learning rate, whatever its gradient; eps of 1e-9 is
// seen where a gradient is as small.
TEST(ServerUpdaterTest, AsyncDividesTheLearningRateByTheNumberOfTrainers) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    const Servers servers(group);
    auto model = make_model();
    const std::vector<at::Tensor> before = copies_of(model);
    Updater through(model, group, servers.options(Training::kAsync, async_options()));
    if (group.rank() == 0) {
      own_loss(through.update(batches_of(1, 0)));
      std::vector<at::Tensor> moved;
      const auto parameters = model->parameters();
      for (size_t i = 0; i < before.size(); ++i)
        moved.push_back((parameters[i] - before[i]).abs().max());
      EXPECT_NEAR(at::stack(moved).max().item<double>(), through.learning_rate() / 2,
                  0.01 * through.learning_rate());
    }
    through.wait_for_updates();
    through.finish();
  });
}

// Rank 0 begins when rank 1 is done, then the other way round.
TEST(ServerUpdaterTest, AsyncWaitsForNoOtherTrainer) {
  const auto ends = test::run_ranks(
      2,
      [](const comm::ProcessGroup& group) {
        const Servers servers(group);
        auto model = make_model();
        Updater through(model, group, servers.options(Training::kAsync, async_options()));
        for (const int first : {1, 0}) {
          const auto train = [&] {
            for (int update = 1; update <= kNumUpdates; ++update)
              own_loss(through.update(batches_of(update, group.rank())));
          };
          if (group.rank() == first) train();
          group.barrier("the first trainer is done");
          if (group.rank() != first) train();
          through.wait_for_updates();
        }
        EXPECT_EQ(through.num_updates(), 2 * kNumUpdates);
        through.finish();
      },
      {.timeout = std::chrono::seconds(30)});
  for (const auto& end : ends) EXPECT_EQ(end.exit_code, 0) << end.output;
}

// The other trainer neither hears of it nor stops. The update counts, so that all trainers come to
// update N after N steps of the epoch.
TEST(ServerUpdaterTest, AsyncSkipsABadGradientOnItsTrainerAlone) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    const Servers servers(group);
    auto model = make_model();
    Updater through(model, group, servers.options(Training::kAsync, async_options()));
    bool spoil = false;
    model->named_parameters()["encoder.layers.1.linear1.weight"].register_hook(
        [&](const at::Tensor& gradient) { return spoil ? gradient * NAN : gradient; });
    if (group.rank() == 1) {
      own_loss(through.update(batches_of(1, 1)));
      const std::string before = bytes_of(model);
      spoil = true;
      const UpdateReport bad = through.update(batches_of(2, 1));
      EXPECT_TRUE(bad.skipped);
      EXPECT_EQ(bad.bad.parameter, "encoder.layers.1.linear1.weight");
      EXPECT_EQ(bad.bad.rank, 1);
      EXPECT_EQ(bad.bad.batch, 0);
      EXPECT_EQ(through.num_updates(), 2);
      EXPECT_TRUE(bytes_of(model) == before);
      spoil = false;
      own_loss(through.update(batches_of(3, 1)));
    }
    through.wait_for_updates();
    for (const at::Tensor& p : model->parameters()) EXPECT_TRUE(at::isfinite(p).all().item<bool>());
    through.finish();
  });
}

TEST(ServerUpdaterTest, OneRanksBadGradientSkipsTheUpdateOnAllAndIsNamed) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    const Servers servers(group);
    auto model = make_model();
    Updater through(model, group, servers.options(Training::kSync));
    bool spoil = false;
    model->named_parameters()["encoder.layers.1.linear1.weight"].register_hook(
        [&](const at::Tensor& gradient) { return spoil ? gradient * NAN : gradient; });
    through.update(batches_of(1, group.rank()));
    const std::string before = bytes_of(model);
    spoil = group.rank() == 1;
    const UpdateReport bad = through.update(batches_of(2, group.rank()));
    EXPECT_TRUE(bad.skipped);
    EXPECT_EQ(bad.bad.parameter, "encoder.layers.1.linear1.weight");
    EXPECT_EQ(bad.bad.rank, 1);
    EXPECT_EQ(through.num_updates(), 1);
    EXPECT_TRUE(bytes_of(model) == before);
    spoil = false;
    EXPECT_FALSE(through.update(batches_of(3, group.rank())).skipped);
    through.finish();
  });
}

}  // namespace server_updater_test
}  // namespace cohort::translate
