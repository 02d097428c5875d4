// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/model_state.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/nn/modules/embedding.h>
#include <unordered_set>

namespace cohort::parallel {
namespace {

constexpr size_t kBroadcastBytes = 250 << 20;

std::string describe(const torch::nn::Module& model, const std::vector<std::string>& ignored) {
  std::ostringstream out;
  for (const auto& item : model.named_parameters()) {
    if (contains(ignored, item.key())) continue;
    out << "parameter " << item.key() << ' ' << item.value().sizes() << ' ' << item.value().dtype()
        << (item.value().requires_grad() ? "" : " frozen");
    // Buckets add up memory as it lies, in the order of each rank's own strides.
    if (!item.value().is_contiguous()) out << " strides " << item.value().strides();
    out << '\n';
  }
  for (const auto& item : model.named_buffers()) {
    if (contains(ignored, item.key())) continue;
    out << "buffer " << item.key() << ' ' << item.value().sizes() << ' ' << item.value().dtype()
        << '\n';
  }
  return out.str();
}

// The first line in which `mine` departs from `theirs`; empty if equal.
std::string first_difference(const std::string& mine, const std::string& theirs) {
  std::istringstream a(mine);
  std::istringstream b(theirs);
  while (true) {
    std::string line_a;
    std::string line_b;
    const bool more_a = static_cast<bool>(std::getline(a, line_a));
    const bool more_b = static_cast<bool>(std::getline(b, line_b));
    if (!more_a && !more_b) return "";
    if (line_a != line_b) {
      return "has " + (more_a ? line_a : "no more entries") + " where rank 0 has " +
             (more_b ? line_b : "no more entries");
    }
  }
}

// Every group has a backend of CPU tensors, whatever it was asked for: that would carry the model
// without an error.
void verify_backend(const torch::nn::Module& model, const comm::ProcessGroup& group,
                    const std::vector<std::string>& ignored) {
  c10d::ProcessGroup& backend = group.c10d_group();
  const auto named = backend.getDefaultBackend();
  const bool serves_cpu = backend.getBackend(c10::DeviceType::CPU) == named;
  const auto devices = backend.getDeviceTypes();
  for (const auto& item : model.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (tensor.is_meta() || contains(ignored, item.key())) continue;
    const bool served =
        tensor.is_cpu() ? serves_cpu : std::ranges::any_of(devices, [&](const auto& each) {
          return each.type() == tensor.device().type();
        });
    TORCH_CHECK_VALUE(served, "parameter ", item.key(), " is on ",
                      tensor.is_cpu() ? "the CPU" : tensor.device().str(),
                      ", which the group's backend ", named->getBackendName(),
                      " does not serve: move the model, or make the group with a backend of ",
                      tensor.is_cpu() ? "CPU tensors (shm, gloo)" : "such tensors");
  }
}

bool has_sparse_gradient(const torch::nn::Module& module) {
  if (const auto* embedding = module.as<torch::nn::Embedding>()) return embedding->options.sparse();
  if (const auto* bag = module.as<torch::nn::EmbeddingBag>()) return bag->options.sparse();
  return false;
}

}  // namespace

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

void verify_same_text(const std::string& what, const std::string& text,
                      const comm::ProcessGroup& group, CallSite site) {
  const CallSiteScope scope(site);
  const std::string difference = first_difference(text, group.broadcast_object(text));
  const std::vector<std::string> all = group.all_gather_object(difference);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    TORCH_CHECK_VALUE(all[rank].empty(), "the ", what, " differ between ranks: rank ", rank, " ",
                      all[rank]);
  }
}

void verify_same_model(const torch::nn::Module& model, const comm::ProcessGroup& group,
                       const std::vector<std::string>& ignored, CallSite site) {
  verify_backend(model, group, ignored);
  verify_same_text("models", describe(model, ignored), group, site);
}

