// SPDX-License-Identifier: Apache-2.0
#include "cohort/optim/gradient_memory.h"

#include <mutex>
#include <optional>
#include <torch/csrc/autograd/graph_task.h>
#include <unordered_map>
#include <utility>

namespace cohort::optim {
namespace {

struct Offer {
  const GradientMemory* owner;
  at::Tensor parameter;
  std::function<at::Tensor()> memory;
  std::optional<c10::weak_intrusive_ptr<at::TensorImpl>> taken;
};

struct Offers {
  std::mutex mutex;
  std::unordered_map<const at::TensorImpl*, Offer> by_parameter;
};

// Lives for ever: models may end after static objects.
Offers& offers() {
  static auto* const instance = new Offers;
  return *instance;
}

bool accumulates_into_all() {
  const auto* only = torch::autograd::get_current_graph_task_exec_info();
  return only != nullptr && only->empty();
}

}  // namespace

GradientMemory::~GradientMemory() {
  withdraw();
}

void GradientMemory::withdraw() {
  const std::scoped_lock lock(offers().mutex);
  std::erase_if(offers().by_parameter,
                [this](const auto& each) { return each.second.owner == this; });
}

void GradientMemory::offer(const at::Tensor& parameter, std::function<at::Tensor()> memory) {
  const std::scoped_lock lock(offers().mutex);
  offers().by_parameter.insert_or_assign(parameter.unsafeGetTensorImpl(),
                                         Offer{this, parameter, std::move(memory), std::nullopt});
}

at::Tensor take_gradient_memory(const at::TensorImpl* parameter, at::IntArrayRef shape,
                                at::ScalarType type) {
  if (!accumulates_into_all()) return {};
  const std::scoped_lock lock(offers().mutex);
  const auto found = offers().by_parameter.find(parameter);
  if (found == offers().by_parameter.end()) return {};
  Offer& offer = found->second;
  if (offer.parameter.grad().defined() || (offer.taken && !offer.taken->expired())) return {};
  at::Tensor memory = offer.memory();
  const bool fits = memory.defined() && memory.sizes() == shape && memory.scalar_type() == type &&
                    memory.is_contiguous();
  if (!fits) return {};
  offer.taken.emplace(memory.getIntrusivePtr());
  return memory;
}

}  // namespace cohort::optim
