// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/kernels/cpu/loops.h"

namespace cohort::nmt {

extern const Loops avx512;
extern const Loops avx2;
extern const Loops sse2;

namespace {

const Loops*& in_use() {
  static const Loops* table = supported_loops()[0];
  return table;
}

}  // namespace

const Loops* const* supported_loops() {
  static const Loops* const all[] = {&avx512, &avx2, &sse2, nullptr};
  static const bool has_avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has_avx512 ? all : has_avx2 ? all + 1 : all + 2;
}

const Loops& loops() {
  return *in_use();
}

void use_loops(const Loops& table) {
  in_use() = &table;
}

}  // namespace cohort::nmt
