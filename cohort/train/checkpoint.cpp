#include "cohort/train/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <torch/nn/module.h>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/base/stored_checkpoint.h"
#include "cohort/train/stored_tensor.h"

namespace cohort::train {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail_other_model(const std::string& path, const std::string& what) {
  throw ConfigError(path + ": a checkpoint of another model: " + what);
}

// The file that holds the tensor, or the manifest if there are several: what errors speak of.
std::string place_of(const StoredCheckpoint& checkpoint, const StoredTensor& tensor) {
  const bool one = tensor.ranges.size() == 1;
  return checkpoint.folder() + "/" +
         (one ? checkpoint.manifest().files.at(tensor.ranges.begin()->first).name
              : "manifest.json");
}

// The file of a part that is one file, else the manifest.
std::string place_of(const StoredCheckpoint& checkpoint, const std::string& part) {
  const auto& files = checkpoint.manifest().files;
  const auto found = files.find(part);
  return checkpoint.folder() + "/" + (found == files.end() ? "manifest.json" : found->second.name);
}

// A slice, and where its elements lie in mapped files.
struct Filling {
  TensorSlice slice;
  std::vector<std::span<const std::byte>> sources;

  void fill() const {
    const at::NoGradGuard no_grad;
    const at::Tensor target = slice.tensor.detach();
    const at::Tensor flat =
        target.is_contiguous() ? target.view(-1) : at::empty({target.numel()}, target.options());
    int64_t offset = 0;
    for (const auto bytes : sources) {
      const int64_t count = static_cast<int64_t>(bytes.size()) / target.element_size();
      flat.narrow(0, offset, count)
          .copy_(at::from_blob(const_cast<std::byte*>(bytes.data()), {count},
                               at::TensorOptions().dtype(target.dtype())));
      offset += count;
    }
    if (!target.is_contiguous()) target.copy_(flat.view(target.sizes()));
  }
};

Filling prepare(StoredCheckpoint& checkpoint, const std::string& part, const TensorSlice& slice) {
  const auto& tensors = checkpoint.part(part);
  const auto found = tensors.find(slice.name);
  if (found == tensors.end())
    fail_other_model(place_of(checkpoint, part), "it has no " + slice.name);
  const StoredTensor& stored = found->second;
  const DType dtype = dtype_of(slice.tensor);
  if (stored.dtype != dtype || stored.shape != slice.shape) {
    fail_other_model(place_of(checkpoint, stored),
                     slice.name + " is " + to_string(stored.dtype) + " " + to_string(stored.shape) +
                         ", expected " + to_string(dtype) + " " + to_string(slice.shape));
  }
  check_slice(slice);
  return {slice, checkpoint.elements(part, slice.name, {slice.begin, slice.end})};
}

}  // namespace

NamedTensors state_of(const torch::nn::Module& model) {
  NamedTensors state;
  for (const auto& item : model.named_parameters())
    state.emplace_back(item.key(), item.value().detach());
  for (const auto& item : model.named_buffers())
    state.emplace_back(item.key(), item.value().detach());
  return state;
}

std::vector<TensorSlice> whole_slices(const NamedTensors& tensors) {
  std::vector<TensorSlice> slices;
  for (const auto& [name, tensor] : tensors)
    slices.push_back({name, tensor.sizes().vec(), 0, tensor.numel(), tensor});
  return slices;
}

std::vector<TensorSlice> share_of(const NamedTensors& tensors, int rank, int world_size) {
  TORCH_CHECK_VALUE(0 <= rank && rank < world_size, "share_of: expected a rank below ", world_size,
                    ", got ", rank);
  std::vector<TensorSlice> slices;
  for (const auto& [name, tensor] : tensors) {
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "share_of: expected contiguous tensors: ", name);
    const int64_t length = (tensor.numel() + world_size - 1) / world_size;
    const int64_t begin = std::min(rank * length, tensor.numel());
    const int64_t end = std::min(begin + length, tensor.numel());
    slices.push_back({name, tensor.sizes().vec(), begin, end,
                      tensor.detach().view(-1).narrow(0, begin, end - begin)});
  }
  return slices;
}

