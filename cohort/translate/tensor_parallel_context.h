// SPDX-License-Identifier: Apache-2.0
// Tensor parallelism of a translator: its parameters are sharded among ranks.
#pragma once
#include <memory>

#include "cohort/comm/process_group.h"
#include "cohort/nmt/transformer.h"
#include "cohort/parallel/tensor_parallel_plan.h"

namespace cohort::translate {

/// Makes the context of a model that is sharded among the ranks of `group`, for Transformer's
/// constructor: rank r has shard r. Every rank then makes the same calls with the same batches and
/// dropout stream, and gets the unsharded model's results; gradients are those of its shard.
///
/// Cost:     an all_reduce of [sentences, tokens, width] in the compute type for each block of a
///           layer, in forward and again in backward; one for each embedding, one for the encoder's
///           output; and the loss's (parallel/tensor_parallel.h).
/// Numerics: with more than two ranks over Gloo the order of a sum depends on where in the tensor
///           an element lies, so there the last bits of a translation may depend on its batch. Errors of the
///           model: PeerError.
std::shared_ptr<const nmt::TensorParallelContext> make_tensor_parallel_context(
    const comm::ProcessGroup& group);

/// Which parameters of such a model are cut, and how.
parallel::TensorParallelPlan tensor_parallel_plan(const nmt::TransformerImpl& model);

}  // namespace cohort::translate
