// The TCP connections that an engine or a store has opened, so that a stuck operation can be ended
// from outside.
#pragma once
#include <chrono>
#include <cstdint>
#include <map>

namespace cohort::comm {

/// Remembers the sockets that were opened between its construction and `note_new`.
///
/// Gloo has no way to end a waiting operation before its timeout; closing its connections does it,
/// with an error. A socket that another thread of the program opens meanwhile is taken for the
/// engine's. Threads: `shut_down` from any thread once `note_new` has returned.
class Connections {
 public:
  Connections();
  /// Call when the engine has connected.
  void note_new();
  /// Ends all that is said over these sockets, in both directions. Descriptors stay open, and stay
  /// the engine's.
  void shut_down() const;
  /// Bounds each wait for data over these sockets: the c10d store's client has no limit of its own
  /// where its host is silent but has not closed the connection.
  void limit_waiting(std::chrono::milliseconds limit) const;

 private:
  std::map<int, uint64_t>
      sockets_;  // descriptor -> inode; before note_new: those not of the engine
};

}  // namespace cohort::comm
