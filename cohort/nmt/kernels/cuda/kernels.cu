// SPDX-License-Identifier: Apache-2.0
// libcohort_cuda.so: the kernels of arithmetic.h. It needs the CUDA runtime alone, the one that
// libtorch has loaded.
#include <cuda_runtime.h>

#include "cohort/nmt/kernels/cuda/arithmetic.h"
#include "cohort/nmt/kernels/cuda/launches.h"

namespace cohort::nmt {
namespace {

// A block of kLanes threads.
struct BlockLanes {
  __device__ bool first() const { return threadIdx.x == 0; }

  template <class Part, class Join>
  __device__ auto reduce(const Part& part, const Join& join) const {
    using Value = decltype(part(0));
    __shared__ Value
        parts[kLanes];  // Each call of reduce() has its own: its lambdas' types differ.
    const int lane = static_cast<int>(threadIdx.x);
    parts[lane] = part(lane);
    for (int half = kLanes / 2; half > 0; half /= 2) {
      __syncthreads();
      if (lane < half) parts[lane] = join(parts[lane], parts[lane + half]);
    }
    __syncthreads();
    return parts[0];
  }

  template <class Part>
  __device__ void for_each(const Part& part) const {
    __syncthreads();
    part(static_cast<int>(threadIdx.x));
  }
};

constexpr int kDropThreads = 256;
constexpr int64_t kDropElements = 4;  // Of a thread: a hash serves four.

template <class In, class Out>
__global__ void __launch_bounds__(kDropThreads) drop_kernel(DropLaunch launch) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kDropThreads + threadIdx.x;
  const int64_t first = thread * kDropElements, end = first + kDropElements;
  drop_elements<In, Out>(launch, first, end < launch.count ? end : launch.count);
}

template <class T>
__global__ void __launch_bounds__(kLanes) cross_entropy_kernel(CrossEntropyLaunch launch) {
  cross_entropy_row<T>(BlockLanes(), launch, blockIdx.x);
}

// Null, or what is wrong: with the launch before, or with an earlier kernel of anybody's.
const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class In, class Out>
const char* launch_drop(const DropLaunch& launch, cudaStream_t stream) {
  const int64_t each = kDropThreads * kDropElements, blocks = (launch.count + each - 1) / each;
  drop_kernel<In, Out><<<static_cast<unsigned>(blocks), kDropThreads, 0, stream>>>(launch);
  return launch_error();
}

const char* drop(const DropLaunch& launch, void* stream_handle) {
  if (launch.count == 0) return nullptr;
  auto* const stream = static_cast<cudaStream_t>(stream_handle);
  const bool same = launch.in_type == launch.out_type;
  if (launch.in_type == ElementType::kFloat32) {
    return same ? launch_drop<float, float>(launch, stream)
                : launch_drop<float, BFloat16Bits>(launch, stream);
  }
  return launch.in_type == ElementType::kFloat64
             ? launch_drop<double, double>(launch, stream)
             : launch_drop<BFloat16Bits, BFloat16Bits>(launch, stream);
}

template <class T>
const char* launch_cross_entropy(const CrossEntropyLaunch& launch, cudaStream_t stream) {
  cross_entropy_kernel<T><<<static_cast<unsigned>(launch.rows), kLanes, 0, stream>>>(launch);
  return launch_error();
}

const char* cross_entropy(const CrossEntropyLaunch& launch, void* stream_handle) {
  if (launch.rows == 0) return nullptr;
  auto* const stream = static_cast<cudaStream_t>(stream_handle);
  if (launch.type == ElementType::kFloat32) return launch_cross_entropy<float>(launch, stream);
  return launch.type == ElementType::kFloat64 ? launch_cross_entropy<double>(launch, stream)
                                              : launch_cross_entropy<BFloat16Bits>(launch, stream);
}

}  // namespace
}  // namespace cohort::nmt

extern "C" __attribute__((visibility("default"))) const cohort::nmt::CudaLaunches*
cohort_cuda_launches() {
  static const cohort::nmt::CudaLaunches launches{.drop = cohort::nmt::drop,
                                                  .cross_entropy = cohort::nmt::cross_entropy};
  return &launches;
}
