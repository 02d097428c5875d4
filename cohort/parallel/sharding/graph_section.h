// SPDX-License-Identifier: Apache-2.0
// The part of autograd's graph that one stretch of a forward has recorded. Local; for the sharding
// engine alone.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <functional>
#include <vector>

namespace torch::autograd {
struct Node;
}

namespace cohort::parallel {

/// Where this thread's recording stands: the number of the next node.
uint64_t recording_position();

/// Of the nodes that lead to `outputs` and were recorded since `position`, those from which
/// gradients leave, to older nodes or to leaves. A backward that has passed all of them has passed
/// every node of that stretch. Empty if nothing was recorded. Nodes of other threads count as
/// recorded since: their numbers tell nothing.
/// Memory: the graph owns the nodes.
/// Cost:   one visit for each node.
std::vector<torch::autograd::Node*> first_nodes(const std::vector<at::Tensor>& outputs,
                                                uint64_t position);

/// Makes `output`, which has a gradient function, pass its gradient through `on_gradient` first. Of
/// all nodes recorded so far this one has the highest number: autograd, which runs the highest of
/// those that are ready, runs it before any other node of that stretch, on one device.
void watch_output(at::Tensor& output, std::function<void()> on_gradient);

}  // namespace cohort::parallel
