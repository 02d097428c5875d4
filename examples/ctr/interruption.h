// SPDX-License-Identifier: Apache-2.0
// Ctrl-C while files are written: it ends the program, but leaves no part of a file.
#pragma once
#include <csignal>

#include "cohort/base/stop_request.h"

namespace ctr {

/// Unwinds the stack, so that unfinished files are removed. No std::exception: it is no error to
/// report.
struct Interrupted {
  int signal = 0;
};

/// Errors: Interrupted once a signal came.
inline void check_interruption(const cohort::StopRequest& stop) {
  if (stop.signal() != 0) throw Interrupted{stop.signal()};
}

/// Ends the process as the signal would have done at once; returns the shell's code for it.
inline int end_by(const Interrupted& interrupted) {
  std::signal(interrupted.signal, SIG_DFL);
  std::raise(interrupted.signal);
  return 128 + interrupted.signal;
}

}  // namespace ctr
