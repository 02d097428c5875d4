// SPDX-License-Identifier: Apache-2.0
// Memory that the ranks of one host share. It has no name: it goes with the last process that maps
// it, however that ends.
#pragma once
#include <chrono>
#include <cstddef>
#include <sys/types.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "cohort/base/fd.h"

namespace cohort::comm {

/// A mapping of it; move only. Zeros at first. In a child that was only forked it is not there, and
/// its destructor and `release` do nothing.
class SharedMemory {
 public:
  /// Maps `bytes` of memory that all ranks of `store` share: rank 0 makes it (memfd_create) and
  /// hands it to the others over an abstract Unix socket. Both sides check that the other runs as
  /// the same user; only who knows a secret of the store is served. The size cannot change.
  ///
  /// Behind them lies `room` for more, which has no memory yet (see commit); rank 0's counts.
  ///
  /// Collective over the store's ranks; blocks, at most `timeout`.
  /// Errors: c10::DistError in one line: the memory is not there, the time is up, another user.
  static SharedMemory share(c10d::Store& store, int rank, int world_size, size_t bytes,
                            std::chrono::milliseconds timeout, size_t room = 0);

  SharedMemory(SharedMemory&& other) noexcept
      : owner_(other.owner_),
        file_(std::move(other.file_)),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  SharedMemory& operator=(SharedMemory&&) = delete;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }  ///< With the room.

  /// Gives the part [begin, begin + bytes) of the room memory. Zeros, unless it has some already.
  /// Errors: c10::OutOfMemoryError in one line: the system refuses so much. One that overcommits
  ///         refuses little: it ends a process when memory runs out, as with other memory.
  void commit(size_t begin, size_t bytes) const;
  /// Gives the memory of that part back to the system.
  void release(size_t begin, size_t bytes) const;

 private:
  // No file: this process's own memory.
  SharedMemory(Fd file, size_t bytes, bool has_room);

  pid_t owner_;
  Fd file_;  // none where there is no room
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

/// Whether the process at the other end of a Unix socket runs as `user`.
bool is_peer_of_user(const Fd& connection, uid_t user);

}  // namespace cohort::comm
