// SPDX-License-Identifier: Apache-2.0
// Which operators a program computes on the host, although it has a device.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace cohort::test {

/// Watches every operator of libtorch, on all threads of the process, while it lives.
///
/// It notes those that work on the host alone: every tensor among arguments and results is one of
/// the CPU, and one of them has more elements than allowed. Views and at::empty count, too, for a
/// loop over host memory begins with one. A copy between host and device is none (device_counts()
/// has those), nor is what the second device's kernels and its backend of collectives do.
/// One at a time.
class HostOperators {
 public:
  explicit HostOperators(int64_t most_elements);
  ~HostOperators();
  HostOperators(const HostOperators&) = delete;
  HostOperators& operator=(const HostOperators&) = delete;

  /// "aten::add of 512 elements", each once, in the order of names.
  std::vector<std::string> found() const;
  /// Number of operators that had a tensor of the device.
  int64_t on_device() const;

 private:
  uint64_t callback_;
};

}  // namespace cohort::test
