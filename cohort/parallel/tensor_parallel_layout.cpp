// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/tensor_parallel_layout.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <sstream>
#include <string_view>
#include <torch/types.h>

#include "cohort/parallel/model_state.h"

namespace cohort::parallel {
namespace {

std::map<std::string, at::Tensor> tensors_of(const torch::nn::Module& model) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& item : model.named_parameters()) tensors.emplace(item.key(), item.value());
  for (const auto& item : model.named_buffers()) tensors.emplace(item.key(), item.value());
  return tensors;
}

void check_names(const std::map<std::string, at::Tensor>& tensors, const TensorParallelPlan& plan) {
  for (const auto& [name, cut] : plan) {
    const auto found = tensors.find(name);
    TORCH_CHECK_VALUE(found != tensors.end(), "tensor_parallel: the model has no parameter ", name);
    TORCH_CHECK_VALUE(0 <= cut.dim && cut.dim < found->second.dim() && cut.blocks > 0,
                      "tensor_parallel: ", name, ": expected a dimension of ",
                      found->second.sizes(), " and at least 1 block, got dimension ", cut.dim,
                      " and ", cut.blocks, " blocks");
  }
}

// All that must agree between the ranks: names, cuts, and sizes but for those that are cut.
std::string describe(const std::map<std::string, at::Tensor>& tensors,
                     const TensorParallelPlan& plan) {
  std::ostringstream out;
  for (const auto& [name, tensor] : tensors) {
    std::vector<int64_t> shape = tensor.sizes().vec();
    out << name;
    if (const auto found = plan.find(name); found != plan.end()) {
      shape[static_cast<size_t>(found->second.dim)] = -1;
      out << ", cut in " << found->second.blocks << " blocks";
    }
    out << ", shape " << c10::IntArrayRef(shape) << '\n';
  }
  return out.str();
}

// The whole tensor's size from those of its parts.
int64_t whole_size(const std::string& name, const TensorCut& cut,
                   const std::vector<int64_t>& sizes) {
  const int64_t whole = std::reduce(sizes.begin(), sizes.end());
  const auto count = static_cast<int64_t>(sizes.size());
  std::vector<int64_t> expected;
  for (int64_t rank = 0; rank < count; ++rank) {
    const auto [begin, end] = cut_of(whole / cut.blocks, rank, count);
    expected.push_back(cut.blocks * (end - begin));
  }
  TORCH_CHECK_VALUE(sizes == expected, "tensor_parallel: ", name, ", cut along dimension ", cut.dim,
                    " in ", cut.blocks, " blocks: expected the ranks to have ",
                    c10::IntArrayRef(expected), " of ", whole, ", got ", c10::IntArrayRef(sizes));
  return whole;
}

// The same for equal values. What is all one value may be so in every part: each rank's own then.
int64_t fingerprint(const at::Tensor& part, int rank) {
  if (part.is_meta() || part.numel() == 0) return rank;
  const at::Tensor flat = part.detach().contiguous().view(-1);
  if (flat.eq(flat[0]).all().item<bool>()) return rank;
  const at::Tensor bytes = flat.view(at::kByte).cpu();
  const std::string_view text(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  return static_cast<int64_t>(std::hash<std::string_view>()(text));
}

// What is wrong with the values along "tp"; empty: nothing.
std::string first_fault(const torch::nn::Module& model, const TensorParallelPlan& plan,
                        const comm::ProcessGroup& group) {
  std::string found;
  const auto tensors = tensors_of(model);
  std::vector<int64_t> own;
  for (const auto& [name, cut] : plan) own.push_back(fingerprint(tensors.at(name), group.rank()));
  const at::Tensor prints = at::tensor(own, at::kLong);
  const auto all = plan.empty() ? std::vector{prints} : group.all_gather(prints);
  int64_t index = 0;
  for (const auto& [name, cut] : plan) {
    const auto is_same = [&](const at::Tensor& each) {
      return each[index].item<int64_t>() == all[0][index].item<int64_t>();
    };
    if (found.empty() && !cut.equal_parts && group.size() > 1 &&
        std::ranges::all_of(all, is_same)) {
      std::ostringstream out;
      out << name << " is in the plan, and all ranks along \"tp\" have the same "
          << tensors.at(name).sizes() << ": expected each to have its own part of dimension "
          << cut.dim
          << ", by cut_of; take it out of the plan if each has the whole, or set equal_parts "
             "if they are to begin equal";
      found = out.str();
    }
    ++index;
  }
  for (const auto& [name, tensor] : tensors) {
    if (plan.contains(name) || tensor.is_meta() || tensor.numel() == 0) continue;
    const at::Tensor bytes = tensor.detach().contiguous().view(-1).view(at::kByte);
    at::Tensor first = bytes.clone();
    group.broadcast(first, 0);
    if (found.empty() && !at::equal(bytes, first)) {
      found = name +
              " is not in the plan, and differs between the ranks along \"tp\": name it if "
              "it is cut; else give it the same values, by the same seed";
    }
  }
  return found;
}

}  // namespace

