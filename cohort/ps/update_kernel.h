// SPDX-License-Identifier: Apache-2.0
// The loop of update_rule.h, compiled once per instruction set; all give the same bits.
#pragma once
#include <cstdint>

#include "cohort/ps/update_rule.h"

namespace cohort::ps {

/// A rule's options at one step, as the loop wants them.
struct RuleConstants {
  Rule rule = Rule::kSgd;
  float rate = 0;  ///< Times the schedule's factor.
  float momentum = 0;
  float beta1 = 0;
  float beta2 = 0;
  float eps = 0;
  float l1 = 0;
  float l2 = 0;
  float clip_value = 0;  ///< Infinite: none.
  float clip_norm = 0;   ///< 0: none.
};
RuleConstants constants_of(const RuleOptions& options, int64_t step);

/// base^exponent by squaring: pow of the C library rounds as its version and the machine like.
double power(double base, int64_t exponent);

/// update() without its checks. The pointers are to different memory, of any alignment.
using UpdateKernel = void (*)(const RuleConstants&, int64_t width, float* weights, float* state,
                              const float* gradient);

/// The kernels that this machine can run, the fastest first; ends with nullptr.
const UpdateKernel* supported_update_kernels();

}  // namespace cohort::ps
