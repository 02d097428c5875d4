// SPDX-License-Identifier: Apache-2.0
// How a translator's layers run in training.
#pragma once
#include "cohort/nmt/transformer.h"

namespace cohort::translate {

/// Makes the layers units of whatever shards the model (parallel/sharding); where nothing does,
/// they run plainly. With `gradient_checkpointing` a layer keeps its inputs only, and backward
/// computes the rest again: less memory, more time, the same numbers.
void set_up_layers(nmt::Transformer& model, bool gradient_checkpointing);

}  // namespace cohort::translate
