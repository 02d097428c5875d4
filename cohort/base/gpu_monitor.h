// SPDX-License-Identifier: Apache-2.0
// How busy a machine's NVIDIA GPUs are, by the driver's own library.
#pragma once
#include <memory>
#include <string>
#include <vector>

namespace cohort {

struct GpuUse {
  std::string name;
  double busy_percent = 0;  ///< Share of the time, lately, in which a kernel ran.
  double memory_used_bytes = 0;
  double memory_bytes = 0;
};

/// Asks NVML, libnvidia-ml.so.1, which comes with the driver and is looked for at run time. A
/// machine without it has no GPUs. Local.
/// Threads: one caller at a time.
class GpuMonitor {
 public:
  GpuMonitor();
  ~GpuMonitor();
  GpuMonitor(const GpuMonitor&) = delete;
  GpuMonitor& operator=(const GpuMonitor&) = delete;

  /// Returns the machine's GPUs, in the driver's order, in use or not. A figure that the driver
  /// does not give is NaN.
  /// Cost: about a millisecond a GPU.
  std::vector<GpuUse> sample() const;

 private:
  struct Library;
  std::unique_ptr<Library> library_;  // Null: there is none.
};

}  // namespace cohort
