// SPDX-License-Identifier: Apache-2.0
// What the GPUs of a host do between two validations.
#pragma once
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/gpu_monitor.h"

namespace cohort::translate {

/// Mean and peak of a figure; NaN if nobody gave it.
struct MeanAndPeak {
  double mean = 0;
  double peak = 0;
};

/// A GPU's use over some time.
struct GpuUseSummary {
  MeanAndPeak percent;     ///< Of the time in which a kernel ran.
  MeanAndPeak memory_gib;  ///< Used, by whomever.
};

/// Samples this host's GPUs now and then. Local.
/// Threads: one.
class GpuWatch {
 public:
  enum class Role { kSamples, kRests };  ///< One rank of a host samples.
  explicit GpuWatch(Role role, std::chrono::milliseconds period = std::chrono::seconds(5));

  /// Samples if the last time is `period` ago.
  /// Cost: then about a millisecond a GPU.
  void sample_if_due();
  /// Returns a summary of each GPU since the last call as text for `parse_gpu_use`; "" from one
  /// that rests. Samples if it has not since then.
  std::string take();

 private:
  using Clock = std::chrono::steady_clock;
  // Of the finite values among those that were added.
  struct Sum {
    double sum = 0;
    double peak = 0;
    int64_t count = 0;
    void add(double value);
    MeanAndPeak result() const;
  };
  struct Gpu {
    Sum percent, memory_gib;
  };
  void sample();

  std::optional<GpuMonitor> monitor_;  // Nothing: it rests.
  std::chrono::milliseconds period_;
  std::optional<Clock::time_point> sampled_;
  bool has_samples_ = false;  // Since the last `take`.
  std::vector<Gpu> gpus_;
};

/// Reads what `take` has returned; nothing from "".
std::vector<GpuUseSummary> parse_gpu_use(const std::string& text);

}  // namespace cohort::translate
