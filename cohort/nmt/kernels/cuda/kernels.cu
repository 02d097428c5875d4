// SPDX-License-Identifier: Apache-2.0
// libcohort_cuda.so: the kernels of arithmetic.h. It needs the CUDA runtime alone, the one that
// libtorch has loaded.
#include <cuda_runtime.h>

#include "cohort/nmt/kernels/cuda/arithmetic.h"
#include "cohort/nmt/kernels/cuda/attention.h"
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

constexpr int kThreads = 256;

// Some neighbouring elements. Memory is taken at its alignment where the launch allows it.
template <class T>
struct alignas(sizeof(T) * kElements) Pack {
  T values[kElements];
};

template <class T>
bool is_aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % alignof(Pack<T>) == 0;
}

template <class T>
__device__ Pack<T> load_pack(const T* from, bool whole, int count) {
  if (whole) return *reinterpret_cast<const Pack<T>*>(from);
  Pack<T> pack;
  for (int i = 0; i < kElements; ++i)
    if (i < count) pack.values[i] = from[i];
  return pack;
}

template <class T>
__device__ void store_pack(const Pack<T>& pack, T* to, bool whole, int count) {
  if (whole) {
    *reinterpret_cast<Pack<T>*>(to) = pack;
  } else {
    for (int i = 0; i < kElements; ++i)
      if (i < count) to[i] = pack.values[i];
  }
}

// body(first element of this thread, how many, whether they may be moved at once).
template <class Body>
__device__ void for_pack(int64_t count, bool aligned, const Body& body) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kElements;
  if (first + kElements <= count) {
    body(first, kElements, aligned);
  } else if (first < count) {
    body(first, static_cast<int>(count - first), false);
  }
}

