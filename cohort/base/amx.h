// SPDX-License-Identifier: Apache-2.0
// Processors that list AMX without the tiles that it needs.
#pragma once

namespace cohort {

/// Whether the processor lists AMX but no tiles for it, as under hypervisors that hide CPUID's leaf
/// 1DH. oneDNN, which multiplies bfloat16 for libtorch, believes the list: the first product ends the
/// program with an illegal instruction.
bool amx_has_no_tiles();

/// Where amx_has_no_tiles(), sets ONEDNN_MAX_CPU_ISA so that oneDNN goes without AMX, unless it is
/// set, and says so in one line on stderr. run_program() calls it; a program of your own calls it
/// before its first tensor.
/// Threads: one, as for setenv.
void avoid_amx_without_tiles();

}  // namespace cohort
