// SPDX-License-Identifier: Apache-2.0
// Dense blocks on a GPU: the rules of update_rule.h as operations of libtorch.
#pragma once
#include <c10/core/Device.h>

#include "cohort/ps/server/block_store.h"

namespace cohort::ps {

/// Blocks whose weights, state and updates live on `device`; gradients and values are copied to and
/// fro.
///
/// Numerics: update_rule.h's formulas in float32, in the order of operations that they give;
/// libtorch may round differently, by a few units in the last place an update. Errors of the maker:
/// c10::Error if there is no such device; c10::ValueError for row-wise Adagrad, a rule of rows.
BlockMaker device_blocks(const c10::Device& device);

}  // namespace cohort::ps
