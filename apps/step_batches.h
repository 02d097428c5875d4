// SPDX-License-Identifier: Apache-2.0
// Batches of synthetic sentences with a news corpus's lengths, and what a training step of the translator computes with
// them: for `cohort bench step` and bench/nmt_step.cpp.
#pragma once
#include <c10/core/ScalarType.h>
#include <cstdint>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/nmt/transformer.h"

namespace cohort::apps {

/// Of a pair of sentences, in pieces without end marks.
struct SentenceLengths {
  int64_t source, target;
};

using BatchLengths = std::vector<SentenceLengths>;

struct BatchPlan {
  int64_t words = 4096;  ///< Target tokens of a batch, padded.
  uint64_t seed = 1;
  int64_t rows = 0;     ///< Sentences of a batch, all alike; 0: of many lengths ...
  int64_t length = 12;  ///< ... and their length on both sides.
};

/// Returns the lengths of batches; the same ones for the same plan, in bench/peers/nmt_ddp.py too.
std::vector<BatchLengths> plan_batches(const BatchPlan& plan);
/// Returns a batch on the host whose pieces are drawn by `seed`.
nmt::Batch make_batch(const BatchLengths& rows, uint64_t seed, int64_t vocabulary);

/// FLOP of attention's products for these sentences, forward and twice as many backward: without
/// padding, and all pairs of a target's tokens.
double attention_flop(const BatchLengths& rows, const nmt::TransformerOptions& sizes);
/// FLOP of all matrix products that a step needs, counted in the same way, and no layer twice
/// (gradient checkpointing).
double step_flop(const BatchLengths& rows, const nmt::TransformerOptions& sizes);

/// Returns the FLOP/s of the base model's largest common product shape, of all ranks at once.
/// Collective; blocks.
double product_rate(const comm::ProcessGroup& group, at::ScalarType type, int64_t rows);

/// Blocks until the device has done all that it was given.
void wait_for_device(at::Device device);

}  // namespace cohort::apps
