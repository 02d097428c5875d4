// A model on disk: weights as safetensors under plain parameter names, and a manifest written last.
//
// Folder:  weights-<update>.safetensors, manifest.json. The manifest names its weights file and
// that
//          file's SHA-256, so that a save cut short leaves the previous checkpoint.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <torch/nn/module.h>

namespace cohort::train {

/// What a manifest says beside the weights: flat names and values, "model.dim_emb" = "512".
using Facts = std::map<std::string, std::string>;

/// Writes the model's parameters and buffers, then the manifest; then older weights are removed.
///
/// Local: for rank 0. `update` numbers the file. Blocks until the disk has it.
/// Errors: ConfigError if the folder is not writable; c10::Error if writing fails: the previous
///         checkpoint stays.
void save_checkpoint(const std::string& folder, const torch::nn::Module& model, int64_t update,
                     const Facts& facts);

/// Returns the manifest's facts, without reading weights.
/// Errors: ConfigError that names the file if there is none, or it is no manifest.
Facts read_manifest(const std::string& folder);

/// Fills the model's parameters and buffers.
/// Errors: ConfigError that names file and tensor: damage, a checksum that differs, a tensor that
/// is
///         missing, left over, or of another shape or type (a checkpoint of another model). The
///         model is changed only if everything fits.
void load_checkpoint(const std::string& folder, torch::nn::Module& model);

}  // namespace cohort::train
