// SPDX-License-Identifier: Apache-2.0
// A request to stop, made by SIGTERM, SIGINT or SIGHUP (its terminal is gone), that a program follows
// at the next good moment.
#pragma once

namespace cohort {

/// While it lives, the first of each of these signals only sets a flag; a second SIGTERM or SIGINT ends
/// the program as if there were no handler. Under nohup, SIGHUP stays ignored. One at a time in a
/// program.
class StopRequest {
 public:
  StopRequest();
  ~StopRequest();  ///< The signals do again what they did before.
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  /// The signal that came; 0: none yet.
  int signal() const;
};

}  // namespace cohort