std::vector<TensorSlice> slices_like(const std::vector<TensorSlice>& parameters,
                                     const NamedTensors& state) {
  std::vector<TensorSlice> slices;
  for (const auto& [name, tensor] : state) {
    const TensorSlice* owner = nullptr;  // the longest name that fits: "a.b" before "a"
    for (const TensorSlice& parameter : parameters) {
      if (name.starts_with(parameter.name + ".") &&
          (owner == nullptr || owner->name.size() < parameter.name.size()))
        owner = &parameter;
    }
    TORCH_CHECK_VALUE(owner != nullptr, "slices_like: expected state of a parameter, got ", name);
    TORCH_CHECK_VALUE(tensor.numel() == owner->end - owner->begin, "slices_like: expected ",
                      owner->end - owner->begin, " elements of ", name, ", got ", tensor.numel());
    slices.push_back({name, owner->shape, owner->begin, owner->end, tensor});
  }
  return slices;
}

void save_checkpoint(const std::string& folder, const Parts& parts, int64_t update,
                     const Facts& facts) {
  std::error_code error;
  fs::create_directories(folder, error);
  Manifest manifest{.update = update, .facts = facts};
  for (const auto& [part, tensors] : parts) {
    const std::vector<TensorSlice> slices = on_host(whole_slices(tensors));
    manifest.add(write_share(folder, part, stored_slices(slices), {.update = update}), folder);
  }
  commit_manifest(folder, manifest);
}

void save_checkpoint(const std::string& folder, const torch::nn::Module& model, int64_t update,
                     const Facts& facts) {
  save_checkpoint(folder, Parts{{"weights", state_of(model)}}, update, facts);
}

Facts read_manifest(const std::string& folder) {
  return Manifest::read(folder).facts;
}

struct CheckpointLoad::Impl {
  explicit Impl(const std::string& folder) : checkpoint(folder) {}
  StoredCheckpoint checkpoint;
  std::vector<Filling> fillings;
  std::vector<std::pair<std::string, std::string>> missed;
};

CheckpointLoad::CheckpointLoad(const std::string& folder, const SlicedParts& parts)
    : impl_(std::make_unique<Impl>(folder)) {
  StoredCheckpoint& checkpoint = impl_->checkpoint;
  for (const auto& [part, slices] : parts) {
    checkpoint.part(part);
    std::set<std::string> names;
    for (const TensorSlice& slice : slices) {
      impl_->fillings.push_back(prepare(checkpoint, part, slice));
      names.insert(slice.name);
    }
    for (const auto& [name, stored] : checkpoint.part(part)) {
      if (!names.contains(name)) impl_->missed.emplace_back(place_of(checkpoint, stored), name);
    }
  }
}

CheckpointLoad::~CheckpointLoad() = default;

std::vector<std::pair<std::string, std::string>> CheckpointLoad::missed() const {
  return impl_->missed;
}

void CheckpointLoad::fill() const {
  for (const Filling& filling : impl_->fillings) filling.fill();
}

void load_slices(const std::string& folder, const SlicedParts& parts) {
  CheckpointLoad(folder, parts).fill();
}

void load_checkpoint(const std::string& folder, const Parts& parts) {
  SlicedParts slices;
  for (const auto& [part, tensors] : parts) slices[part] = whole_slices(tensors);
  const CheckpointLoad load(folder, slices);
  for (const auto& [place, name] : load.missed())
    fail_other_model(place, name + " is not in this one");
  load.fill();
}

void load_checkpoint(const std::string& folder, torch::nn::Module& model) {
  load_checkpoint(folder, Parts{{"weights", state_of(model)}});
}

void CheckpointWriter::save(const std::string& folder, const Parts& parts, int64_t update,
                            const Facts& facts) {
  task_.wait_idle();  // Before copying: two copies at once are one too many.
  Parts copies;
  for (const auto& [part, tensors] : parts) {
    for (const auto& [name, tensor] : tensors) copies[part].emplace_back(name, host_copy(tensor));
  }
  task_.start([=] { save_checkpoint(folder, copies, update, facts); });
}

}  // namespace cohort::train