void broadcast_tensors(const std::vector<at::Tensor>& tensors, const comm::ProcessGroup& group,
                       int root, CallSite site) {
  if (tensors.empty() || group.size() == 1) return;
  const at::NoGradGuard no_grad;
  const auto backend = c10::intrusive_ptr<c10d::ProcessGroup>::reclaim_copy(&group.c10d_group());
  group.translate_errors(
      "broadcast of the model",
      [&] { c10d::broadcast_coalesced(backend, tensors, kBroadcastBytes, root); }, site);
}

void broadcast_model(const torch::nn::Module& model, const comm::ProcessGroup& group, int root,
                     const std::vector<std::string>& ignored, CallSite site) {
  std::vector<at::Tensor> state;
  for (const auto& item : model.named_parameters()) {
    if (!contains(ignored, item.key())) state.push_back(item.value().detach());
  }
  for (const NamedTensor& buffer : model_buffers(model, ignored)) state.push_back(buffer.tensor);
  broadcast_tensors(state, group, root, site);
}

std::vector<NamedTensor> trainable_parameters(const torch::nn::Module& model,
                                              const std::vector<std::string>& ignored) {
  std::vector<NamedTensor> found;
  std::unordered_set<c10::TensorImpl*> seen;
  const auto add = [&](const torch::nn::Module& module, const std::string& prefix) {
    const bool sparse = has_sparse_gradient(module);
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const std::string name = prefix.empty() ? item.key() : prefix + "." + item.key();
      const at::Tensor& tensor = item.value();
      if (!tensor.requires_grad() || contains(ignored, name)) continue;
      if (seen.insert(tensor.unsafeGetTensorImpl()).second) found.push_back({name, tensor, sparse});
    }
  };
  add(model, "");
  for (const auto& child : model.named_modules("", /*include_self=*/false))
    add(*child.value(), child.key());
  return found;
}

std::vector<std::vector<size_t>> indices_of(const char* option,
                                            const std::vector<std::vector<std::string>>& lists,
                                            const std::vector<NamedTensor>& parameters) {
  std::map<std::string, size_t> left;
  for (size_t i = 0; i < parameters.size(); ++i) left[parameters[i].name] = i;
  std::vector<std::vector<size_t>> indices;
  for (const auto& names : lists) {
    TORCH_CHECK_VALUE(!names.empty(), option, ": expected no empty bucket, bucket ", indices.size(),
                      " is");
    indices.emplace_back();
    for (const auto& name : names) {
      const auto found = left.find(name);
      TORCH_CHECK_VALUE(found != left.end(), option,
                        ": expected each parameter of the model once, got ", name,
                        " twice, not of the model, ignored, or the second name of a shared one");
      indices.back().push_back(found->second);
      left.erase(found);
    }
  }
  TORCH_CHECK_VALUE(left.empty(), option, ": expected each parameter of the model once, it lacks ",
                    left.begin()->first);
  return indices;
}

std::vector<NamedTensor> model_buffers(const torch::nn::Module& model,
                                       const std::vector<std::string>& ignored) {
  std::vector<NamedTensor> found;
  for (const auto& item : model.named_buffers()) {
    if (!contains(ignored, item.key())) found.push_back({item.key(), item.value()});
  }
  return found;
}

std::vector<std::string> under_every_name(const torch::nn::Module& model,
                                          const std::vector<std::string>& names) {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& item : model.named_parameters()) all.emplace_back(item.key(), item.value());
  for (const auto& item : model.named_buffers()) all.emplace_back(item.key(), item.value());
  std::unordered_set<c10::TensorImpl*> meant;
  for (const auto& [name, tensor] : all)
    if (contains(names, name)) meant.insert(tensor.unsafeGetTensorImpl());
  std::vector<std::string> every;
  for (const auto& [name, tensor] : all)
    if (meant.contains(tensor.unsafeGetTensorImpl())) every.push_back(name);
  return every;
}

at::Tensor alias_of(const at::Tensor& view) {
  return at::empty({0}, view.options())
      .set_(view.storage(), view.storage_offset(), view.sizes(), view.strides());
}

}  // namespace cohort::parallel
