// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/instruction_set.h"

namespace cohort {
namespace {

InstructionSet find() {
#ifdef __x86_64__
  // A hypervisor may hide any one of them, and a compiler uses all of a level: AVX2 alone is not
  // enough for code with BMI2. What is left out here (F16C, LZCNT, MOVBE) comes with those.
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (!has_avx2) return InstructionSet::kBaseline;
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512cd") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has_avx512 ? InstructionSet::kAvx512 : InstructionSet::kAvx2;
#else
  return InstructionSet::kBaseline;
#endif
}

}  // namespace

InstructionSet instruction_set() {
  static const InstructionSet found = find();
  return found;
}

}  // namespace cohort
