// SPDX-License-Identifier: Apache-2.0
// Log files, written on a thread of their own: a disk that hangs does not block the launcher.
#pragma once
#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "cohort/base/fd.h"

namespace cohort::launch {

/// Writes to files what it is given, in that order.
/// Threads: used by one. Its own begins with the first write(), and blocks no signal's handling,
///          for the launcher blocks them first.
class LogWriter {
 public:
  class File;

  LogWriter();
  /// Waits up to kFlushTimeout for what is queued; then leaves it unwritten.
  ~LogWriter();
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;

  /// Creates the file, or empties it unless `append`. May block.
  /// Errors: ConfigError if it cannot be made.
  std::shared_ptr<File> open(const std::string& path, bool append) const;
  /// Queues `bytes`. The first error of a file is reported on stderr; later bytes are dropped.
  void write(const std::shared_ptr<File>& file, std::string_view bytes);
  /// Whether so much is queued that sources should pause.
  bool congested() const;
  /// Waits until all is written, up to kFlushTimeout; returns whether it is.
  bool flush() const;

  static constexpr std::chrono::milliseconds kFlushTimeout{2000};

 private:
  struct Queue;
  static void run(const std::shared_ptr<Queue>& queue);

  std::shared_ptr<Queue> queue_;
  std::thread thread_;
};

}  // namespace cohort::launch
