// SPDX-License-Identifier: Apache-2.0
// For which instructions loops are compiled, and which of them this processor has.
#pragma once
#include <cstdint>

namespace cohort {

/// Levels of the x86-64 ABI, each of which includes those before it. Code is compiled for a level
/// with no more than it has (-march=x86-64-v3, -mavx2).
enum class InstructionSet : uint8_t {
  kBaseline,  ///< SSE2; on other processors than x86-64, what each of their kind has.
  kAvx2,      ///< x86-64-v3.
  kAvx512,    ///< x86-64-v4.
};

/// Returns the highest level that the processor has and that the system lets programs use.
InstructionSet instruction_set();

}  // namespace cohort
