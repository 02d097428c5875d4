// SPDX-License-Identifier: Apache-2.0
// Geo training against the same steps without servers. Without gRPC.
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <span>
#include <vector>

#include "cohort/ps/client/communicator.h"
#include "cohort/ps/update_rule.h"

#include "tests/ps/cluster.h"

namespace cohort::ps {
namespace geo_communicator_test {

constexpr int64_t kSteps = 24;
constexpr size_t kWidth = 2;

// Row 1 in each step, row 2 in each fifth.
std::vector<uint64_t> ids_of(int64_t step) {
  return step % 5 == 0 ? std::vector<uint64_t>{1, 2} : std::vector<uint64_t>{1};
}

std::vector<float> gradients_of(int64_t step) {
  std::vector<float> gradients(ids_of(step).size() * kWidth);
  for (size_t i = 0; i < gradients.size(); ++i)
    gradients[i] = 0.5f + 0.25f * static_cast<float>((static_cast<size_t>(step) + i) % 3);
  return gradients;
}

// Rows 1 and 2 after all steps, updated in this process alone.
std::vector<float> trained_alone(const RuleOptions& rule) {
  std::vector<float> weights(2 * kWidth);
  const auto state_size = static_cast<size_t>(state_width(rule.rule, kWidth));
  std::vector<float> states(2 * state_size);
  for (size_t row = 0; row < 2; ++row)
    initialise_state(rule, std::span(states).subspan(row * state_size, state_size));
  for (int64_t step = 1; step <= kSteps; ++step) {
    const auto gradients = gradients_of(step);
    for (size_t row = 0; row < ids_of(step).size(); ++row)
      update(rule, step, std::span(weights).subspan(row * kWidth, kWidth),
             std::span(states).subspan(row * state_size, state_size),
             std::span(gradients).subspan(row * kWidth, kWidth));
  }
  return weights;
}

std::vector<float> trained_by_geo(const RuleOptions& rule, int64_t geo_steps) {
  Cluster cluster(1);
  JobOptions job = ledger_job(1, 1, Mode::kAsync, kWidth);
  job.tables[0].rule = {.rule = Rule::kAdd};
  const auto client = cluster.client(0, job);
  const auto communicator =
      make_geo_communicator(*client, {.table_rules = {rule}, .steps = geo_steps});
  std::vector<float> rows(2 * kWidth);
  for (int64_t step = 1; step <= kSteps; ++step) {
    const auto ids = ids_of(step);
    const auto gradients = gradients_of(step);
    communicator->pull({{0, ids, std::span(rows).first(gradients.size())}}, {})();
    communicator->push({{0, ids, gradients}}, {});
  }
  communicator->flush();
  const std::vector<uint64_t> both{1, 2};
  const PullRows asked{0, both, rows};
  client->pull(std::span(&asked, 1), {}).wait();
  return rows;
}

// A row that was not used between two synchronisations keeps its state.
TEST(GeoCommunicatorTest, OneTrainerTrainsAsWithoutServersWhateverTheStepsBetweenSynchronisations) {
  for (const Rule rule : {Rule::kAdagrad, Rule::kRowwiseAdagrad, Rule::kAdam, Rule::kMomentum}) {
    const RuleOptions options{.rule = rule, .learning_rate = 0.1f};
    const std::vector<float> expected = trained_alone(options);
    // A synchronisation rounds a change and a sum, by half an ulp of a weight each.
    const float bound = kSteps * std::numeric_limits<float>::epsilon() * std::abs(expected[0]);
    for (const int64_t geo_steps : {1, 2, 4, 100}) {
      const std::vector<float> weights = trained_by_geo(options, geo_steps);
      for (size_t i = 0; i < weights.size(); ++i)
        EXPECT_NEAR(weights[i], expected[i], bound)
            << to_string(rule) << ", " << geo_steps << " steps, row " << i / kWidth + 1;
    }
  }
}

// A checkpoint flushes wherever the program takes it.
TEST(GeoCommunicatorTest, AFlushBetweenAPullAndItsPushLeavesTheRows) {
  Cluster cluster(1);
  JobOptions job = ledger_job(1, 1, Mode::kAsync, kWidth);
  job.tables[0].rule = {.rule = Rule::kAdd};
  const auto client = cluster.client(0, job);
  const auto communicator = make_geo_communicator(
      *client, {.table_rules = {{.rule = Rule::kSgd, .learning_rate = 1}}, .steps = 100});
  const std::vector<uint64_t> ids{1, 2}, unknown{1, 3};
  const std::vector<float> gradients{-1, -2, -3, -4};
  std::vector<float> rows(2 * kWidth);
  communicator->pull({{0, ids, rows}}, {})();
  communicator->flush();
  EXPECT_THROW(communicator->push({{0, unknown, gradients}}, {}), c10::ValueError);
  communicator->push({{0, ids, gradients}}, {});
  communicator->flush();
  const PullRows asked{0, ids, rows};
  client->pull(std::span(&asked, 1), {}).wait();
  EXPECT_EQ(rows, (std::vector<float>{1, 2, 3, 4})) << "each gradient once";
}

}  // namespace geo_communicator_test
}  // namespace cohort::ps
