// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/instruction_set.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace cohort {
namespace {

#ifdef __x86_64__
// Not every compiler knows their names.
bool has_f16c_movbe_and_lzcnt() {
  constexpr unsigned kMovbe = 1U << 22, kF16c = 1U << 29, kLzcnt = 1U << 5;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kMovbe) == 0 || (c & kF16c) == 0) return false;
  return __get_cpuid(0x80000001, &a, &b, &c, &d) != 0 && (c & kLzcnt) != 0;
}
#endif

InstructionSet find() {
#ifdef __x86_64__
  // A hypervisor may hide any one of them, and a compiler uses all of a level: AVX2 alone is not
  // enough for code with BMI2.
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                        has_f16c_movbe_and_lzcnt();
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
