#include "cohort/train/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <pthread.h>
#include <sstream>
#include <torch/nn/module.h>
#include <torch/types.h>

#include "cohort/base/atomic_file.h"
#include "cohort/base/checksum.h"
#include "cohort/base/error.h"
#include "cohort/base/safetensors.h"

namespace cohort::train {
namespace {

namespace fs = std::filesystem;

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return DType::kF64;
    case at::kFloat:
      return DType::kF32;
    case at::kHalf:
      return DType::kF16;
    case at::kBFloat16:
      return DType::kBF16;
    case at::kLong:
      return DType::kI64;
    case at::kInt:
      return DType::kI32;
    case at::kShort:
      return DType::kI16;
    case at::kChar:
      return DType::kI8;
    case at::kByte:
      return DType::kU8;
    case at::kBool:
      return DType::kBool;
    default:
      TORCH_CHECK_VALUE(false, "checkpoint: tensors of type ", tensor.dtype(), " are not written");
  }
}

TensorView view_of(const std::string& name, const at::Tensor& tensor) {
  return {.name = name,
          .dtype = dtype_of(tensor),
          .shape = tensor.sizes().vec(),
          .bytes = {static_cast<const std::byte*>(tensor.data_ptr()), tensor.nbytes()}};
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::ostringstream out;
  out << at::IntArrayRef(shape);
  return out.str();
}

nlohmann::json read_json(const std::string& folder) {
  const std::string path = folder + "/manifest.json";
  std::ifstream file(path);
  if (!file || fs::is_directory(path)) throw ConfigError(path + ": no checkpoint here");
  const auto json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  const auto has_object = [&](const nlohmann::json& parent, const char* key) {
    return parent.is_object() && parent.contains(key) && parent[key].is_object();
  };
  bool good = has_object(json, "files") && has_object(json, "facts");
  if (good) {
    for (const auto& entry : json["files"])
      good = good && entry.is_object() && entry.contains("name") && entry["name"].is_string() &&
             entry.contains("sha256") && entry["sha256"].is_string();
  }
  if (!good) throw ConfigError(path + ": expected a manifest with files and facts");
  return json;
}

// A part's file, checked against its tensors.
class PartFile {
 public:
  PartFile(const std::string& folder, const nlohmann::json& manifest, const std::string& part,
           const NamedTensors& tensors)
      : tensors_(tensors),
        path_(folder + "/" + entry(folder, manifest, part)["name"].get<std::string>()),
        file_(path_) {
    if (sha256_of_file(path_) != manifest["files"][part]["sha256"].get<std::string>()) {
      throw ConfigError(path_ +
                        ": its SHA-256 is not the one in manifest.json: the file was changed");
    }
    for (const auto& [name, tensor] : tensors) check(name, tensor);
    for (const TensorView& stored : file_.tensors()) {
      const auto known = [&](const auto& item) { return item.first == stored.name; };
      if (std::none_of(tensors.begin(), tensors.end(), known)) {
        throw ConfigError(path_ + ": a checkpoint of another model: " + stored.name +
                          " is not in this one");
      }
    }
  }

  void fill() const {
    const at::NoGradGuard no_grad;
    for (const auto& [name, tensor] : tensors_) {
      const TensorView& stored = file_.at(name);
      tensor.copy_(at::from_blob(const_cast<std::byte*>(stored.bytes.data()), tensor.sizes(),
                                 at::TensorOptions().dtype(tensor.dtype())));
    }
  }

 private:
  static const nlohmann::json& entry(const std::string& folder, const nlohmann::json& manifest,
                                     const std::string& part) {
    const auto& files = manifest["files"];
    if (!files.contains(part)) {
      throw ConfigError(folder + "/manifest.json: the checkpoint has no " + part +
                        ": expected one of a training run");
    }
    return files[part];
  }

  void check(const std::string& name, const at::Tensor& tensor) const {
    const TensorView* stored = file_.find(name);
    if (stored == nullptr)
      throw ConfigError(path_ + ": a checkpoint of another model: it has no " + name);
    if (stored->shape == tensor.sizes().vec() && stored->dtype == dtype_of(tensor)) return;
    throw ConfigError(path_ + ": a checkpoint of another model: " + name + " is " +
                      to_string(stored->dtype) + " " + shape_text(stored->shape) + ", expected " +
                      to_string(dtype_of(tensor)) + " " + shape_text(tensor.sizes().vec()));
  }

