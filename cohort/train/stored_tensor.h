// Tensors as the bytes that checkpoints hold. For the checkpoints' own sources.
#pragma once
#include <string>
#include <vector>

#include "cohort/base/stored_checkpoint.h"
#include "cohort/train/tensor_slice.h"

namespace cohort::train {

/// Errors: c10::ValueError for a type that files do not have.
DType dtype_of(const at::Tensor& tensor);

/// Errors: c10::ValueError if the elements are not within the shape, or the tensor has others.
void check_slice(const TensorSlice& slice);

/// The slices with contiguous tensors in the computer's memory: themselves where they are that.
std::vector<TensorSlice> on_host(std::vector<TensorSlice> slices);
/// Views of slices that are on the host.
std::vector<StoredSlice> stored_slices(const std::vector<TensorSlice>& slices);

/// Writes a rank's slices, a file for each part. If one cannot be written, the others go again.
/// Returns what the manifest must say. Memory: of a part that is not on the host, a copy.
/// Errors: write_share's.
Manifest write_parts(const std::string& folder, const SlicedParts& parts, const ShareInfo& info);

}  // namespace cohort::train
