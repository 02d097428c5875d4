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

// A warp.
struct WarpLanes {
  __device__ static int lane() { return static_cast<int>(threadIdx.x); }

  template <class Part, class Join>
  __device__ auto reduce(const Part& part, const Join& join) const {
    auto value = part(lane());
    for (int half = kSoftmaxLanes / 2; half > 0; half /= 2)
      value = join(value, __shfl_down_sync(0xffffffffU, value, static_cast<unsigned>(half)));
    return __shfl_sync(0xffffffffU, value, 0);
  }

  template <class Part>
  __device__ void for_each(const Part& part) const {
    part(lane());
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
__global__ void __launch_bounds__(kDropThreads) relu_backward_kernel(ReluBackwardLaunch launch) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kDropThreads + threadIdx.x;
  if (i < launch.count) relu_backward_element<T>(launch, i);
}

constexpr int kSoftmaxRows = 8;  // Of a block: a warp each.

template <class T>
__global__ void __launch_bounds__(kSoftmaxLanes* kSoftmaxRows)
    softmax_kernel(SoftmaxLaunch launch, int64_t rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kSoftmaxRows + threadIdx.y;
  if (row < rows) softmax_row<T>(WarpLanes(), launch, row);
}

template <class T>
__global__ void __launch_bounds__(kSoftmaxLanes* kSoftmaxRows)
    softmax_backward_kernel(SoftmaxBackwardLaunch launch) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kSoftmaxRows + threadIdx.y;
  if (row < launch.rows) softmax_backward_row<T>(WarpLanes(), launch, row);
}

template <class T>
__global__ void __launch_bounds__(kLanes) cross_entropy_kernel(CrossEntropyLaunch launch) {
  cross_entropy_row<T>(BlockLanes(), launch, blockIdx.x);
}

unsigned blocks_for(int64_t count, int64_t each) {
  return static_cast<unsigned>((count + each - 1) / each);
}

// Null, or what is wrong: with the launch before, or with an earlier kernel of anybody's.
const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class In, class Out>
const char* launch_drop(const DropLaunch& launch, cudaStream_t stream) {
  const unsigned blocks = blocks_for(launch.count, kDropThreads * kDropElements);
  drop_kernel<In, Out><<<blocks, kDropThreads, 0, stream>>>(launch);
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

// body(value of the type's class).
template <class Body>
const char* for_element_type(ElementType type, const Body& body) {
  if (type == ElementType::kFloat32) return body(float());
  return type == ElementType::kFloat64 ? body(double()) : body(BFloat16Bits());
}

const char* relu_backward(const ReluBackwardLaunch& launch, void* stream_handle) {
  if (launch.count == 0) return nullptr;
  auto* const stream = static_cast<cudaStream_t>(stream_handle);
  return for_element_type(launch.type, [&]<class T>(T) {
    relu_backward_kernel<T>
        <<<blocks_for(launch.count, kDropThreads), kDropThreads, 0, stream>>>(launch);
    return launch_error();
  });
}

const char* softmax(const SoftmaxLaunch& launch, void* stream_handle) {
  const auto& [batch, heads, queries, keys, lengths, causal, scale] = launch.shape;
  const int64_t rows = batch * heads * queries;
  if (rows == 0 || keys == 0) return nullptr;
  auto* const stream = static_cast<cudaStream_t>(stream_handle);
  return for_element_type(launch.type, [&]<class T>(T) {
    const dim3 block(kSoftmaxLanes, kSoftmaxRows);
    softmax_kernel<T><<<blocks_for(rows, kSoftmaxRows), block, 0, stream>>>(launch, rows);
    return launch_error();
  });
}

const char* softmax_backward(const SoftmaxBackwardLaunch& launch, void* stream_handle) {
  if (launch.rows == 0 || launch.keys == 0) return nullptr;
  auto* const stream = static_cast<cudaStream_t>(stream_handle);
  return for_element_type(launch.type, [&]<class T>(T) {
    const dim3 block(kSoftmaxLanes, kSoftmaxRows);
    softmax_backward_kernel<T><<<blocks_for(launch.rows, kSoftmaxRows), block, 0, stream>>>(launch);
    return launch_error();
  });
}

const char* cross_entropy(const CrossEntropyLaunch& launch, void* stream_handle) {
  if (launch.rows == 0) return nullptr;
  auto* const stream = static_cast<cudaStream_t>(stream_handle);
  return for_element_type(launch.type, [&]<class T>(T) {
    cross_entropy_kernel<T><<<static_cast<unsigned>(launch.rows), kLanes, 0, stream>>>(launch);
    return launch_error();
  });
}

}  // namespace
}  // namespace cohort::nmt

extern "C" __attribute__((visibility("default"))) const cohort::nmt::CudaLaunches*
cohort_cuda_launches() {
  static const cohort::nmt::CudaLaunches launches{.drop = cohort::nmt::drop,
                                                  .relu_backward = cohort::nmt::relu_backward,
                                                  .softmax = cohort::nmt::softmax,
                                                  .softmax_backward = cohort::nmt::softmax_backward,
                                                  .cross_entropy = cohort::nmt::cross_entropy};
  return &launches;
}