template <class In, class Out>
__global__ void __launch_bounds__(kThreads) drop_kernel(DropLaunch launch, bool aligned) {
  for_pack(launch.count, aligned, [&](int64_t first, int count, bool whole) {
    const auto in = load_pack(static_cast<const In*>(launch.in) + first, whole, count);
    const Out* more = static_cast<const Out*>(launch.added);
    Pack<Out> added, out;
    if (more != nullptr) added = load_pack(more + first, whole, count);
    drop_elements(launch, in.values, more == nullptr ? nullptr : added.values, out.values, first,
                  count);
    store_pack(out, static_cast<Out*>(launch.out) + first, whole, count);
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    relu_backward_kernel(ReluBackwardLaunch launch, bool aligned) {
  for_pack(launch.count, aligned, [&](int64_t first, int count, bool whole) {
    const auto out = load_pack(static_cast<const T*>(launch.out) + first, whole, count);
    const auto grad = load_pack(static_cast<const T*>(launch.grad) + first, whole, count);
    Pack<T> to;
    relu_backward_elements(launch, out.values, grad.values, to.values, count);
    store_pack(to, static_cast<T*>(launch.to) + first, whole, count);
  });
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

struct AttentionThread {
  AttentionLane at;

  template <class Body>
  __device__ void each(const Body& body) {
    body(static_cast<int>(threadIdx.x), at);
    __syncwarp();  // Branches of body are over: what follows needs all lanes.
  }

  template <class Select>
  __device__ void multiply(const Select& select) {
#if __CUDA_ARCH__ >= 800
    const AttentionProduct of = select(at);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(of.c[0]), "+f"(of.c[1]), "+f"(of.c[2]), "+f"(of.c[3])
        : "r"(of.a[0]), "r"(of.a[1]), "r"(of.a[2]), "r"(of.a[3]), "r"(of.b[0]), "r"(of.b[1]));
#else
    __trap();  // has_attention() is false there.
#endif
  }

  template <class Join>
  __device__ void of_row(float (AttentionLane::*member)[2], const Join& join) {
    for (float& value : at.*member) {
      value = join(value, __shfl_xor_sync(0xffffffffU, value, 1));
      value = join(value, __shfl_xor_sync(0xffffffffU, value, 2));
    }
  }
};

constexpr int kAttentionWarps = 4;  // Of a block.

__device__ int64_t warp_number() {
  return static_cast<int64_t>(blockIdx.x) * kAttentionWarps + threadIdx.y;
}

__global__ void __launch_bounds__(32 * kAttentionWarps, 4)
    attention_kernel(AttentionLaunch launch, int64_t warps) {
  AttentionThread thread;
  if (warp_number() < warps) attention_warp(thread, launch, warp_number());
}

__global__ void __launch_bounds__(32 * kAttentionWarps, 3)
    queries_backward_kernel(AttentionBackwardLaunch launch, int64_t warps) {
  AttentionThread thread;
  if (warp_number() < warps) attention_queries_backward_warp(thread, launch, warp_number());
}

__global__ void __launch_bounds__(32 * kAttentionWarps, 3)
    keys_backward_kernel(AttentionBackwardLaunch launch, int64_t warps) {
  AttentionThread thread;
  if (warp_number() < warps) attention_keys_backward_warp(thread, launch, warp_number());
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
  const bool aligned = is_aligned(static_cast<const In*>(launch.in)) &&
                       is_aligned(static_cast<const Out*>(launch.added)) &&
                       is_aligned(static_cast<Out*>(launch.out));
  const unsigned blocks = blocks_for(launch.count, kThreads * kElements);
  drop_kernel<In, Out><<<blocks, kThreads, 0, stream>>>(launch, aligned);
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
  if (launch.in_type == ElementType::kFloat64) return launch_drop<double, double>(launch, stream);
  return same ? launch_drop<BFloat16Bits, BFloat16Bits>(launch, stream)
              : launch_drop<BFloat16Bits, float>(launch, stream);
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
    const bool aligned = is_aligned(static_cast<const T*>(launch.out)) &&
                         is_aligned(static_cast<const T*>(launch.grad)) &&
                         is_aligned(static_cast<T*>(launch.to));
    const unsigned blocks = blocks_for(launch.count, kThreads * kElements);
    relu_backward_kernel<T><<<blocks, kThreads, 0, stream>>>(launch, aligned);
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

// Where CUDA fails at that, the next launch says so.
bool has_attention() {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major >= 8;
}

// Warps that own some of `rows` rows of each head.
int64_t attention_warps(const SoftmaxShape& shape, int64_t rows) {
  return shape.batch * shape.heads * blocks_for(rows, kAttentionRows);
}

const char* attention(const AttentionLaunch& launch, void* stream_handle) {
  const int64_t warps = attention_warps(launch.shape, launch.shape.queries);
  if (warps == 0) return nullptr;
  auto* const stream = static_cast<cudaStream_t>(stream_handle);
  const dim3 block(32, kAttentionWarps);
  attention_kernel<<<blocks_for(warps, kAttentionWarps), block, 0, stream>>>(launch, warps);
  return launch_error();
}

const char* attention_backward(const AttentionBackwardLaunch& launch, void* stream_handle) {
  const int64_t queries = attention_warps(launch.shape, launch.shape.queries);
  const int64_t keys = attention_warps(launch.shape, launch.shape.keys);
  auto* const stream = static_cast<cudaStream_t>(stream_handle);
  const dim3 block(32, kAttentionWarps);
  if (queries != 0) {
    queries_backward_kernel<<<blocks_for(queries, kAttentionWarps), block, 0, stream>>>(launch,
                                                                                        queries);
  }
  if (keys != 0)
    keys_backward_kernel<<<blocks_for(keys, kAttentionWarps), block, 0, stream>>>(launch, keys);
  return launch_error();
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
  static const cohort::nmt::CudaLaunches launches{
      .drop = cohort::nmt::drop,
      .relu_backward = cohort::nmt::relu_backward,
      .softmax = cohort::nmt::softmax,
      .softmax_backward = cohort::nmt::softmax_backward,
      .has_attention = cohort::nmt::has_attention,
      .attention = cohort::nmt::attention,
      .attention_backward = cohort::nmt::attention_backward,
      .cross_entropy = cohort::nmt::cross_entropy};
  return &launches;
}
