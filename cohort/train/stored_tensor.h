// Tensors as the bytes that checkpoints hold. For the checkpoints' own sources.
#pragma once
#include <vector>

#include "cohort/base/stored_checkpoint.h"
#include "cohort/train/checkpoint.h"

namespace cohort::train {

/// Errors: c10::ValueError for a type that files do not have.
DType dtype_of(const at::Tensor& tensor);

/// A contiguous copy in the computer's memory.
at::Tensor host_copy(const at::Tensor& tensor);

/// Errors: c10::ValueError if the elements are not within the shape, or the tensor has others.
void check_slice(const TensorSlice& slice);

/// The slices with contiguous tensors in the computer's memory: themselves where they are that.
std::vector<TensorSlice> on_host(std::vector<TensorSlice> slices);
/// The same with copies.
std::vector<TensorSlice> host_copies(std::vector<TensorSlice> slices);

/// Views of slices that are on the host.
std::vector<StoredSlice> stored_slices(const std::vector<TensorSlice>& slices);

}  // namespace cohort::train
