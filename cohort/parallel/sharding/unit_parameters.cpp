// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/sharding/unit_parameters.h"

#include <algorithm>
#include <c10/util/Exception.h>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "cohort/optim/adam.h"
#include "cohort/parallel/sharding/unit.h"

namespace cohort::parallel {
namespace {

constexpr int64_t kBucketBytes = 25 << 20;
// The most that waits for gradients of other units. DDP's first bucket is as large: below it a
// message costs more than its bytes.
constexpr int64_t kWaitingBytes = 1 << 20;

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

// A parameter, and by which stretch of its unit's parameters forward comes to it.
struct PlacedTensor {
  NamedTensor parameter;
  size_t stretch = 0;
};

// Those to be sharded, as forward comes to them.
std::vector<NamedTensor> in_order(const torch::nn::Module& model,
                                  const std::vector<std::string>& ignored,
                                  const std::vector<std::string>& forward_order) {
  std::vector<NamedTensor> parameters = all_parameters(model);
  std::erase_if(parameters, [&](const auto& each) { return contains(ignored, each.name); });
  if (forward_order.empty()) return parameters;
  std::vector<NamedTensor> frozen;
  std::erase_if(parameters, [&](const NamedTensor& each) {
    const bool listed = each.tensor.requires_grad() || contains(forward_order, each.name);
    if (!listed) frozen.push_back(each);
    return !listed;
  });
  const std::vector<size_t> order =
      indices_of("forward_order", {forward_order}, parameters).front();
  std::vector<NamedTensor> ordered;
  for (const size_t index : order) ordered.push_back(parameters[index]);
  ordered.insert(ordered.end(), frozen.begin(), frozen.end());
  return ordered;
}

// Parameters that can lie in one bucket, last ones first, as backward reaches them. `at_units`: ends
// buckets where other units' parameters lie between.
std::vector<std::vector<NamedTensor>> cut(std::vector<PlacedTensor> parameters, bool at_units) {
  std::reverse(parameters.begin(), parameters.end());
  std::vector<std::vector<NamedTensor>> buckets;
  const auto kind = [](const NamedTensor& each) {
    return std::tuple(each.tensor.requires_grad(), each.tensor.scalar_type(),
                      each.tensor.device().str());
  };
  struct Open {
    size_t bucket = 0;
    int64_t filled = 0;
    size_t stretch = 0;
  };
  std::map<decltype(kind(parameters.front().parameter)), Open> open;
  for (auto& [each, stretch] : parameters) {
    const auto bytes = static_cast<int64_t>(each.tensor.nbytes());
    // A bucket of its own; small parameters before and after it share theirs.
    if (bytes >= kBucketBytes) {
      buckets.emplace_back().push_back(std::move(each));
      continue;
    }
    auto [found, fresh] = open.try_emplace(kind(each));
    Open& last = found->second;
    const bool others_between = at_units && each.tensor.requires_grad() &&
                                stretch != last.stretch && last.filled >= kWaitingBytes;
    if (fresh || others_between || last.filled + bytes > kBucketBytes) {
      last = {.bucket = buckets.size()};
      buckets.emplace_back();
    }
    last.filled += bytes;
    last.stretch = stretch;
    buckets[last.bucket].push_back(std::move(each));
  }
  for (auto& bucket : buckets) std::reverse(bucket.begin(), bucket.end());
  return buckets;
}

}  // namespace

std::vector<NamedTensor> all_parameters(const torch::nn::Module& model) {
  std::vector<NamedTensor> parameters;
  for (const auto& [name, tensor] : optim::named_parameters(model))
    parameters.push_back({.name = name, .tensor = tensor});
  return parameters;
}

std::vector<std::string> resolve_names(const torch::nn::Module& model,
                                       const std::vector<std::string>& names) {
  std::vector<std::string> all = model.named_parameters().keys();
  const std::vector<std::string> buffers = model.named_buffers().keys();
  all.insert(all.end(), buffers.begin(), buffers.end());
  std::vector<std::string> meant;
  for (const std::string& name : names) {
    bool known = false;
    for (const std::string& each : all) {
      if (each != name && !each.starts_with(name + '.')) continue;
      known = true;
      meant.push_back(each);
    }
    TORCH_CHECK_VALUE(known, "sharding: ignored ", name,
                      ": expected a parameter or buffer of the model, or a module that has some");
  }
  return under_every_name(model, meant);
}

std::vector<UnitParameters> divide_into_units(const torch::nn::Module& model,
                                              const std::vector<torch::nn::Module*>& modules,
                                              const std::vector<std::string>& ignored,
                                              const std::vector<std::string>& forward_order) {
  std::vector<UnitParameters> units(1);
  units.front().module = &model;
  std::vector<Tensors> inside{parameters_of(model)};
  for (const torch::nn::Module* module : all_units(model, modules)) {
    const auto name = name_below(model, module);
    TORCH_CHECK_VALUE(name, "sharding: a unit is expected to be a module below the model");
    units.push_back({.module = module, .name = *name, .buckets = {}});
    inside.push_back(parameters_of(*module));
  }
  std::vector<std::vector<PlacedTensor>> own(units.size());
  size_t last_owner = 0, stretch = 0;
  for (NamedTensor& each : in_order(model, ignored, forward_order)) {
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
    if (std::exchange(last_owner, owner) != owner) ++stretch;
    own[owner].push_back({.parameter = std::move(each), .stretch = stretch});
  }
  for (size_t i = 0; i < units.size(); ++i)
    if (!own[i].empty()) units[i].buckets = cut(std::move(own[i]), !forward_order.empty());
  return units;
}

}  // namespace cohort::parallel
