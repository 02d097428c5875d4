// SPDX-License-Identifier: Apache-2.0
// Sleeping until a word of shared memory changes (futex(2)).
#pragma once
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace cohort::comm {

/// A sleeper looks this often whether its peers live.
inline constexpr std::chrono::milliseconds kLookInterval{10};

/// Sleeps until `word` differs from `seen`; with `looks`, for kLookInterval at most. `sleepers`
/// counts the threads that sleep.
inline void sleep_until_changed(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers,
                                uint32_t seen, bool looks = true) {
  const timespec look{.tv_sec = 0, .tv_nsec = std::chrono::nanoseconds(kLookInterval).count()};
  sleepers.fetch_add(1);
  // The memory belongs to several processes: no private futex.
  if (word.load() == seen) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen,
            looks ? &look : nullptr, nullptr, 0);
  }
  sleepers.fetch_sub(1);
}

/// Wakes all that sleep on `word`. Call it after a sequentially consistent store to `word`.
inline void wake_sleepers(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers) {
  if (sleepers.load() == 0) return;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace cohort::comm
