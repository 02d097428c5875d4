// SPDX-License-Identifier: Apache-2.0
// What the ranks' replicas of a model have in common: names, shapes and, once copied, values.
#pragma once
#include <ATen/core/Tensor.h>
#include <string>
#include <torch/nn/module.h>
#include <vector>

#include "cohort/comm/process_group.h"

namespace cohort::parallel {

/// Whether `name` is one of `names`.
bool contains(const std::vector<std::string>& names, const std::string& name);

/// Throws unless every rank passes the same `text`, lines that describe `what` ("models").
///
/// Collective; blocks.
/// Errors: c10::ValueError on every rank, naming the first line that differs and its rank.
void verify_same_text(const std::string& what, const std::string& text,
                      const comm::ProcessGroup& group, CallSite site = CallSite::here());

/// Throws unless every rank's model has the same parameter and buffer names, shapes and dtypes in
/// the same order, parameters with the same memory format, and lies where the group's backend
/// serves tensors; names in `ignored` do not count.
///
/// Collective; blocks.
/// Errors: c10::ValueError on every rank, naming the first difference and the rank, or the backend.
void verify_same_model(const torch::nn::Module& model, const comm::ProcessGroup& group,
                       const std::vector<std::string>& ignored = {},
                       CallSite site = CallSite::here());

/// Copies rank `root`'s parameters and buffers to every rank, but for those in `ignored`.
/// Collective; blocks.
void broadcast_model(const torch::nn::Module& model, const comm::ProcessGroup& group, int root = 0,
                     const std::vector<std::string>& ignored = {},
                     CallSite site = CallSite::here());

/// Copies `tensors` from rank `root` to all, in place, few messages for many tensors. Collective;
/// blocks.
void broadcast_tensors(const std::vector<at::Tensor>& tensors, const comm::ProcessGroup& group,
                       int root, CallSite site = CallSite::here());

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
  bool sparse_gradient =
      false;  ///< The weight of an Embedding or EmbeddingBag made with sparse(true).
};

/// Returns the parameters that require a gradient in registration order, each shared tensor once,
/// under its first name.
std::vector<NamedTensor> trainable_parameters(const torch::nn::Module& model,
                                              const std::vector<std::string>& ignored = {});

/// Returns where in `parameters` the names are, list by list.
/// Errors: c10::ValueError with `option`, naming one of `parameters` that is in no list, a name that
///         comes twice or is of none of them, or an empty list.
std::vector<std::vector<size_t>> indices_of(const char* option,
                                            const std::vector<std::vector<std::string>>& lists,
                                            const std::vector<NamedTensor>& parameters);

/// Returns every name that a parameter or buffer of `model` has which is one of `names`, also those of a shared one.
std::vector<std::string> under_every_name(const torch::nn::Module& model,
                                          const std::vector<std::string>& names);

/// Returns the model's buffers in registration order: the tensors themselves, which follow when
/// their storage is replaced.
std::vector<NamedTensor> model_buffers(const torch::nn::Module& model,
                                       const std::vector<std::string>& ignored = {});

/// The same memory as a tensor that autograd does not know for a view: detach_() of it is allowed.
at::Tensor alias_of(const at::Tensor& view);

}  // namespace cohort::parallel
