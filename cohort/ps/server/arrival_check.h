// SPDX-License-Identifier: Apache-2.0
// What a server does with a request in the thread that brings it: reads it, and checks all that does
// not depend on the server's state.
#pragma once
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <string>

#include "cohort/ps/server/declared_job.h"
#include "cohort/ps/server/server.h"
#include "cohort/ps/wire/request.h"

namespace cohort::ps {

/// A request inside the server.
struct Pending {
  Request request;
  Message message{};  ///< Of a push or pull: into request.message.
  /// The job that it was checked against, if one was declared when it arrived; of kJob: the job
  /// that it declares.
  std::shared_ptr<const DeclaredJob> job{};
  std::string mismatch{};  ///< Why it is refused, whatever the state is; "": it is not.
  Done done{};
  std::chrono::steady_clock::time_point arrived{};
};

/// Threads: any.
class ArrivalCheck {
 public:
  explicit ArrivalCheck(const ServerOptions& options);

  /// What requests that arrive from now on are checked against.
  void set_job(std::shared_ptr<const DeclaredJob> job);

  /// Reads and checks a request. What does not fit is in `mismatch`: who sent it decides whether
  /// that is the answer.
  /// Errors: c10::ValueError: it has no readable message, or too long a text.
  Pending check(Request request) const;

 private:
  void check_control(Pending& pending) const;
  void check_folder(const char* call, const std::string& folder) const;
  std::shared_ptr<const DeclaredJob> job() const;

  const int server_;
  const std::string save_root_;
  mutable std::mutex mutex_;
  std::shared_ptr<const DeclaredJob> job_;  // guarded by mutex_
};

/// What the sender of a request is told that ended with `error`.
std::string refusal_text(const std::exception& error);

}  // namespace cohort::ps
