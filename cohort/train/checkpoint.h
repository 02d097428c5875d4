// A training run on disk: tensors as safetensors under plain names, and a manifest written last.
//
// Folder:  weights-<update>.safetensors (and other parts, optimizer-<update>.safetensors),
//          manifest.json. The manifest names each part's file and that file's SHA-256, so that a
//          save cut short leaves the previous checkpoint.
#pragma once
#include <ATen/core/Tensor.h>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace cohort::train {

/// What a manifest says beside the tensors: flat names and values, "model.dim_emb" = "512".
using Facts = std::map<std::string, std::string>;

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// The tensors of a checkpoint by part: "weights", "optimizer" ...
using Parts = std::map<std::string, NamedTensors>;

/// A module's parameters, then its buffers; they share its memory.
NamedTensors state_of(const torch::nn::Module& model);

/// Writes every part, then the manifest; then the files of older updates are removed.
///
/// Local: for rank 0. `update` numbers the files. Blocks until the disk has them.
/// Errors: ConfigError if the folder is not writable; c10::Error if writing fails: the previous
///         checkpoint stays.
void save_checkpoint(const std::string& folder, const Parts& parts, int64_t update,
                     const Facts& facts);
/// The same of a model alone: the part "weights".
void save_checkpoint(const std::string& folder, const torch::nn::Module& model, int64_t update,
                     const Facts& facts);

/// Returns the manifest's facts, without reading tensors.
/// Errors: ConfigError that names the file if there is none, or it is no manifest.
Facts read_manifest(const std::string& folder);

/// Fills the tensors of all `parts`.
/// Errors: ConfigError that names file and tensor: damage, a checksum that differs, a tensor that
///         is missing, left over, or of another shape or type (a checkpoint of another model).
///         Tensors are changed only if everything fits.
void load_checkpoint(const std::string& folder, const Parts& parts);
/// The same of a model alone: the part "weights".
void load_checkpoint(const std::string& folder, torch::nn::Module& model);

/// Writes checkpoints on a thread of its own, so that training goes on meanwhile.
///
/// Threads: one caller. The destructor waits for what is being written.
class CheckpointWriter {
 public:
  CheckpointWriter();
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Copies the tensors; save_checkpoint follows in the background.
  /// Blocks for the copying, and first until the save before it has ended.
  void save(const std::string& folder, const Parts& parts, int64_t update, const Facts& facts);

  /// Blocks until nothing is being written.
  /// Errors: of the saves since the last call, the first that failed (save_checkpoint's errors).
  void wait();

  bool busy() const;

 private:
  struct Job {
    std::string folder;
    Parts parts;  // copies
    int64_t update = 0;
    Facts facts;
  };
  void run();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Job> job_;  // Guarded by mutex_, as the two below; stays until it is written.
  std::exception_ptr error_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace cohort::train
