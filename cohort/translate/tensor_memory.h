// SPDX-License-Identifier: Apache-2.0
// How many bytes of tensors a piece of code holds at most.
#pragma once
#include <algorithm>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <cstdint>
#include <memory>

namespace cohort::translate {

/// Counts the bytes of a kind of device's tensors, while it lives, as libtorch's allocators report
/// them on this thread and on those of its backward pass. What libraries under them take for
/// themselves (oneDNN's scratch memory, say) is not seen.
class TensorMemory {
 public:
  explicit TensorMemory(c10::DeviceType type = c10::DeviceType::CPU)
      : counter_(std::make_shared<Counter>(type)) {}
  int64_t now() const { return counter_->now; }    ///< Bytes more than at the beginning.
  int64_t peak() const { return counter_->peak; }  ///< Most of them.
  void reset_peak() { counter_->peak = counter_->now; }

 private:
  struct Counter : c10::MemoryReportingInfoBase {
    explicit Counter(c10::DeviceType counted) : type(counted) {}
    void reportMemoryUsage(void* /*pointer*/, int64_t bytes, size_t /*allocated*/,
                           size_t /*reserved*/, c10::Device device) override {
      if (device.type() != type) return;
      now += bytes;
      peak = std::max(peak, now);
    }
    bool memoryProfilingEnabled() const override { return true; }
    const c10::DeviceType type;
    int64_t now = 0;
    int64_t peak = 0;
  };
  std::shared_ptr<Counter> counter_;
  c10::DebugInfoGuard counting_{c10::DebugInfoKind::PROFILER_STATE, counter_};
};

/// Returns the most bytes of tensors that `body` held beyond those that were there before it.
template <class Body>
int64_t peak_tensor_bytes(Body body, c10::DeviceType type = c10::DeviceType::CPU) {
  const TensorMemory memory(type);
  body();
  return memory.peak();
}

}  // namespace cohort::translate
