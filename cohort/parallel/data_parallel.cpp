// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/data_parallel.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <algorithm>
#include <c10/core/DeviceGuard.h>
#include <exception>
#include <pthread.h>
#include <string>
#include <thread>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "cohort/comm/libtorch_version.h"

namespace cohort::parallel {
namespace {

// Sums what flows back from a parameter's copies, in their order, on the parameter's device.
struct SumOfCopies : torch::autograd::Node {
  explicit SumOfCopies(c10::Device device) : device_(device) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    at::Tensor sum;
    for (const at::Tensor& gradient : gradients) {
      if (!gradient.defined()) continue;
      const at::Tensor here = gradient.to(device_);
      sum = sum.defined() ? sum + here : here;
    }
    return {sum};
  }

 private:
  c10::Device device_;
};

std::vector<std::shared_ptr<torch::nn::Module>> all_modules(
    const std::shared_ptr<torch::nn::Module>& module) {
  return module->modules(/*include_self=*/true);
}

// libtorch's optimizers write through data(), which leaves no trace in the version, so the copy is
// always made. It leaves a trace only where the original has one: backward then finds a stale copy
// just where it would find a stale original, and several forwards may come before one backward.
void copy_values(const at::Tensor& from, const at::Tensor& to, int64_t& seen_version) {
  const auto version = static_cast<int64_t>(from._version());
  at::Tensor target = version == seen_version ? to.variable_data() : to;
  target.copy_(from, /*non_blocking=*/true);
  seen_version = version;
}

void name_thread(size_t index) {
  pthread_setname_np(pthread_self(), ("replica-" + std::to_string(index)).c_str());
}

[[noreturn]] void rethrow_with_device(const std::exception_ptr& failure, size_t index,
                                      c10::Device device) {
  const std::string where =
      "DataParallel: replica " + std::to_string(index) + " on device " + device.str();
  try {
    std::rethrow_exception(failure);
  } catch (c10::Error& error) {
    error.add_context(where);
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    C10_THROW_ERROR(Error, where + ": " + error.what());
  }
}

}  // namespace

std::vector<Chunk> split_rows(int64_t rows, size_t num_devices) {
  const auto count = static_cast<int64_t>(num_devices);
  const int64_t length = (rows + count - 1) / count;
  std::vector<Chunk> chunks;
  for (int64_t start = 0; start < rows; start += length)
    chunks.push_back({start, std::min(length, rows - start)});
  return chunks;
}

at::Tensor gather_tensors(const std::vector<at::Tensor>& tensors, c10::Device device) {
  std::vector<at::Tensor> here;
  for (const at::Tensor& tensor : tensors) here.push_back(tensor.to(device));
  return here[0].dim() == 0 ? at::stack(here) : at::cat(here);
}

Replicas::Replicas(std::shared_ptr<torch::nn::Module> original,
                   const std::vector<std::shared_ptr<torch::nn::Module>>& copies,
                   std::vector<c10::Device> devices)
    : modules_(all_modules(original)),
      parameters_(original->parameters()),
      buffers_(original->buffers()),
      devices_(std::move(devices)) {
  check_devices();
  for (const auto& module : copies) {
    Copy copy{.modules = all_modules(module),
              .parameters = module->parameters(),
              .buffers = module->buffers()};
    for (const at::Tensor& parameter : copy.parameters) parameter.set_requires_grad(false);
    copy.parameter_versions.resize(copy.parameters.size(), -1);
    copy.buffer_versions.resize(copy.buffers.size(), -1);
    TORCH_CHECK_VALUE(
        copy.modules.size() == modules_.size() && copy.parameters.size() == parameters_.size() &&
            copy.buffers.size() == buffers_.size(),
        "DataParallel: expected clone() to make the same submodules, parameters and buffers");
    copies_.push_back(std::move(copy));
  }
}

void Replicas::check_devices() const {
  for (const auto& tensors : {parameters_, buffers_}) {
    for (const at::Tensor& tensor : tensors) {
      TORCH_CHECK_VALUE(tensor.device() == devices_[0],
                        "DataParallel: expected the module on the first device, ", devices_[0],
                        ", got a tensor on ", tensor.device());
    }
  }
}

void Replicas::refresh(size_t count) {
  {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i + 1 < count; ++i) {
      Copy& copy = copies_[i];
      for (size_t k = 0; k < parameters_.size(); ++k) {
        copy_values(parameters_[k], copy.parameters[k], copy.parameter_versions[k]);
      }
      for (size_t k = 0; k < buffers_.size(); ++k) {
        copy_values(buffers_[k], copy.buffers[k], copy.buffer_versions[k]);
      }
      // Parents come first, and train() sets the children too.
      for (size_t k = 0; k < modules_.size(); ++k) {
        const bool training = modules_[k]->is_training();
        if (copy.modules[k]->is_training() != training) copy.modules[k]->train(training);
      }
    }
  }
  if (at::GradMode::is_enabled()) tie_gradients(count - 1);
}

void Replicas::tie_gradients(size_t num_copies) {
  for (size_t k = 0; k < parameters_.size() && num_copies > 0; ++k) {
    const at::Tensor& original = parameters_[k];
    if (!original.requires_grad()) {
      for (size_t i = 0; i < num_copies; ++i)
        torch::autograd::impl::set_gradient_edge(copies_[i].parameters[k], {});
      continue;
    }
    auto sum = comm::make_node<SumOfCopies>(original.device());
    sum->set_next_edges(torch::autograd::collect_next_edges(original));
    for (size_t i = 0; i < num_copies; ++i)
      torch::autograd::set_history(copies_[i].parameters[k], sum);
  }
}

void Replicas::run(size_t count, const std::function<void(size_t)>& work) const {
  std::vector<std::exception_ptr> failures(count);
  const auto guarded = [&](size_t i) {
    try {
      const c10::DeviceGuard device(devices_[i]);
      work(i);
    } catch (...) {
      failures[i] = std::current_exception();
    }
  };
  {
    const at::ThreadLocalState caller;
    std::vector<std::jthread> threads;
    for (size_t i = 1; i < count; ++i) {
      threads.emplace_back([&, i] {
        name_thread(i);
        const at::ThreadLocalStateGuard as_caller(caller);
        guarded(i);
      });
    }
    guarded(0);
  }
  for (size_t i = 0; i < count; ++i) {
    if (failures[i]) rethrow_with_device(failures[i], i, devices_[i]);
  }
}

}  // namespace cohort::parallel
