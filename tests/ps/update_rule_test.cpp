// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/update_rule.h"

#include <bit>
#include <cmath>
#include <gtest/gtest.h>
#include <random>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/ps/update_kernel.h"

#include "tests/support/message_of.h"

namespace cohort::ps {
namespace update_rule_test {

using test::message_of;

constexpr Rule kAllRules[] = {
    Rule::kAdd,  Rule::kSgd, Rule::kMomentum, Rule::kAdagrad, Rule::kRowwiseAdagrad,
    Rule::kAdam, Rule::kFtrl};

std::vector<float> random_floats(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

RuleOptions options_of(Rule rule) {
  return {.rule = rule,
          .learning_rate = 0.05F,
          .momentum = 0.8F,
          .eps = 1e-3F,
          .initial_accumulator = 0.1F,
          .l1 = 0.01F,
          .l2 = 0.02F};
}

// The formulas of the papers, in double, element by element.
struct Reference {
  RuleOptions options;
  std::vector<double> w;
  std::vector<double> first = std::vector<double>(w.size(), 0);
  std::vector<double> second = std::vector<double>(w.size(), options.initial_accumulator);
  double row = options.initial_accumulator;

  void update(int64_t t, const std::vector<double>& g) {
    const double lr = options.learning_rate;
    const double eps = options.eps;
    double mean = 0;
    for (const double x : g) mean += x * x / static_cast<double>(g.size());
    row += mean;
    for (size_t i = 0; i < w.size(); ++i) {
      switch (options.rule) {
        case Rule::kAdd:
          w[i] += g[i];
          break;
        case Rule::kSgd:
          w[i] -= lr * g[i];
          break;
        case Rule::kMomentum:
          first[i] = options.momentum * first[i] + g[i];
          w[i] -= lr * first[i];
          break;
        case Rule::kAdagrad:
          second[i] += g[i] * g[i];
          w[i] -= lr * g[i] / (std::sqrt(second[i]) + eps);
          break;
        case Rule::kRowwiseAdagrad:
          w[i] -= lr * g[i] / (std::sqrt(row) + eps);
          break;
        case Rule::kAdam: {
          if (t == 1) second[i] = 0;
          first[i] = options.beta1 * first[i] + (1.0 - options.beta1) * g[i];
          second[i] = options.beta2 * second[i] + (1.0 - options.beta2) * g[i] * g[i];
          const double m = first[i] / (1 - std::pow(options.beta1, t));
          const double v = second[i] / (1 - std::pow(options.beta2, t));
          w[i] -= lr * m / (std::sqrt(v) + eps);
          break;
        }
        case Rule::kFtrl: {
          const double sigma = (std::sqrt(second[i] + g[i] * g[i]) - std::sqrt(second[i])) / lr;
          first[i] += g[i] - sigma * w[i];
          second[i] += g[i] * g[i];
          const double sign = first[i] < 0 ? -1 : 1;
          w[i] = std::abs(first[i]) <= options.l1
                     ? 0
                     : -(first[i] - sign * options.l1) /
                           ((eps + std::sqrt(second[i])) / lr + options.l2);
          break;
        }
      }
    }
  }
};

TEST(UpdateRuleTest, EachRuleFollowsItsPaper) {
  for (const Rule rule : kAllRules) {
    constexpr size_t kWidth = 37;
    const RuleOptions options = options_of(rule);
    std::vector<float> w = random_floats(kWidth, 1);
    if (rule == Rule::kFtrl) w.assign(kWidth, 0);
    std::vector<float> state(static_cast<size_t>(state_width(rule, kWidth)));
    initialise_state(options, state);
    Reference reference{options, {w.begin(), w.end()}};
    for (int64_t step = 1; step <= 20; ++step) {
      const auto g = random_floats(kWidth, 100 + static_cast<uint64_t>(step));
      update(options, step, w, state, g);
      reference.update(step, {g.begin(), g.end()});
    }
    for (size_t i = 0; i < kWidth; ++i) {
      // 20 steps of some ten roundings of 6e-8, of values below 10; FTRL's z is a difference of
      // such values over a rate of 0.05.
      EXPECT_NEAR(w[i], reference.w[i], rule == Rule::kFtrl ? 1e-4 : 2e-5)
          << to_string(rule) << " element " << i;
    }
  }
}

// Bits of weights and state after three steps in blocks that end at `cuts`.
std::vector<uint32_t> bits_when_cut(const RuleOptions& options, const std::vector<size_t>& cuts) {
  const size_t total = cuts.back();
  std::vector<float> weights = random_floats(total, 7);
  std::vector<float> first(total);
  std::vector<float> second(total);
  size_t begin = 0;
  for (const size_t end : cuts) {
    const size_t width = end - begin;
    std::vector<float> state(
        static_cast<size_t>(state_width(options.rule, static_cast<int64_t>(width))));
    initialise_state(options, state);
    for (int64_t step = 1; step <= 3; ++step) {
      const auto g = random_floats(total, 20 + static_cast<uint64_t>(step));
      update(options, step, std::span(weights).subspan(begin, width), state,
             std::span(g).subspan(begin, width));
    }
    const size_t skipped = options.rule == Rule::kAdam ? 1 : 0;  // t
    for (size_t i = 0; i < width; ++i) {
      if (state.size() >= width) first[begin + i] = state[skipped + i];
      if (state.size() >= 2 * width) second[begin + i] = state[skipped + width + i];
    }
    begin = end;
  }
  std::vector<uint32_t> bits;
  for (const auto* values : {&weights, &first, &second}) {
    for (const float value : *values) bits.push_back(std::bit_cast<uint32_t>(value));
  }
  return bits;
}

TEST(UpdateRuleTest, BitsDoNotDependOnHowABlockIsCut) {
  std::mt19937_64 random(3);
  for (const Rule rule : kAllRules) {
    if (rule == Rule::kRowwiseAdagrad) continue;  // Speaks of the whole row.
    RuleOptions options = options_of(rule);
    options.clip_value = 1.2F;
    const auto whole = bits_when_cut(options, {200});
    for (int round = 0; round < 20; ++round) {
      std::vector<size_t> cuts;
      for (size_t end = 1 + random() % 60; end < 200; end += 1 + random() % 60) cuts.push_back(end);
      cuts.push_back(200);
      ASSERT_EQ(bits_when_cut(options, cuts), whole) << to_string(rule);
    }
  }
}

TEST(UpdateRuleTest, BitsDoNotDependOnTheInstructionSet) {
  for (const Rule rule : kAllRules) {
    for (const int64_t width : {1, 3, 16, 17, 64, 301}) {
      RuleOptions options = options_of(rule);
      options.clip_value = 1.5F;
      options.clip_norm = 2;
      std::vector<std::vector<float>> results;
      for (const UpdateKernel* kernel = supported_update_kernels(); *kernel != nullptr; ++kernel) {
        auto weights = random_floats(static_cast<size_t>(width), 5);
        std::vector<float> state(static_cast<size_t>(state_width(rule, width)));
        initialise_state(options, state);
        for (int64_t step = 1; step <= 5; ++step) {
          const auto g = random_floats(static_cast<size_t>(width), static_cast<uint64_t>(step));
          (*kernel)(constants_of(options, step), width, weights.data(), state.data(), g.data());
        }
        weights.insert(weights.end(), state.begin(), state.end());
        results.push_back(weights);
      }
      for (const auto& result : results) {
        EXPECT_EQ(result, results[0]) << to_string(rule) << " width " << width;
      }
    }
  }
}

TEST(UpdateRuleTest, StateBeginsAndLiesAsDocumented) {
  RuleOptions options = options_of(Rule::kAdam);
  std::vector<float> w = {0, 0};
  std::vector<float> state(5, 9.0F);
  initialise_state(options, state);
  EXPECT_EQ(state, std::vector<float>(5, 0.0F));
  update(options, 1, w, state, std::vector<float>{2, 4});
  update(options, 2, w, state, std::vector<float>{2, 4});
  EXPECT_EQ(state[0], 2);                      // t
  EXPECT_NEAR(state[1], 2 * 0.19, 1e-6);       // m of element 0: (1 - 0.9^2) g
  EXPECT_NEAR(state[4], 16 * 0.001999, 1e-6);  // v of element 1: (1 - 0.999^2) g^2

  options.rule = Rule::kFtrl;
  std::vector<float> z_and_n(4, 9.0F);
  initialise_state(options, z_and_n);
  EXPECT_EQ(z_and_n, (std::vector<float>{0, 0, 0.1F, 0.1F}));
  EXPECT_EQ(state_width(Rule::kRowwiseAdagrad, 16), 1);
  EXPECT_EQ(state_width(Rule::kSgd, 16), 0);
}

TEST(UpdateRuleTest, AdamsCountStaysWhereFloatsEnd) {
  const RuleOptions options = options_of(Rule::kAdam);
  std::vector<float> w = {1};
  std::vector<float> state = {16777216, 0.5F, 0.25F};
  update(options, 1, w, state, std::vector<float>{0.5F});
  EXPECT_EQ(state[0], 16777216);
  EXPECT_NEAR(w[0], 1 - 0.05 * 0.5 / (0.5 + 1e-3), 1e-6);
}

TEST(UpdateRuleTest, GradientsAreClippedByValueThenByNorm) {
  RuleOptions options{.rule = Rule::kAdd, .clip_value = 3, .clip_norm = 2.5F};
  std::vector<float> w = {0, 0};
  update(options, 1, w, {}, std::vector<float>{10, -4});  // (3, -3), of norm 4.24
  EXPECT_NEAR(w[0], 2.5 / std::sqrt(2.0), 1e-6);
  EXPECT_EQ(w[1], -w[0]);
  w = {0, 0};
  update(options, 1, w, {}, std::vector<float>{1.5F, 2});  // Of norm 2.5: as it is.
  EXPECT_EQ(w, (std::vector<float>{1.5F, 2}));
}

TEST(UpdateRuleTest, SchedulesFollowTheirFormulas) {
  using Kind = Schedule::Kind;
  const Schedule warmup{.kind = Kind::kWarmup, .warmup = 4};
  EXPECT_EQ(warmup.factor(1), 0.25);
  EXPECT_EQ(warmup.factor(9), 1);
  const Schedule noam{.kind = Kind::kNoam, .warmup = 100, .width = 64};
  for (const int64_t step : {1, 50, 100, 1000}) {
    const auto t = static_cast<double>(step);
    EXPECT_NEAR(noam.factor(step),
                std::pow(64, -0.5) * std::min(std::pow(t, -0.5), t * std::pow(100, -1.5)), 1e-15);
  }
  const Schedule inverse{.kind = Kind::kInverseTime, .decay = 0.5};
  EXPECT_EQ(inverse.factor(1), 1);
  EXPECT_EQ(inverse.factor(3), 0.5);
  const Schedule steps{.kind = Kind::kSteps, .period = 3, .fall = 0.5};
  for (const auto& [step, factor] :
       {std::pair{1, 1.0}, {3, 1.0}, {4, 0.5}, {6, 0.5}, {7, 0.25}, {10, 0.125}})
    EXPECT_EQ(steps.factor(step), factor) << step;
  EXPECT_EQ(steps.factor(int64_t{1} << 40), 0);

  RuleOptions options{.rule = Rule::kSgd, .learning_rate = 1, .schedule = warmup};
  std::vector<float> w = {0};
  update(options, 2, w, {}, std::vector<float>{1});
  EXPECT_EQ(w[0], -0.5F);
}

TEST(UpdateRuleTest, BadOptionsAreNamed) {
  const auto complaint = [](const auto& change) {
    RuleOptions options;
    change(options);
    return message_of<ConfigError>([&] { validate(options); });
  };
  EXPECT_EQ(complaint([](RuleOptions&) {}), "nothing was thrown");
  EXPECT_EQ(complaint([](RuleOptions& o) { o.learning_rate = -1; }),
            "learning_rate: expected a finite number above 0, found -1.000000");
  EXPECT_EQ(complaint([](RuleOptions& o) { o.beta2 = 1; }),
            "beta2: expected a number in [0, 1), found 1.000000");
  EXPECT_NE(complaint([](RuleOptions& o) { o.eps = 0; }).find("eps: "), std::string::npos);
  EXPECT_NE(complaint([](RuleOptions& o) { o.clip_norm = NAN; }).find("clip_norm: "),
            std::string::npos);
  EXPECT_NE(complaint([](RuleOptions& o) { o.schedule.warmup = 0; }).find("schedule.warmup: "),
            std::string::npos);
  EXPECT_EQ(complaint([](RuleOptions& o) { o.schedule.period = 1.5; }),
            "schedule.period: expected a whole number of at least 1, found 1.500000");
  EXPECT_NE(complaint([](RuleOptions& o) { o.schedule.fall = 1; }).find("schedule.fall: "),
            std::string::npos);
  EXPECT_EQ(message_of<ConfigError>([] { rule_named("adamw"); }),
            "rule: expected one of add, sgd, momentum, adagrad, rowwise_adagrad, adam, ftrl, found "
            "\"adamw\"");
  for (const Rule rule : kAllRules) EXPECT_EQ(rule_named(to_string(rule)), rule);
  std::vector<float> w(3);
  EXPECT_EQ(message_of<c10::ValueError>(
                [&] { update({.rule = Rule::kMomentum}, 1, w, {}, std::vector<float>(3)); }),
            "update of 3 weights by momentum: expected 3 gradients and 3 floats of state, found 3 "
            "and 0");
}

}  // namespace update_rule_test
}  // namespace cohort::ps
