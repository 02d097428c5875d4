// SPDX-License-Identifier: Apache-2.0
// The launcher's own stdout or stderr, written without ever making the launcher wait.
#pragma once
#include <string>
#include <string_view>

namespace cohort::launch {

/// Queues bytes for a descriptor and writes them as it takes them.
///
/// A stopped terminal or a stalled pipe must not keep the launcher from handling signals, and its
/// descriptor is shared with the shell, so it cannot be made non-blocking: small pieces are
/// written, each after poll said that there is room. A reader that went away ends the output
/// silently, any other error with a reason; log files are still written. Does not own the descriptor.
class Terminal {
 public:
  explicit Terminal(int fd);

  int fd() const { return fd_; }
  bool is_tty() const { return is_tty_; }
  /// Whether bytes wait; then poll fd() for room and call flush().
  bool pending() const { return !queue_.empty(); }
  /// Whether so much waits that sources should pause.
  bool congested() const { return queue_.size() > kCongested; }
  /// Whether nothing or a whole line was written last.
  bool at_line_start() const { return at_line_start_; }

  /// Why output was lost, "No space left on device"; empty: it was not, or nobody reads any more.
  const std::string& error() const { return error_; }

  /// Queues `bytes` and writes what there is room for.
  void write(std::string_view bytes);
  /// Writes what there is room for; does not block.
  void flush();
  /// Writes everything; blocks.
  void flush_all();

 private:
  static constexpr size_t kCongested = 64 * 1024;
  // Returns false if nothing more can be written now.
  bool write_piece(int timeout_ms);

  int fd_;
  bool is_tty_;
  bool gone_ = false;
  std::string error_;
  bool at_line_start_ = true;
  std::string queue_;
};

}  // namespace cohort::launch
