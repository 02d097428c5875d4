// SPDX-License-Identifier: Apache-2.0
// A server forks to write a checkpoint, and the child allocates memory. glibc holds the locks of its
// malloc during fork(); the address sanitizer's allocator does so from LLVM 17 on. Before that, a
// child waits for ever on a lock that another thread of the parent held. This file takes these locks
// around fork(), as later versions of the sanitizer do.
#if defined(__has_feature)
#if __has_feature(address_sanitizer) && __clang_major__ < 17

#include <pthread.h>

// Functions of the sanitizer's runtime library, which is linked into the program.
namespace __lsan {  // NOLINT(bugprone-reserved-identifier)
void LockAllocator();
void UnlockAllocator();
}  // namespace __lsan
namespace __sanitizer {  // NOLINT(bugprone-reserved-identifier)
void StackDepotLockAll();
void StackDepotUnlockAll();
}  // namespace __sanitizer

namespace {

void lock() {
  __lsan::LockAllocator();
  __sanitizer::StackDepotLockAll();
}

void unlock() {
  __sanitizer::StackDepotUnlockAll();
  __lsan::UnlockAllocator();
}

// Early: handlers that were registered later run before lock() and after unlock(), so they may
// allocate.
__attribute__((constructor(101))) void hold_the_allocator_during_fork() {
  pthread_atfork(lock, unlock, unlock);
}

}  // namespace

#endif
#endif
