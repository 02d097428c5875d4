// SPDX-License-Identifier: Apache-2.0
// Checkpoints that other programs wrote, in the form of this project's: whole tensors in one or
// several files. Knows nothing of torch.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "cohort/base/manifest.h"
#include "cohort/base/tensor_file.h"

namespace cohort {

/// Reads the index of a checkpoint in several safetensors files, as Hugging Face writes it
/// ("model.safetensors.index.json"). Returns weight_map: for each tensor, the name of its file.
/// Errors: ConfigError that begins with `where`: no index, a tensor that occurs twice, a name of a
///         file that leaves the folder.
std::map<std::string, std::string> parse_weight_map(const std::string& json,
                                                    const std::string& where);

struct ImportedCheckpoint {
  std::string path;   ///< Of the index, or of the only file.
  Manifest manifest;  ///< One part, "weights"; files without SHA-256.
  std::map<std::string, std::unique_ptr<const TensorFile>> files;  ///< By key in the manifest.
};

/// Opens an index, a safetensors file, a file of torch.save, or a folder with
/// model.safetensors.index.json or model.safetensors. Of the files only headers are read.
/// `key`: as TorchFile's.
///
/// Returns: nothing if `path` is a folder without these.
/// Errors:  ConfigError that names the file: missing, damaged (SafetensorsFile, TorchFile,
///          parse_weight_map), or without a tensor that the index says it has; a `key` for another
///          format.
std::optional<ImportedCheckpoint> open_imported(const std::string& path, const std::string& key);

}  // namespace cohort
