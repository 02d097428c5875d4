// SPDX-License-Identifier: Apache-2.0
// What a server tells about itself: `cohort ps status`.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "cohort/ps/server/parameter_state.h"

namespace cohort::ps {

/// Since the start.
struct Counts {
  int64_t pushes = 0, duplicates = 0, pulls = 0, refused = 0;
  int64_t rows_pushed = 0, rows_pulled = 0, bytes_in = 0, bytes_out = 0;
};

/// Counts, and their rates over the last 5 to 10 seconds.
class Activity {
 public:
  using Time = std::chrono::steady_clock::time_point;

  Counts counts;
  const Time started = std::chrono::steady_clock::now();

  void tick(Time now);  ///< Call it a few times a second.
  double per_second(int64_t Counts::*count, Time now) const;

 private:
  struct Counted {
    Counts counts;
    Time time;
  };
  Counted from_{{}, started}, next_{{}, started};
};

struct StatusSources {
  int server = 0;
  uint64_t incarnation = 0;
  const ParameterState& state;
  const Activity& activity;
  const std::map<uint32_t, Activity::Time>& last_message;  ///< By member.
  const std::string& failure;      ///< Why the job cannot continue; empty: it can.
  const std::string& log_failure;  ///< Why the last change could not be logged; empty: it was.
  size_t waiting = 0;              ///< Requests.
};

/// One line of JSON; docs/ps.md has its fields.
std::string status_text(const StatusSources& sources);

}  // namespace cohort::ps
