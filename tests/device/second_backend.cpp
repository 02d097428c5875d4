// SPDX-License-Identifier: Apache-2.0
#include "tests/device/second_backend.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>
#include <torch/types.h>
#include <utility>
#include <vector>

#include "cohort/comm/backend.h"

#include "tests/device/second_device.h"

namespace cohort::test {
namespace {

// The host's tensors that stand for the device's during one call. Those that share memory share a storage there, too: a backend
// asks whether its output is a part of its input.
class HostAliases {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device() != second_device()) return tensor;
    return at::empty({0}, tensor.options().device(at::kCPU))
        .set_(whole(tensor).storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  }

 private:
  at::Tensor whole(const at::Tensor& tensor) {
    for (const auto& [device, host] : known_)
      if (device.is_alias_of(tensor)) return host;
    const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
    const at::Tensor all =
        at::empty({0}, tensor.options().dtype(at::kByte)).set_(tensor.storage(), 0, {bytes}, {1});
    known_.emplace_back(all, host_alias(all));
    return known_.back().second;
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> known_;
};

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  return value.isTensorList() ? value.toTensorVector() : std::vector<at::Tensor>();
}

// Calls what c10d does with tensors of the CPU. Its first argument is what it writes, and is returned, beside the work.
void run_collective(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const c10::IValue outputs = (*stack)[first];
  HostAliases aliases;
  for (size_t i = first; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = aliases.of(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = aliases.of(tensor);
      value = tensors;
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t i = first; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor() || value.isTensorList()) {
      value = outputs;
    } else {
      value.toCustomClass<c10d::Work>()->wait();
      auto future =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      future->markCompleted(tensors_of(outputs));
      value = c10d::Work::create_from_future(future);
    }
  }
}

// libtorch has collectives for the CPU, CUDA and PrivateUse1 alone.
TORCH_LIBRARY_IMPL(c10d, MTIA, library) {
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (name.name.starts_with("c10d::") && op && op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
      library.impl(c10::toString(name).c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&run_collective>());
  }
}

}  // namespace

void register_second_backend() {
  comm::register_backend(
      "second", {.device = second_device().type(), .make = comm::find_backend("gloo").make});
}

}  // namespace cohort::test
