// SPDX-License-Identifier: Apache-2.0
// What Linux tells of a process.
#pragma once
#include <string>
#include <sys/types.h>

namespace cohort {

/// Returns field `number` of /proc/PID/stat, counted from 1 as in proc(5): 3 is the state, 22 the
/// start in clock ticks since the machine's. Not of fields 1 and 2. Empty if there is no such
/// process.
std::string process_stat(pid_t pid, int number);

}  // namespace cohort
