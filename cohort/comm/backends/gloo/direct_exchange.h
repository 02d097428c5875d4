// SPDX-License-Identifier: Apache-2.0
// Collectives over Gloo that go straight from rank to rank, without the copies that Gloo's own
// make. Made of its send and recv.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace cohort::comm {

/// Fills `output` with every rank's `input`, by rank. `input` may be this rank's part of `output`.
/// `tag`: the same on all ranks, and no other message's.
/// Shapes: `output` has W times `input`'s elements, both contiguous.
/// Cost:   W-1 times `input`'s bytes sent and received per rank.
c10::intrusive_ptr<c10d::Work> direct_all_gather(c10d::Backend& gloo, const at::Tensor& output,
                                                 const at::Tensor& input, int tag);

/// Reduces `input` over ranks, in their order, and leaves the rank-th of its W equal parts in
/// `output`, which may be that part of `input`. The sum is done by `wait` of the result.
/// Cost: (W-1)/W of the bytes sent per rank; memory for W-2 parts, and for one more where `output`
///       is `input`'s.
c10::intrusive_ptr<c10d::Work> direct_reduce_scatter(c10d::Backend& gloo, const at::Tensor& output,
                                                     const at::Tensor& input, c10d::ReduceOp op,
                                                     int tag);

}  // namespace cohort::comm
