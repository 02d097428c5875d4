// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/sharding/graph_section.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <limits>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <unordered_set>

#include "cohort/comm/libtorch_version.h"

namespace cohort::parallel {

using torch::autograd::Node;

namespace {

struct WatchedOutput : Node {
  explicit WatchedOutput(std::function<void()> on_gradient) : watch(std::move(on_gradient)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    watch();
    return std::move(gradients);
  }
  std::function<void()> watch;
};

}  // namespace

void watch_output(at::Tensor& output, std::function<void()> on_gradient) {
  const auto node = comm::make_node<WatchedOutput>(std::move(on_gradient));
  node->add_next_edge(torch::autograd::impl::gradient_edge(output));
  at::Tensor same = output.detach();
  torch::autograd::set_history(same, node);
  output = same;
}

uint64_t recording_position() {
  return at::sequence_number::peek();
}

std::vector<Node*> first_nodes(const std::vector<at::Tensor>& outputs, uint64_t position) {
  const uint64_t thread = at::RecordFunction::currentThreadId();
  const auto recorded_since = [&](const Node& node) {
    const uint64_t number = node.sequence_nr();
    // Nodes that take the gradients of leaves have this one, whenever they were made.
    if (number == std::numeric_limits<uint64_t>::max()) return false;
    return node.thread_id() != thread || number >= position;
  };
  std::vector<Node*> waiting;
  std::unordered_set<Node*> seen;
  const auto visit = [&](Node* node) {
    if (seen.insert(node).second) waiting.push_back(node);
  };
  for (const at::Tensor& output : outputs) {
    if (output.defined() && output.grad_fn() && recorded_since(*output.grad_fn()))
      visit(output.grad_fn().get());
  }
  std::vector<Node*> found;
  while (!waiting.empty()) {
    Node* node = waiting.back();
    waiting.pop_back();
    bool inner = false;
    bool leaves = false;
    for (const auto& edge : node->next_edges()) {
      if (!edge.is_valid()) continue;
      if (recorded_since(*edge.function)) {
        inner = true;
        visit(edge.function.get());
      } else {
        leaves = true;
      }
    }
    if (leaves || !inner) found.push_back(node);
  }
  return found;
}

}  // namespace cohort::parallel
