// A translator whose parameters are divided among ranks: tensor parallelism.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/nmt/transformer.h"
#include "cohort/train/tensor_slice.h"

namespace cohort::translate {

/// The division of a model among the ranks of `group`, for Transformer's constructor: rank r has
/// part r. Every rank then makes the same calls with the same batches and dropout stream, and gets
/// the whole model's results; gradients are those of its parts.
///
/// Cost: an all_reduce of [sentences, tokens, width] in the compute
/// type for each block of a layer, in forward and again in backward; one for each embedding, one
/// for the encoder's output; and the loss's (parallel/tensor_parallel.h). Numerics: with more than
/// two ranks Gloo's order of a sum depends on where in the tensor an element lies, so the last bits
/// of a translation may depend on its batch. Errors of the model: PeerError.
std::shared_ptr<const nmt::Division> divide_among(const comm::ProcessGroup& group);

/// Whether each part has other elements of this parameter, which has `shape` in the part; if not,
/// all have the same.
bool is_divided(const nmt::TransformerImpl& model, const std::string& parameter,
                const std::vector<int64_t>& shape);

/// What all parts have, in slices of the whole model.
enum class Replicated {
  kEverywhere,  ///< In every part's slices: to load them.
  kOnce,        ///< Each part has its share: to save them.
};
/// What a part's slices are in the whole model: under the whole's shapes, so that a checkpoint of
/// all parts is the plain model's. Rows that are cut make a slice each. `slices` are of the part's
/// parameters, or of tensors like them, "<parameter>.exp_avg"; they share memory with the result.
/// Errors: c10::ValueError for a slice of no parameter, of another shape, or not contiguous.
std::vector<train::TensorSlice> whole_model_slices(const nmt::TransformerImpl& model,
                                                   const std::vector<train::TensorSlice>& slices,
                                                   Replicated replicated);

}  // namespace cohort::translate
