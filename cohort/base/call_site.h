// SPDX-License-Identifier: Apache-2.0
// Where a function was called: a default argument fills it in at the caller's line.
#pragma once

namespace cohort {

/// File and line of a call. Declare a last parameter `CallSite site = CallSite::here()`, and
/// callers need do nothing. std::source_location would do, but not with every compiler that reads
/// this project.
struct CallSite {
  const char* file = "";
  int line = 0;

  static constexpr CallSite here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

/// While one lives, whatever its thread calls is at `site` for traces and errors: a function that
/// calls several collectives gives its caller's line to each. Of several the outermost counts.
class CallSiteScope {
 public:
  explicit CallSiteScope(CallSite site);
  ~CallSiteScope();
  CallSiteScope(const CallSiteScope&) = delete;
  CallSiteScope& operator=(const CallSiteScope&) = delete;

  /// The outermost scope's; `site` outside of all.
  static CallSite outermost_or(CallSite site);

 private:
  bool is_outermost_;
};

}  // namespace cohort
