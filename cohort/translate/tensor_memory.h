// How many bytes of tensors a piece of code holds at most.
#pragma once
#include <algorithm>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <cstdint>
#include <memory>

namespace cohort::translate {

/// Returns the most bytes that `body` held beyond those that were there before it, as libtorch's
/// allocators report them on this thread and on those of its backward pass. What libraries under it
/// take for themselves (oneDNN's scratch memory, say) is not seen.
template <class Body>
int64_t peak_tensor_bytes(Body body) {
  class Peak : public c10::MemoryReportingInfoBase {
   public:
    void reportMemoryUsage(void* /*pointer*/, int64_t bytes, size_t /*allocated*/,
                           size_t /*reserved*/, c10::Device /*device*/) override {
      now_ += bytes;
      peak_ = std::max(peak_, now_);
    }
    bool memoryProfilingEnabled() const override { return true; }
    int64_t bytes() const { return peak_; }

   private:
    int64_t now_ = 0;
    int64_t peak_ = 0;
  };
  const auto peak = std::make_shared<Peak>();
  const c10::DebugInfoGuard counting(c10::DebugInfoKind::PROFILER_STATE, peak);
  body();
  return peak->bytes();
}

}  // namespace cohort::translate
