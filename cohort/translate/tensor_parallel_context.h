// Tensor parallelism of a translator: its parameters are sharded among ranks.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/nmt/transformer.h"
#include "cohort/train/tensor_shard.h"

namespace cohort::translate {

/// Makes the context of a model that is sharded among the ranks of `group`, for Transformer's
/// constructor: rank r has shard r. Every rank then makes the same calls with the same batches and
/// dropout stream, and gets the unsharded model's results; gradients are those of its shard.
///
/// Cost:     an all_reduce of [sentences, tokens, width] in the compute type for each block of a
///           layer, in forward and again in backward; one for each embedding, one for the encoder's
///           output; and the loss's (parallel/tensor_parallel.h).
/// Numerics: with more than two ranks Gloo's order of a sum depends on where in the tensor an
///           element lies, so the last bits of a translation may depend on its batch. Errors of the
///           model: PeerError.
std::shared_ptr<const nmt::TensorParallelContext> make_tensor_parallel_context(
    const comm::ProcessGroup& group);

/// Whether each shard has other elements of this parameter, which has `shape` in the shard; if not,
/// it is replicated.
bool is_partitioned(const nmt::TransformerImpl& model, const std::string& parameter,
                    const std::vector<int64_t>& shape);

/// How replicated parameters appear among the shards of the full model.
enum class Replicated {
  kEverywhere,  ///< On every rank: to load them.
  kOnce,        ///< Each rank has its share: to save them.
};
/// A rank's shards as shards of the full model, under its shapes, so that a checkpoint of all ranks
/// is the unsharded model's. Rows that are cut make a shard each. `shards` are of the rank's
/// parameters, or of tensors like them, "<parameter>.exp_avg"; they share memory with the result.
/// Errors: c10::ValueError for a shard of no parameter, of another shape, or not contiguous.
std::vector<train::TensorShard> full_model_shards(const nmt::TransformerImpl& model,
                                                  const std::vector<train::TensorShard>& shards,
                                                  Replicated replicated);

}  // namespace cohort::translate
