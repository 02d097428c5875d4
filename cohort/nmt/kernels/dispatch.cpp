// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/kernels/kernels.h"

namespace cohort::nmt {

extern const Kernels avx512;
extern const Kernels avx2;
extern const Kernels sse2;

namespace {

const Kernels*& in_use() {
  static const Kernels* table = supported_kernels()[0];
  return table;
}

}  // namespace

const Kernels* const* supported_kernels() {
  static const Kernels* const all[] = {&avx512, &avx2, &sse2, nullptr};
  static const bool has_avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has_avx512 ? all : has_avx2 ? all + 1 : all + 2;
}

const Kernels& kernels() {
  return *in_use();
}

void use_kernels(const Kernels& table) {
  in_use() = &table;
}

}  // namespace cohort::nmt