TensorParallelLayout::TensorParallelLayout(const torch::nn::Module& model,
                                           const TensorParallelPlan& plan,
                                           const comm::ProcessGroup& group, CallSite site)
    : group_(group) {
  const CallSiteScope scope(site);
  const auto tensors = tensors_of(model);
  check_names(tensors, plan);
  verify_same_text("tensor-parallel models", describe(tensors, plan), group);
  std::vector<int64_t> own;
  for (const auto& [name, cut] : plan) own.push_back(tensors.at(name).size(cut.dim));
  std::vector<at::Tensor> all{at::tensor(own, at::kLong)};
  if (!plan.empty()) all = group.all_gather(all.front());
  int64_t index = 0;
  for (const auto& [name, cut] : plan) {
    std::vector<int64_t> sizes;
    for (const at::Tensor& each : all) sizes.push_back(each[index].item<int64_t>());
    ++index;
    TensorPart& part = parts_[name];
    part = {.shape = tensors.at(name).sizes().vec(), .dim = cut.dim};
    const int64_t whole = whole_size(name, cut, sizes), block = whole / cut.blocks;
    part.shape[static_cast<size_t>(cut.dim)] = whole;
    const auto [begin, end] = cut_of(block, group.rank(), group.size());
    for (int64_t i = 0; i < cut.blocks; ++i)
      part.pieces.push_back({i * block + begin, i * block + end});
  }
}

// "a.weight" of itself and of "a.weight.exp_avg". A counter of an optimizer is not cut.
const TensorPart* TensorParallelLayout::find_part(const LocalShard& shard) const {
  if (shard.shape.empty()) return nullptr;
  for (size_t end = shard.name.size(); end != std::string::npos && end > 0;
       end = shard.name.rfind('.', end - 1)) {
    const auto found = parts_.find(shard.name.substr(0, end));
    if (found == parts_.end()) continue;
    TORCH_CHECK_VALUE(shard.shape == found->second.part_shape(), "tensor_parallel: ", shard.name,
                      ": expected the part's shape, ", c10::IntArrayRef(found->second.part_shape()),
                      ", got ", c10::IntArrayRef(shard.shape));
    return &found->second;
  }
  return nullptr;
}

std::vector<LocalShard> TensorParallelLayout::full_model_shards(
    const std::vector<LocalShard>& shards, Replicated replicated) const {
  std::vector<LocalShard> result;
  for (const LocalShard& shard : shards) {
    TORCH_CHECK_VALUE(shard.tensor.is_contiguous(),
                      "tensor_parallel: expected contiguous tensors: ", shard.name);
    const at::Tensor elements = shard.tensor.detach().view(-1);
    const auto add = [&](const std::vector<int64_t>& shape, int64_t first, ElementRange whole) {
      const int64_t count = whole.end - whole.begin;
      result.push_back(
          {shard.name, shape, whole.begin, whole.end, elements.narrow(0, first, count)});
    };
    if (const TensorPart* part = find_part(shard)) {
      for (const PartRun& run : part->runs({shard.begin, shard.end}))
        add(part->shape, run.part_begin - shard.begin, run.whole);
      continue;
    }
    ElementRange own{shard.begin, shard.end};
    if (replicated == Replicated::kOnce) {  // A share of the tensor: ranks may shard it otherwise.
      const auto [begin, end] =
          cut_of(c10::multiply_integers(shard.shape), group_.rank(), group_.size());
      own = {std::clamp(begin, shard.begin, shard.end), std::clamp(end, shard.begin, shard.end)};
    }
    add(shard.shape, own.begin - shard.begin, own);
  }
  return result;
}

ModelRanks model_ranks(const torch::nn::Module& model, const DeviceMesh& mesh,
                       const std::optional<TensorParallelPlan>& plan, CallSite site) {
  const CallSiteScope scope(site);
  const DeviceMesh axes = model_axes(mesh);
  const bool has_axis = axes.has("tp");
  TORCH_CHECK_VALUE(plan || !has_axis || axes.size("tp") == 1, "device mesh ", axes.describe(),
                    ": the ranks along \"tp\" hold parts of one model: expected the option "
                    "tensor_parallel, which names the parameters that are cut");
  TORCH_CHECK_VALUE(!plan || has_axis, "tensor_parallel: expected a mesh with an axis \"tp\", got ",
                    axes.describe());
  ModelRanks ranks{.all = axes.group(), .tensor_parallel = nullptr};
  if (!plan) return ranks;
  const comm::ProcessGroup group = axes.group("tp");
  ranks.tensor_parallel = std::make_shared<const TensorParallelLayout>(model, *plan, group);
  // Along the data axes all get the first rank's values.
  const std::string own = first_fault(model, *plan, group);
  const DeviceMesh data = data_axes(mesh);
  const bool is_first = std::ranges::all_of(
      data.axis_names(), [&](const std::string& axis) { return data.coordinate(axis) == 0; });
  for (const std::string& fault : ranks.all.all_gather_object(is_first ? own : ""))
    TORCH_CHECK_VALUE(fault.empty(), "tensor_parallel: ", fault);
  return ranks;
}

ModelRanks model_ranks(const comm::ProcessGroup& group,
                       const std::optional<TensorParallelPlan>& plan) {
  TORCH_CHECK_VALUE(!plan,
                    "tensor_parallel: expected a mesh with an axis \"tp\", got a process group");
  return {.all = group, .tensor_parallel = nullptr};
}

}  // namespace cohort::parallel
