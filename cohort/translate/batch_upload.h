// SPDX-License-Identifier: Apache-2.0
// Batches on their way to a device.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <optional>

#include "cohort/nmt/transformer.h"

namespace cohort::translate {

/// Copies batches to a device on a stream of its own, beside what the current stream computes.
/// To the CPU nothing is copied.
///
/// Owner:   holds the batch between `start` and `take`.
/// Threads: one.
class BatchUpload {
 public:
  explicit BatchUpload(at::Device device);

  /// Starts to copy `batch`, from pinned memory without waiting.
  void start(const nmt::Batch& batch);
  /// Returns the batch that was started. The current stream waits for the copy, the host does not.
  nmt::Batch take();

 private:
  at::Device device_;
  std::optional<c10::Stream> stream_;  // Of the copies; none on the CPU, ...
  std::optional<c10::Event> copied_;   // ... and this neither.
  nmt::Batch batch_;
};

}  // namespace cohort::translate
