// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/sharding/unit_parameters.h"

#include <algorithm>
#include <c10/util/Exception.h>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "cohort/parallel/sharding/unit.h"

namespace cohort::parallel {
namespace {

constexpr int64_t kBucketBytes = 25 << 20;

using Tensors = std::set<const at::TensorImpl*>;

Tensors parameters_of(const torch::nn::Module& module) {
  Tensors tensors;
  for (const at::Tensor& parameter : module.parameters())
    tensors.insert(parameter.unsafeGetTensorImpl());
  return tensors;
}

bool holds(const torch::nn::Module& module, const torch::nn::Module* inner) {
  const auto modules = const_cast<torch::nn::Module&>(module).modules();
  return std::ranges::any_of(modules, [&](const auto& each) { return each.get() == inner; });
}

std::optional<std::string> name_below(const torch::nn::Module& model,
                                      const torch::nn::Module* module) {
  for (const auto& item :
       const_cast<torch::nn::Module&>(model).named_modules("", /*include_self=*/false))
    if (item.value().get() == module) return item.key();
  return std::nullopt;
}

// Those that the model declares, then those of `others` that it does not; each once.
std::vector<const torch::nn::Module*> all_units(const torch::nn::Module& model,
                                                const std::vector<torch::nn::Module*>& others) {
  std::vector<const torch::nn::Module*> units;
  const auto add = [&](const torch::nn::Module* module) {
    if (std::ranges::find(units, module) == units.end()) units.push_back(module);
  };
  for (const auto& each : const_cast<torch::nn::Module&>(model).modules(/*include_self=*/false))
    if (dynamic_cast<const UnitBase*>(each.get()) != nullptr) add(each.get());
  for (const torch::nn::Module* module : others) add(module);
  return units;
}

// Parameters that can lie in one bucket, last ones first, as backward reaches them.
std::vector<std::vector<NamedTensor>> cut(std::vector<NamedTensor> parameters) {
  std::reverse(parameters.begin(), parameters.end());
  std::vector<std::vector<NamedTensor>> buckets;
  const auto kind = [](const NamedTensor& each) {
    return std::tuple(each.tensor.requires_grad(), each.tensor.scalar_type(),
                      each.tensor.device().str());
  };
  std::map<decltype(kind(parameters.front())), std::pair<size_t, int64_t>> open;
  for (NamedTensor& each : parameters) {
    const auto bytes = static_cast<int64_t>(each.tensor.nbytes());
    auto [found, fresh] = open.try_emplace(kind(each), buckets.size(), 0);
    auto& [bucket, filled] = found->second;
    if (fresh || filled + bytes > kBucketBytes) {
      bucket = buckets.size();
      filled = 0;
      buckets.emplace_back();
    }
    filled += bytes;
    buckets[bucket].push_back(std::move(each));
  }
  for (auto& bucket : buckets) std::reverse(bucket.begin(), bucket.end());
  return buckets;
}

}  // namespace

std::vector<NamedTensor> all_parameters(const torch::nn::Module& model) {
  std::vector<NamedTensor> parameters;
  Tensors seen;
  for (const auto& item : model.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second)
      parameters.push_back({.name = item.key(), .tensor = item.value()});
  }
  return parameters;
}

std::vector<std::string> resolve_names(const torch::nn::Module& model,
                                       const std::vector<std::string>& names) {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& item : model.named_parameters()) all.emplace_back(item.key(), item.value());
  for (const auto& item : model.named_buffers()) all.emplace_back(item.key(), item.value());
  Tensors meant;
  for (const std::string& name : names) {
    bool known = false;
    for (const auto& [each, tensor] : all) {
      if (each != name && !each.starts_with(name + '.')) continue;
      known = true;
      meant.insert(tensor.unsafeGetTensorImpl());
    }
    TORCH_CHECK_VALUE(known, "sharding: ignored ", name,
                      ": expected a parameter or buffer of the model, or a module that has some");
  }
  std::vector<std::string> resolved;
  for (const auto& [name, tensor] : all)
    if (meant.contains(tensor.unsafeGetTensorImpl())) resolved.push_back(name);
  return resolved;
}

std::vector<UnitParameters> divide_into_units(const torch::nn::Module& model,
                                              const std::vector<torch::nn::Module*>& modules,
                                              const std::vector<std::string>& ignored) {
  std::vector<UnitParameters> units(1);
  units.front().module = &model;
  std::vector<Tensors> inside{parameters_of(model)};
  for (const torch::nn::Module* module : all_units(model, modules)) {
    const auto name = name_below(model, module);
    TORCH_CHECK_VALUE(name, "sharding: a unit is expected to be a module below the model");
    units.push_back({.module = module, .name = *name, .buckets = {}});
    inside.push_back(parameters_of(*module));
  }
  std::vector<std::vector<NamedTensor>> own(units.size());
  for (NamedTensor& each : all_parameters(model)) {
    if (contains(ignored, each.name)) continue;
    size_t owner = 0;
    for (size_t i = 1; i < units.size(); ++i) {
      if (!inside[i].contains(each.tensor.unsafeGetTensorImpl())) continue;
      if (owner == 0 || holds(*units[owner].module, units[i].module)) {
        owner = i;
      } else if (!holds(*units[i].module, units[owner].module)) {
        owner = 0;
        break;
      }
    }
    own[owner].push_back(std::move(each));
  }
  for (size_t i = 0; i < units.size(); ++i)
    if (!own[i].empty()) units[i].buckets = cut(std::move(own[i]));
  return units;
}

}  // namespace cohort::parallel
