// SPDX-License-Identifier: Apache-2.0
// Reads the tensors of files that torch.save wrote. Nothing in them is executed.
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/tensor_file.h"

namespace cohort {

/// A state dict that Python's torch.save wrote (.pt, .pth: torch 1.6 and later), a dict of tensors
/// that torch::pickle_save wrote, or a module that C++ torch::save wrote, mapped into memory.
///
/// Tensors are in the order of the file, under the keys of the dict, or for modules under the names
/// of parameters and buffers.
/// Memory: tensors that are not contiguous in the file are copied.
class TorchFile : public TensorFile {
 public:
  /// `key`: where in a dict the state dict is, "state_dict" say; empty: it is the whole file.
  /// Errors: ConfigError that names the file, and tensor, entry or name: damage, anything but
  ///         tensors by name, types that no checkpoint has, names of Python's that a state dict
  ///         does not have.
  explicit TorchFile(const std::string& path, const std::string& key = {});

 private:
  struct Reader;
  std::vector<std::unique_ptr<std::byte[]>> copies_;  // of tensors that are not contiguous
};

}  // namespace cohort
