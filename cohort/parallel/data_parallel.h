// SPDX-License-Identifier: Apache-2.0
// Data parallelism inside one process: a thread per device. DistributedDataParallel is faster; see
// DataParallel.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <torch/nn/module.h>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cohort/parallel/tensor_tree.h"

namespace cohort::parallel {

/// How a batch of `rows` is cut: chunks of ceil(rows / devices) rows, so the last is shorter and
/// devices may be left without one, as PyTorch cuts.
struct Chunk {
  int64_t start = 0;
  int64_t length = 0;
};
std::vector<Chunk> split_rows(int64_t rows, size_t num_devices);

/// Copies of a module that follow it: the first device has the module itself.
///
/// Owner:   DataParallel.
/// Threads: one.
class Replicas {
 public:
  /// `copies[i]` belongs to devices[i + 1].
  /// Errors: c10::ValueError if a parameter or buffer of `original` is on another device than
  ///         devices[0], or a copy is not made like it.
  Replicas(std::shared_ptr<torch::nn::Module> original,
           const std::vector<std::shared_ptr<torch::nn::Module>>& copies,
           std::vector<c10::Device> devices);

  /// Brings the first `count` replicas up to date: copies parameters, buffers and training modes,
  /// and ties the copies' parameters to the original's, so that gradients flow there.
  void refresh(size_t count);

  /// Runs `work(i)` for the first `count` devices, each on a thread of its own (the first on this
  /// one) with this thread's gradient mode and autocast.
  /// Errors: the first device's exception, with the device's name.
  void run(size_t count, const std::function<void(size_t)>& work) const;

  const std::vector<c10::Device>& devices() const { return devices_; }

 private:
  struct Copy {
    std::vector<std::shared_ptr<torch::nn::Module>> modules;
    std::vector<at::Tensor> parameters;
    std::vector<at::Tensor> buffers;
    std::vector<int64_t> parameter_versions;
    std::vector<int64_t> buffer_versions;
  };

  void check_devices() const;
  void tie_gradients(size_t num_copies);

  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> buffers_;
  std::vector<Copy> copies_;
  std::vector<c10::Device> devices_;
};

/// Joins the i-th chunk's tensor for all i: rows along dimension 0, scalars to a vector, on
/// `device`.
at::Tensor gather_tensors(const std::vector<at::Tensor>& tensors, c10::Device device);

struct DataParallelOptions {
  std::optional<c10::Device>
      output_device{};  ///< Where outputs are gathered; none: the first device.
};

/// Runs a module on several devices of one process: scatters the batch, runs a replica per device,
/// gathers.
///
/// Use DistributedDataParallel instead, also on one host: here each forward copies every parameter
/// to every device before any of them computes and sums all gradients on the first one, nothing of
/// that overlaps with arithmetic, the first device also holds all outputs, and it ends at one host.
/// This class is for a program that must stay one process.
///
/// Every tensor among the arguments (in tuples, containers, optionals and visited structs, too; see
/// tensor_tree.h) is cut along dimension 0 into one chunk per device and must have the same number
/// of rows; scalars and all else are passed whole. Outputs are joined likewise; what is no tensor
/// is the first device's. backward() through the output adds to the original parameters' grad; it
/// may run in any thread.
///
/// Replicas are made once; each forward copies values into them, without allocating. The first
/// device runs the module itself, so only its buffers are updated (batch statistics are its
/// chunk's). Other members of the module are copied only at construction. The module must be
/// clonable (torch::nn::Cloneable) and lie on the first device. The same device may be named
/// several times, the CPU too: that is what tests do.
/// Numerics: the gradient of a parameter is the sum over devices, the copies' in the order of
///           devices.
/// Threads:  one caller.
/// Errors:   c10::ValueError: no device, or arguments whose rows differ; what a replica throws,
///           with its device.
template <class Holder>
class DataParallel {
 public:
  using Impl = typename Holder::ContainedType;

  DataParallel(Holder module, const std::vector<c10::Device>& devices,
               const DataParallelOptions& options = {})
      : module_(std::move(module)),
        impls_(clone_to(devices)),
        replicas_(impls_[0], {impls_.begin() + 1, impls_.end()}, devices),
        output_device_(options.output_device.value_or(devices[0])) {}

  template <class... Arguments>
  auto operator()(const Arguments&... arguments) {
    using Output = std::decay_t<decltype(module_->forward(arguments...))>;
    const std::tuple<Arguments...> all(arguments...);
    const std::vector<Chunk> chunks = split_rows(common_rows(all), impls_.size());
    std::vector<std::tuple<Arguments...>> parts;
    for (size_t i = 0; i < chunks.size(); ++i)
      parts.push_back(part(all, chunks[i], replicas_.devices()[i]));
    replicas_.refresh(chunks.size());
    std::vector<std::optional<Output>> outputs(chunks.size());
    replicas_.run(chunks.size(), [&](size_t i) {
      outputs[i] = std::apply([&](const Arguments&... each) { return impls_[i]->forward(each...); },
                              parts[i]);
    });
    return gather(outputs);
  }

  Holder& module() { return module_; }
  auto* operator->() { return module_.get(); }

 private:
  std::vector<std::shared_ptr<Impl>> clone_to(const std::vector<c10::Device>& devices) const {
    TORCH_CHECK_VALUE(!devices.empty(), "DataParallel: expected one device or more");
    std::vector<std::shared_ptr<Impl>> impls{module_.ptr()};
    for (size_t i = 1; i < devices.size(); ++i) {
      impls.push_back(std::dynamic_pointer_cast<Impl>(module_->clone(devices[i])));
    }
    return impls;
  }

  template <class Tuple>
  static int64_t common_rows(const Tuple& arguments) {
    std::optional<int64_t> rows;
    for_each_tensor(arguments, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || tensor.dim() == 0) return;
      TORCH_CHECK_VALUE(!rows || *rows == tensor.size(0), "DataParallel: expected tensors of ",
                        rows.value_or(0), " rows like the first one, got ", tensor.sizes());
      rows = tensor.size(0);
    });
    TORCH_CHECK_VALUE(rows.value_or(0) > 0,
                      "DataParallel: expected a tensor of one row or more to cut into chunks");
    return *rows;
  }

  template <class Tuple>
  static Tuple part(const Tuple& arguments, const Chunk& chunk, c10::Device device) {
    Tuple result = arguments;
    for_each_tensor(result, [&](at::Tensor& tensor) {
      if (!tensor.defined()) return;
      if (tensor.dim() > 0) tensor = tensor.narrow(0, chunk.start, chunk.length);
      // To the host only what has arrived: a replica there does not wait for another device.
      tensor = tensor.to(device, /*non_blocking=*/!device.is_cpu());
    });
    return result;
  }

  template <class Output>
  Output gather(std::vector<std::optional<Output>>& outputs) const {
    std::vector<std::vector<at::Tensor>> tensors;  // by position in the output, then by device
    for (auto& output : outputs) {
      size_t position = 0;
      for_each_tensor(*output, [&](at::Tensor& tensor) {
        if (position == tensors.size()) tensors.emplace_back();
        tensors[position++].push_back(tensor);
      });
    }
    Output result = std::move(*outputs[0]);
    size_t position = 0;
    for_each_tensor(result, [&](at::Tensor& tensor) {
      if (tensor.defined()) tensor = gather_tensors(tensors[position], output_device_);
      ++position;
    });
    return result;
  }

  Holder module_;
  std::vector<std::shared_ptr<Impl>> impls_;
  Replicas replicas_;
  c10::Device output_device_;
};

}  // namespace cohort::parallel
