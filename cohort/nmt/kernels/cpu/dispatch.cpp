// SPDX-License-Identifier: Apache-2.0
#include <cctype>
#include <cpuid.h>
#include <cstdlib>
#include <string>
#include <sys/syscall.h>
#include <unistd.h>

#include "cohort/base/amx.h"
#include "cohort/base/instruction_set.h"
#include "cohort/nmt/kernels/cpu/loops.h"

namespace cohort::nmt {

extern const Loops amx;
extern const Loops avx512_bf16;
extern const Loops avx512;
extern const Loops avx2;
extern const Loops sse2;

namespace {

const Loops*& in_use() {
  static const Loops* table = supported_loops()[0];
  return table;
}

bool has_avx512_bf16() {
  return instruction_set() == InstructionSet::kAvx512 && __builtin_cpu_supports("avx512bf16");
}

// Whether the processor multiplies bfloat16 by tiles, the kernel lets this process use them, and libtorch's own products
// may.
bool has_amx() {
  constexpr unsigned kAmxBf16 = 1U << 22, kAmxTile = 1U << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!has_avx512_bf16()) return false;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kAmxBf16) == 0 || (d & kAmxTile) == 0)
    return false;
  if (!allow_amx(std::getenv("ONEDNN_MAX_CPU_ISA"), std::getenv("DNNL_MAX_CPU_ISA"))) return false;
  return !amx_has_no_tiles() && ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool allow_amx(const char* onednn, const char* dnnl) {
  std::string most(onednn != nullptr && *onednn != '\0' ? onednn : dnnl != nullptr ? dnnl : "");
  for (char& letter : most)
    letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  const bool is_limit = most.starts_with("sse") || most.starts_with("avx");
  return !is_limit || most.find("amx") != most.npos;
}

const Loops* const* supported_loops() {
  static const Loops* const all[] = {&amx, &avx512_bf16, &avx512, &avx2, &sse2, nullptr};
  static const int first = has_amx()                                      ? 0
                           : has_avx512_bf16()                            ? 1
                           : instruction_set() == InstructionSet::kAvx512 ? 2
                           : instruction_set() == InstructionSet::kAvx2   ? 3
                                                                          : 4;
  return all + first;
}

const Loops& loops() {
  return *in_use();
}

void use_loops(const Loops& table) {
  in_use() = &table;
}

}  // namespace cohort::nmt
