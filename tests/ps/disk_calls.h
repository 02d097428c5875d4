// SPDX-License-Identifier: Apache-2.0
// The system calls by which a file reaches the disk and leaves memory, watched and made to fail.
// disk_calls.cpp replaces them for all of the program that it is linked into.
#pragma once
#include <cstdint>
#include <string>

namespace cohort::ps::disk_calls {

/// kWriteLarge: of writev(2), 64 KiB or more. Counted are those of the log's own thread, which
/// writes beside its caller.
enum class Call { kFdatasync, kFsync, kDropPages, kWriteLarge, kReserve };

/// The next one fails with this number of errno; not kDropPages.
void fail_next(Call call, int error);
/// How many came for this file. Of this process and of those that it forked, as below.
int count(Call call, const std::string& path);
/// How long the file was, or that of a folder, when it was synced last; -1: never.
int64_t synced_bytes(const std::string& path);
/// For as long as this lives syncs take this long and do not reach the disk: the test does not depend
/// on its speed.
class ReplacedSyncs {
 public:
  explicit ReplacedSyncs(int microseconds);
  ~ReplacedSyncs();
  ReplacedSyncs(const ReplacedSyncs&) = delete;
  ReplacedSyncs& operator=(const ReplacedSyncs&) = delete;
};
/// Forgets all that was counted.
void forget();
/// The file system that every file is said to lie on, a number of linux/magic.h; 0: its own.
void set_file_system(long type);

}  // namespace cohort::ps::disk_calls
