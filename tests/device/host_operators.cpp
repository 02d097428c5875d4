// SPDX-License-Identifier: Apache-2.0
#include "tests/device/host_operators.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <set>
#include <string_view>

#include "tests/device/second_device.h"

namespace cohort::test {
namespace {

struct Watched {
  std::mutex mutex;
  int64_t most_elements = 0;
  int64_t on_device = 0;
  std::set<std::string> found;
};

// Lives for ever: Gloo's threads outlive static objects.
Watched& watched() {
  static auto* const watched = std::make_unique<Watched>().release();
  return *watched;
}

// What a copy between host and device calls.
constexpr std::array<std::string_view, 2> kPartOfCopies{"aten::empty_strided", "aten::is_pinned"};

// Gloo's own threads add and copy for the second device's collectives.
bool is_thread_of_gloo() {
  std::array<char, 16> name{};
  pthread_getname_np(pthread_self(), name.data(), name.size());
  return std::string_view(name.data()).starts_with("pt_gloo");
}

// What one call works on.
struct Operands : at::ObserverContext {
  bool device = false;
  int64_t host_elements = 0;  // Of the largest tensor of the CPU.

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.device() == second_device()) {
      device = true;
    } else {
      host_elements = std::max(host_elements, tensor.numel());
    }
  }
  void add(const c10::IValue& value) {
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        if (tensor) add(*tensor);
    }
  }
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
  if (in_device_code() || is_thread_of_gloo()) return nullptr;
  auto operands = std::make_unique<Operands>();
  for (const c10::IValue& input : call.inputs()) operands->add(input);
  return operands;
}

void end(const at::RecordFunction& call, at::ObserverContext* context) {
  if (context == nullptr) return;
  auto& operands = static_cast<Operands&>(*context);
  for (const c10::IValue& output : call.outputs()) operands.add(output);
  const std::string name = call.name();
  Watched& all = watched();
  const std::lock_guard lock(all.mutex);
  if (operands.device) {
    ++all.on_device;
  } else if (operands.host_elements > all.most_elements &&
             std::ranges::find(kPartOfCopies, name) == kPartOfCopies.end()) {
    all.found.insert(name + " of " + std::to_string(operands.host_elements) + " elements");
  }
}

}  // namespace

HostOperators::HostOperators(int64_t most_elements) {
  Watched& all = watched();
  {
    const std::lock_guard lock(all.mutex);
    all.most_elements = most_elements;
    all.on_device = 0;
    all.found.clear();
  }
  callback_ = at::addGlobalCallback(at::RecordFunctionCallback(begin, end)
                                        .needsInputs(true)
                                        .needsOutputs(true)
                                        .scopes({at::RecordScope::FUNCTION}));
}

HostOperators::~HostOperators() {
  at::removeCallback(callback_);
}

std::vector<std::string> HostOperators::found() const {
  Watched& all = watched();
  const std::lock_guard lock(all.mutex);
  return {all.found.begin(), all.found.end()};
}

int64_t HostOperators::on_device() const {
  Watched& all = watched();
  const std::lock_guard lock(all.mutex);
  return all.on_device;
}

}  // namespace cohort::test
