// SPDX-License-Identifier: Apache-2.0
// What differs between the versions of libtorch that Cohort builds with (COHORT_LIBTORCH_VERSIONS in
// CMakeLists.txt), and nothing else: code that reads this header is the same for all of them.
#pragma once
#include <memory>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/headeronly/version.h>
#include <utility>

#if TORCH_VERSION_MINOR < 15
#include <torch/csrc/distributed/c10d/TCPStoreBackend.hpp>
#else
#include <torch/csrc/distributed/c10d/store/TCPStoreBackend.hpp>
#endif

// Collectives of c10d::ProcessGroup and of Gloo, to call and to override. A backend of its own may
// override the older name with both versions: 2.15 forwards the newer to it.
#if TORCH_VERSION_MINOR < 15
#define COHORT_ALL_GATHER_SINGLE _allgather_base
#define COHORT_REDUCE_SCATTER_SINGLE _reduce_scatter_base
#define COHORT_ALL_TO_ALL_SINGLE alltoall_base
#else
#define COHORT_ALL_GATHER_SINGLE all_gather_single
#define COHORT_REDUCE_SCATTER_SINGLE reduce_scatter_single
#define COHORT_ALL_TO_ALL_SINGLE all_to_all_single
#endif

namespace cohort::comm {

/// What owns a node of autograd's graph.
using NodePointer = decltype(torch::autograd::Edge::function);

/// Makes a node of type `T`.
template <typename T, typename... Arguments>
auto make_node(Arguments&&... arguments) {
#if TORCH_VERSION_MINOR < 15
  return std::make_shared<T>(std::forward<Arguments>(arguments)...);
#else
  return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
#endif
}

/// Gives `tensor` the node that takes its gradient; the caller keeps it alive.
inline void set_grad_accumulator(const at::Tensor& tensor, const NodePointer& accumulator) {
#if TORCH_VERSION_MINOR < 15
  torch::autograd::impl::set_grad_accumulator(tensor, accumulator);
#else
  torch::autograd::impl::set_grad_accumulator(tensor, c10::weak_intrusive_ptr(accumulator));
#endif
}

}  // namespace cohort::comm
