// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/amx.h"

#include <cstdio>
#include <cstdlib>

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace cohort {

bool amx_has_no_tiles() {
#ifdef __x86_64__
  constexpr unsigned kFeatures = 7;
  constexpr unsigned kAmxTile = 1U << 24;
  constexpr unsigned kTiles = 0x1d;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid_count(kFeatures, 0, &a, &b, &c, &d) == 0 || (d & kAmxTile) == 0) return false;
  return __get_cpuid_count(kTiles, 0, &a, &b, &c, &d) == 0 || a == 0;
#else
  return false;
#endif
}

void avoid_amx_without_tiles() {
  constexpr const char* kVariable = "ONEDNN_MAX_CPU_ISA";
  constexpr const char* kWithoutAmx = "AVX512_CORE_FP16";
  if (std::getenv(kVariable) != nullptr || !amx_has_no_tiles()) return;
  ::setenv(kVariable, kWithoutAmx, /*overwrite=*/1);
  std::fprintf(stderr, "warning: this processor lists AMX but no tiles for it: %s=%s is set\n",
               kVariable, kWithoutAmx);
}

}  // namespace cohort
