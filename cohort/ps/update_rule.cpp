// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/update_rule.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/instruction_set.h"
#include "cohort/ps/update_kernel.h"

namespace cohort::ps {

void update_avx512(const RuleConstants&, int64_t, float*, float*, const float*);
void update_avx2(const RuleConstants&, int64_t, float*, float*, const float*);
void update_sse2(const RuleConstants&, int64_t, float*, float*, const float*);

namespace {

constexpr std::array<std::pair<Rule, const char*>, 7> kNames = {
    {{Rule::kAdd, "add"},
     {Rule::kSgd, "sgd"},
     {Rule::kMomentum, "momentum"},
     {Rule::kAdagrad, "adagrad"},
     {Rule::kRowwiseAdagrad, "rowwise_adagrad"},
     {Rule::kAdam, "adam"},
     {Rule::kFtrl, "ftrl"}}};

void expect(bool holds, const char* name, const char* expected, double found) {
  if (holds) return;
  std::string value = std::to_string(found);
  throw ConfigError(std::string(name) + ": expected " + expected + ", found " + value);
}

bool is_positive(double x) {
  return std::isfinite(x) && x > 0;
}
bool is_not_negative(double x) {
  return std::isfinite(x) && x >= 0;
}

}  // namespace

double Schedule::factor(int64_t step) const {
  const auto count = static_cast<double>(std::max<int64_t>(step, 1));
  switch (kind) {
    case Kind::kConstant:
      return 1;
    case Kind::kWarmup:
      return std::min(1.0, count / warmup);
    case Kind::kNoam:  // Roots, not pow: they round alike everywhere.
      return std::min(1 / std::sqrt(count), count / (warmup * std::sqrt(warmup))) /
             std::sqrt(width);
    case Kind::kInverseTime:
      return 1 / (1 + decay * (count - 1));
    case Kind::kSteps: {
      // By multiplication, not pow, for the same reason; below the least double it stays 0.
      double result = 1;
      for (auto falls = static_cast<int64_t>((count - 1) / period); falls > 0 && result > 0;
           --falls)
        result *= fall;
      return result;
    }
  }
  return 1;
}

void validate(const RuleOptions& options) {
  constexpr const char* kPositive = "a finite number above 0";
  constexpr const char* kNotNegative = "a finite number of at least 0";
  constexpr const char* kBeta = "a number in [0, 1)";
  const auto is_beta = [](float x) { return x >= 0 && x < 1; };
  expect(is_positive(options.learning_rate), "learning_rate", kPositive, options.learning_rate);
  expect(is_beta(options.momentum), "momentum", kBeta, options.momentum);
  expect(is_beta(options.beta1), "beta1", kBeta, options.beta1);
  expect(is_beta(options.beta2), "beta2", kBeta, options.beta2);
  expect(is_positive(options.eps), "eps", kPositive, options.eps);
  expect(is_not_negative(options.initial_accumulator), "initial_accumulator", kNotNegative,
         options.initial_accumulator);
  expect(is_not_negative(options.l1), "l1", kNotNegative, options.l1);
  expect(is_not_negative(options.l2), "l2", kNotNegative, options.l2);
  expect(is_not_negative(options.clip_value), "clip_value", kNotNegative, options.clip_value);
  expect(is_not_negative(options.clip_norm), "clip_norm", kNotNegative, options.clip_norm);
  const Schedule& schedule = options.schedule;
  expect(std::isfinite(schedule.warmup) && schedule.warmup >= 1, "schedule.warmup",
         "a finite number of at least 1", schedule.warmup);
  expect(is_not_negative(schedule.decay), "schedule.decay", kNotNegative, schedule.decay);
  expect(is_positive(schedule.width), "schedule.width", kPositive, schedule.width);
  expect(schedule.period >= 1 && schedule.period < 9e18 &&
             schedule.period == std::floor(schedule.period),
         "schedule.period", "a whole number of at least 1", schedule.period);
  expect(schedule.fall > 0 && schedule.fall < 1, "schedule.fall", "a number between 0 and 1",
         schedule.fall);
}

int64_t state_width(Rule rule, int64_t width) {
  switch (rule) {
    case Rule::kAdd:
    case Rule::kSgd:
      return 0;
    case Rule::kMomentum:
    case Rule::kAdagrad:
      return width;
    case Rule::kRowwiseAdagrad:
      return 1;
    case Rule::kAdam:
      return 1 + 2 * width;
    case Rule::kFtrl:
      return 2 * width;
  }
  return 0;
}

std::string to_string(Rule rule) {
  for (const auto& [value, name] : kNames) {
    if (value == rule) return name;
  }
  return "unknown";
}

Rule rule_named(const std::string& name) {
  std::string names;
  for (const auto& [value, known] : kNames) {
    if (name == known) return value;
    names += (names.empty() ? "" : ", ") + std::string(known);
  }
  throw ConfigError("rule: expected one of " + names + ", found \"" + name + "\"");
}

void initialise_state(const RuleOptions& options, std::span<float> state) {
  std::fill(state.begin(), state.end(), 0.0F);
  switch (options.rule) {
    case Rule::kAdagrad:
    case Rule::kRowwiseAdagrad:
      std::fill(state.begin(), state.end(), options.initial_accumulator);
      break;
    case Rule::kFtrl:
      std::fill(state.begin() + static_cast<std::ptrdiff_t>(state.size() / 2), state.end(),
                options.initial_accumulator);
      break;
    default:
      break;
  }
}

RuleConstants constants_of(const RuleOptions& options, int64_t step) {
  constexpr float kNone = std::numeric_limits<float>::infinity();
  return {.rule = options.rule,
          .rate = static_cast<float>(static_cast<double>(options.learning_rate) *
                                     options.schedule.factor(step)),
          .momentum = options.momentum,
          .beta1 = options.beta1,
          .beta2 = options.beta2,
          .eps = options.eps,
          .l1 = options.l1,
          .l2 = options.l2,
          .clip_value = options.clip_value > 0 ? options.clip_value : kNone,
          .clip_norm = options.clip_norm};
}

double power(double base, int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent /= 2) {
    if (exponent % 2 == 1) result *= base;
    base *= base;
  }
  return result;
}

const UpdateKernel* supported_update_kernels() {
  static constexpr UpdateKernel kAll[] = {update_avx512, update_avx2, update_sse2, nullptr};
  const InstructionSet has = instruction_set();
  return kAll + (has == InstructionSet::kAvx512 ? 0 : has == InstructionSet::kAvx2 ? 1 : 2);
}

void update(const RuleOptions& options, int64_t step, std::span<float> weights,
            std::span<float> state, std::span<const float> gradient) {
  const auto width = static_cast<int64_t>(weights.size());
  TORCH_CHECK_VALUE(gradient.size() == weights.size() &&
                        static_cast<int64_t>(state.size()) == state_width(options.rule, width),
                    "update of ", width, " weights by ", to_string(options.rule), ": expected ",
                    width, " gradients and ", state_width(options.rule, width),
                    " floats of state, found ", gradient.size(), " and ", state.size());
  (*supported_update_kernels())(constants_of(options, step), width, weights.data(), state.data(),
                                gradient.data());
}

}  // namespace cohort::ps
