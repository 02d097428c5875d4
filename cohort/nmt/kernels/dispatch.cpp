#include "cohort/nmt/kernels/kernels.h"

namespace cohort::nmt {

extern const Kernels avx512;
extern const Kernels avx2;
extern const Kernels sse2;

const Kernels& kernels() {
  static const Kernels& best =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
          ? avx512
      : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? avx2
                                                                        : sse2;
  return best;
}

}  // namespace cohort::nmt
