// SPDX-License-Identifier: Apache-2.0
// One stream (stdout or stderr) of one worker, from the worker to its log file and the terminal.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "cohort/base/fd.h"
#include "cohort/launch/log_writer.h"
#include "cohort/launch/terminal.h"

namespace cohort::launch {

/// The two ends of a connection: a worker writes to `worker`, the launcher reads `launcher`
/// (non-blocking). Both are close-on-exec.
struct Channel {
  Fd launcher;
  Fd worker;
};

/// Errors: std::system_error.
Channel make_pipe();
/// Makes a pseudo-terminal as wide and high as `like`. It passes bytes unchanged: line ends are
/// left to the real terminal. It controls no session, so no signal comes from it.
Channel make_pseudo_terminal(int like);
/// Gives the pseudo-terminal `to` the size of the terminal `from`.
void copy_window_size(int from, int to);

/// Copies what one worker writes to a log file and, if asked, to the terminal.
class Stream {
 public:
  struct Options {
    std::string log_path;  ///< Created, or emptied.
    bool append = false;   ///< Not emptied: what an earlier start wrote stays.
    /// With append, where this start's part begins; none: at the end of the file as it is, which
    /// lacks what is queued yet.
    std::optional<int64_t> log_begin;
    Terminal* terminal = nullptr;  ///< Outlives the stream; null: log file only.
    std::string prefix;  ///< Not empty: whole lines go to the terminal, each after this text.
    /// Not empty: only whole lines that begin with this text go to the terminal.
    std::string line_start;
  };
  /// `logs` outlives the stream.
  /// Errors: ConfigError if the log file cannot be made.
  Stream(Fd source, LogWriter& logs, Options options);

  /// -1 once the stream has ended.
  int fd() const { return source_.get(); }
  /// Which bytes of the log file are this stream's, once all that is queued is written.
  int64_t log_begin() const { return log_begin_; }
  int64_t log_end() const { return log_end_; }
  /// Whether to poll for more: not while the terminal or the logs are congested, so a worker that
  /// writes faster than they take is slowed down instead of filling the launcher's memory.
  bool wants_more() const {
    return source_ && !(options_.terminal && options_.terminal->congested()) && !logs_->congested();
  }
  /// Reads once and passes on; returns false if nothing was there or the stream has ended.
  bool pump();
  /// Ends the stream: an unfinished line is passed on as one.
  void finish();

 private:
  void show(std::string_view bytes);
  std::string shown(std::string_view line) const;

  Fd source_;
  LogWriter* logs_;
  Options options_;
  std::shared_ptr<LogWriter::File> log_;
  int64_t log_begin_ = 0;
  int64_t log_end_ = 0;
  std::string line_;  // The unfinished line, where whole lines are shown.
};

}  // namespace cohort::launch