  const NamedTensors& tensors_;
  std::string path_;
  SafetensorsFile file_;
};

}  // namespace

NamedTensors state_of(const torch::nn::Module& model) {
  NamedTensors state;
  for (const auto& item : model.named_parameters())
    state.emplace_back(item.key(), item.value().detach());
  for (const auto& item : model.named_buffers())
    state.emplace_back(item.key(), item.value().detach());
  return state;
}

void save_checkpoint(const std::string& folder, const Parts& parts, int64_t update,
                     const Facts& facts) {
  std::error_code error;
  fs::create_directories(folder, error);
  const std::string ending = "-" + std::to_string(update) + ".safetensors";
  nlohmann::ordered_json manifest = {{"files", nlohmann::ordered_json::object()}, {"facts", facts}};
  for (const auto& [part, tensors] : parts) {
    NamedTensors contiguous;
    for (const auto& [name, tensor] : tensors)
      contiguous.emplace_back(name, tensor.detach().contiguous());
    std::vector<TensorView> views;
    for (const auto& [name, tensor] : contiguous) views.push_back(view_of(name, tensor));
    manifest["files"][part] = {
        {"name", part + ending},
        {"sha256", write_safetensors(folder + "/" + part + ending, views, {{"format", "pt"}})}};
  }
  write_atomically(folder + "/manifest.json", manifest.dump(2) + "\n");
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string other = entry.path().filename().string();
    if (other.ends_with(".safetensors") && !other.ends_with(ending))
      fs::remove(entry.path(), error);
  }
}

void save_checkpoint(const std::string& folder, const torch::nn::Module& model, int64_t update,
                     const Facts& facts) {
  save_checkpoint(folder, Parts{{"weights", state_of(model)}}, update, facts);
}

Facts read_manifest(const std::string& folder) {
  const nlohmann::json manifest = read_json(folder);
  Facts facts;
  for (const auto& [key, value] : manifest["facts"].items()) {
    if (!value.is_string())
      throw ConfigError(folder + "/manifest.json: " + key + ": expected a text");
    facts[key] = value.get<std::string>();
  }
  return facts;
}

void load_checkpoint(const std::string& folder, const Parts& parts) {
  const nlohmann::json manifest = read_json(folder);
  std::vector<PartFile> files;
  files.reserve(parts.size());
  for (const auto& [part, tensors] : parts) files.emplace_back(folder, manifest, part, tensors);
  for (const PartFile& file : files) file.fill();
}

void load_checkpoint(const std::string& folder, torch::nn::Module& model) {
  load_checkpoint(folder, Parts{{"weights", state_of(model)}});
}

CheckpointWriter::CheckpointWriter() : thread_([this] { run(); }) {
  pthread_setname_np(thread_.native_handle(), "checkpoint");
}

CheckpointWriter::~CheckpointWriter() {
  {
    std::scoped_lock lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void CheckpointWriter::save(const std::string& folder, const Parts& parts, int64_t update,
                            const Facts& facts) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !job_; });
  Job job{folder, {}, update, facts};
  for (const auto& [part, tensors] : parts) {
    for (const auto& [name, tensor] : tensors)
      job.parts[part].emplace_back(name, tensor.detach().clone());
  }
  job_ = std::move(job);
  lock.unlock();
  changed_.notify_all();
}

void CheckpointWriter::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !job_; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

bool CheckpointWriter::busy() const {
  std::scoped_lock lock(mutex_);
  return job_.has_value();
}

void CheckpointWriter::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return job_ || stop_; });
    if (!job_) return;
    const Job& job = *job_;
    lock.unlock();
    std::exception_ptr error;
    try {
      save_checkpoint(job.folder, job.parts, job.update, job.facts);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error && !error_) error_ = error;
    job_.reset();
    changed_.notify_all();
  }
}

}  // namespace cohort::train
