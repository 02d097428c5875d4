// SPDX-License-Identifier: Apache-2.0
#include "tests/device/second_backend.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <c10/util/ScopeExit.h>
#include <map>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>
#include <utility>
#include <vector>

#include "cohort/comm/backend.h"

#include "tests/device/second_device.h"

namespace cohort::test {
namespace {

// The tensors of one call: those that share memory do so there, too, for Gloo asks.
class HostAliases {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device() != second_device()) return tensor;
    const c10::Storage& storage = tensor.storage();
    at::Tensor& whole = wholes_[{storage.unsafeGetStorageImpl(), tensor.scalar_type()}];
    if (!whole.defined()) {
      const auto numel = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
      whole = host_alias(at::empty({0}, tensor.options()).set_(storage, 0, {numel}, {1}));
    }
    return whole.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  }

 private:
  std::map<std::pair<c10::StorageImpl*, at::ScalarType>, at::Tensor> wholes_;
};

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  return value.isTensorList() ? value.toTensorVector() : std::vector<at::Tensor>();
}

// Calls what c10d does with tensors of the CPU. Its first argument is what it writes, and is returned, beside the work. Gloo's
// has ended then; another backend's is the caller's to wait for, and takes the tensors as it got them.
void run_collective(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const DeviceCode here;
  const size_t first = stack->size() - op.schema().arguments().size();
  const c10::IValue outputs = (*stack)[first];
  HostAliases aliases;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  for (size_t i = first; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (op.schema().arguments()[i - first].name() == "process_group")
      group = value.toCustomClass<c10d::ProcessGroup>();
    if (value.isTensor()) {
      value = aliases.of(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = aliases.of(tensor);
      value = tensors;
    }
  }
  {
    // c10d's code for the CPU takes the backend of the CPU. There a rank would meet others that came with tensors of the CPU.
    using Type = c10d::ProcessGroup::BackendType;
    const auto own = group->getBackend(at::kCPU);
    const Type own_type =
        own->getBackendName() == "gloo" ? Type::GLOO : Type::UCC;  // process_group.cpp's
    group->setBackend(at::kCPU, group->getBackendType(), group->getDefaultBackend());
    const auto restore = c10::make_scope_exit([&] { group->setBackend(at::kCPU, own_type, own); });
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  for (size_t i = first; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor() || value.isTensorList()) {
      value = outputs;
    } else if (group->getDefaultBackend()->getBackendName() == "gloo") {
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
