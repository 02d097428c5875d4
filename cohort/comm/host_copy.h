// SPDX-License-Identifier: Apache-2.0
// Numbers that a device computes, on their way to the host.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <optional>

namespace cohort::comm {

/// Copies a tensor to the host while the device works. Of a tensor on the CPU it is that tensor.
///
/// Owner:   holds the copy.
/// Threads: one.
class HostCopy {
 public:
  /// Starts the copy, behind what the device was given to do before. Does not wait.
  explicit HostCopy(const at::Tensor& tensor);
  /// Returns the copy, after waiting for the device if it is not there yet.
  const at::Tensor& wait();

 private:
  at::Tensor host_;
  std::optional<c10::Event> arrived_;
};

}  // namespace cohort::comm
