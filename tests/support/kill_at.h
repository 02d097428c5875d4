// SPDX-License-Identifier: Apache-2.0
// Kills this process at a chosen system call that changes files: linked into a program, it stands
// between it and the C library (open, write, fsync, close, rename, unlink, remove, mkdir).
#pragma once
#include <string>

namespace cohort::test {

/// From now on, counts this process's calls on paths that begin with `prefix` and on files that
/// were opened there; before call number `kill_at` (1 is the first; 0: never), the process gets
/// SIGKILL. A write counts twice: it is also cut in the middle. fsync only counts: a kill loses
/// nothing that was written, and a disk would take long.
void kill_at(const std::string& prefix, int kill_at);

/// The names of the counted calls so far, with the last part of their paths: "rename
/// manifest.json".
const std::string& counted_calls();

}  // namespace cohort::test
