// SPDX-License-Identifier: Apache-2.0
// What libcohort_cuda.so gives: launches of CUDA kernels as functions of pointers, sizes and a
// stream. nvcc compiles them without libtorch's headers, the others without CUDA's, and the object
// needs no symbol of the program. Legend as in fused.h.
#pragma once
#include <cstdint>

#include "cohort/nmt/kernels/cpu/loops.h"

namespace cohort::nmt {

enum class ElementType : int32_t { kFloat32, kFloat64, kBFloat16 };

/// out[i] = rule(in[i]), or rule(max(in[i], 0)), for `count` elements. Element i has the number
/// rule.first + i / part_size * part_whole + i % part_size. Types: out's is in's, or bfloat16 where
/// in's is float32.
struct DropLaunch {
  const void* in = nullptr;
  void* out = nullptr;  ///< May be `in`, if the types are the same.
  ElementType in_type = ElementType::kFloat32;
  ElementType out_type = ElementType::kFloat32;
  int64_t count = 0;
  DropoutRule rule;
  int64_t part_size = 1, part_whole = 1;
  bool relu = false;
};

/// For each row n of logits: losses_N2[n] becomes its smoothed loss and -log p[label], as in
/// Kernels::cross_entropy; then, if `with_gradient`, the row becomes the loss's gradient.
/// Numerics: sums as in Kernels, in an order that columns alone decide. A label outside of
///           [0, columns) makes both losses NaN; no memory outside of the row is touched.
struct CrossEntropyLaunch {
  void* logits_NV = nullptr;
  const int64_t* labels_N = nullptr;
  double* losses_N2 = nullptr;
  ElementType type = ElementType::kFloat32;
  int64_t rows = 0, columns = 0;
  double smoothing = 0;
  bool with_gradient = false;
};

/// Of CudaLaunches and its arguments; an object of another version is refused.
inline constexpr int kCudaLaunchesVersion = 1;

/// Launches on memory of the current device, behind what `stream`, a cudaStream_t, holds. They do
/// not wait, and return null, or why nothing was launched: text that lives for ever.
/// Threads: any.
struct CudaLaunches {
  int version = kCudaLaunchesVersion;
  const char* (*drop)(const DropLaunch& launch, void* stream) = nullptr;
  const char* (*cross_entropy)(const CrossEntropyLaunch& launch, void* stream) = nullptr;
};

/// The C function that the object exports; it returns a `const CudaLaunches*`, good for ever.
inline constexpr const char* kCudaLaunchesEntry = "cohort_cuda_launches";

}  // namespace cohort::nmt
