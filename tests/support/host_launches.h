// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels' arithmetic on the host: their threads one after another, in the same blocks.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

#include "cohort/nmt/kernels/cuda/arithmetic.h"
#include "cohort/nmt/kernels/kernels.h"

namespace cohort::test {

/// While this lives, tensors of `device` are computed as on CUDA, by loops over memory that the host
/// has `offset` bytes behind the tensors' addresses.
class HostLaunches {
 public:
  explicit HostLaunches(c10::DeviceType device = c10::DeviceType::CPU, std::ptrdiff_t offset = 0) {
    static constexpr nmt::CudaLaunches kLaunches{.drop = drop, .cross_entropy = cross_entropy};
    state() = {.offset = offset};
    nmt::use_cuda_launches(&kLaunches, device);
  }
  ~HostLaunches() { nmt::use_cuda_launches(nullptr, c10::DeviceType::CPU); }
  HostLaunches(const HostLaunches&) = delete;
  HostLaunches& operator=(const HostLaunches&) = delete;

  int calls() const { return state().calls; }
  void* stream() const { return state().stream; }  ///< Of the last call.

 private:
  struct State {
    std::ptrdiff_t offset = 0;
    int calls = 0;
    void* stream = nullptr;
  };
  static State& state() {
    static State state;
    return state;
  }
  template <class T>
  static T* host(T* device) {
    return reinterpret_cast<T*>(reinterpret_cast<intptr_t>(device) + state().offset);
  }

  // As kernels.cu's BlockLanes.
  struct Lanes {
    bool first() const { return true; }
    template <class Part, class Join>
    auto reduce(const Part& part, const Join& join) const {
      std::vector<decltype(part(0))> parts;
      for (int lane = 0; lane < nmt::kLanes; ++lane) parts.push_back(part(lane));
      for (size_t half = nmt::kLanes / 2; half > 0; half /= 2) {
        for (size_t lane = 0; lane < half; ++lane)
          parts[lane] = join(parts[lane], parts[lane + half]);
      }
      return parts[0];
    }
    template <class Part>
    void for_each(const Part& part) const {
      for (int lane = 0; lane < nmt::kLanes; ++lane) part(lane);
    }
  };

  template <class In, class Out>
  static void drop_all(const nmt::DropLaunch& launch) {
    for (int64_t first = 0; first < launch.count; first += 4)
      nmt::drop_elements<In, Out>(launch, first, std::min(first + 4, launch.count));
  }
  static const char* drop(const nmt::DropLaunch& device, void* stream) {
    state() = {state().offset, state().calls + 1, stream};
    nmt::DropLaunch launch = device;
    launch.in = host(launch.in);
    launch.out = host(launch.out);
    const bool same = launch.in_type == launch.out_type;
    if (launch.in_type == nmt::ElementType::kFloat64) {
      drop_all<double, double>(launch);
    } else if (launch.in_type == nmt::ElementType::kBFloat16) {
      drop_all<nmt::BFloat16Bits, nmt::BFloat16Bits>(launch);
    } else if (same) {
      drop_all<float, float>(launch);
    } else {
      drop_all<float, nmt::BFloat16Bits>(launch);
    }
    return nullptr;
  }
  static const char* cross_entropy(const nmt::CrossEntropyLaunch& device, void* stream) {
    state() = {state().offset, state().calls + 1, stream};
    nmt::CrossEntropyLaunch launch = device;
    launch.logits_NV = host(launch.logits_NV);
    launch.labels_N = host(launch.labels_N);
    launch.losses_N2 = host(launch.losses_N2);
    for (int64_t n = 0; n < launch.rows; ++n) {
      if (launch.type == nmt::ElementType::kFloat64) {
        nmt::cross_entropy_row<double>(Lanes(), launch, n);
      } else if (launch.type == nmt::ElementType::kBFloat16) {
        nmt::cross_entropy_row<nmt::BFloat16Bits>(Lanes(), launch, n);
      } else {
        nmt::cross_entropy_row<float>(Lanes(), launch, n);
      }
    }
    return nullptr;
  }
};

}  // namespace cohort::test
