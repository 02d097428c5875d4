// SPDX-License-Identifier: Apache-2.0
// The optimizers that servers run, on plain floats: a dense block or one row of a table.
//
// Every rule is made of operations on single elements, in float32 without fused multiply-add: the
// bits do not depend on the machine, nor, but for two, on how a parameter is cut into blocks. These
// need a sum, in double and in a fixed order: row-wise Adagrad and the norm of clipping. They speak
// of the whole row or block that they are given: a dense parameter on two servers is two blocks.
#pragma once
#include <cstdint>
#include <span>
#include <string>

namespace cohort::ps {

enum class Rule {
  kAdd,             ///< w += g: what geo training sends are differences.
  kSgd,             ///< w -= lr g
  kMomentum,        ///< v = momentum v + g; w -= lr v. State: v.
  kAdagrad,         ///< a += g^2; w -= lr g / (sqrt(a) + eps). State: a. Duchi et al. 2011, fig. 1.
  kRowwiseAdagrad,  ///< One a for the row: a += mean(g^2). State: 1 float.
  kAdam,  ///< Kingma and Ba 2015, algorithm 1; steps count this row's updates. State: t, m, v.
  kFtrl,  ///< McMahan et al. 2013, algorithm 1; beta is eps, often 1. State: z, n.
};

/// A learning rate that depends on the number of the step, counted from 1.
struct Schedule {
  enum class Kind { kConstant, kWarmup, kNoam, kInverseTime, kSteps };
  Kind kind = Kind::kConstant;
  double warmup = 1;   ///< Steps of linear rise; then kWarmup stays, kNoam falls.
  double decay = 0;    ///< kInverseTime: rate / (1 + decay * (step - 1)).
  double width = 512;  ///< kNoam: rate * width^-0.5 * min(step^-0.5, step * warmup^-1.5).
  double period = 1;   ///< kSteps: steps between two falls, a whole number.
  double fall = 0.1;   ///< kSteps: rate * fall^floor((step - 1) / period).

  /// What the rate is multiplied with at `step` >= 1.
  double factor(int64_t step) const;
};

struct RuleOptions {
  Rule rule = Rule::kSgd;
  float learning_rate = 0.01f;
  float momentum = 0.9f;
  float beta1 = 0.9f;
  float beta2 = 0.999f;
  float eps = 1e-8f;
  float initial_accumulator = 0;  ///< Of Adagrad, row-wise Adagrad and FTRL.
  float l1 = 0;                   ///< FTRL.
  float l2 = 0;                   ///< FTRL.
  float clip_value = 0;  ///< Elements of the gradient are kept in [-clip, clip]; 0: as they are.
  float clip_norm = 0;   ///< The row's or block's gradient gets at most this norm; 0: any.
  Schedule schedule;
};

/// Errors: ConfigError that names the option: a rate that is not finite and positive, a beta out of
///         [0, 1), and so on.
void validate(const RuleOptions& options);

/// How many floats of state `width` weights have under `rule`. They lie in the order that Rule
/// gives, `width` floats each; Adam's t, the count of updates, and row-wise Adagrad's a are one
/// float.
int64_t state_width(Rule rule, int64_t width);

/// The names of rules in flags, logs and files: "sgd", "rowwise_adagrad" ...
std::string to_string(Rule rule);
/// Errors: ConfigError that lists the names.
Rule rule_named(const std::string& name);

/// Sets a new row's or block's state. `state`: state_width floats.
void initialise_state(const RuleOptions& options, std::span<float> state);

/// Updates `weights` by `gradient` (as long) and `state` (state_width), which do not overlap.
/// `step` >= 1 counts the updates of the whole job, for the schedule. The gradient is clipped by
/// value first, then by norm. Local; cost: one pass, two with a norm.
/// Errors: c10::ValueError: sizes.
void update(const RuleOptions& options, int64_t step, std::span<float> weights,
            std::span<float> state, std::span<const float> gradient);

}  // namespace cohort::ps
