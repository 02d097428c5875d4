// SPDX-License-Identifier: Apache-2.0
// Files of named, typed, shaped tensors that are mapped into memory. Knows nothing of torch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort {

enum class DType { kF64, kF32, kF16, kBF16, kI64, kI32, kI16, kI8, kU8, kBool };

/// Returns the bytes of one element.
size_t item_size(DType dtype);
/// Returns the name in safetensors files: "F32", "BF16", "BOOL" ...
const char* to_string(DType dtype);
/// Returns the type of that name.
std::optional<DType> dtype_named(std::string_view name);
/// Returns the number of elements; nothing if a size is negative or the product exceeds 2^63.
std::optional<int64_t> num_elements(std::span<const int64_t> shape);

/// A tensor's description and a borrowed view of its elements.
struct TensorView {
  std::string name{};
  DType dtype = DType::kF32;
  std::vector<int64_t> shape{};        ///< Empty: a scalar.
  std::span<const std::byte> bytes{};  ///< product(shape) * item_size(dtype) bytes, row-major.
};

/// The tensors of a file that is mapped into memory: what SafetensorsFile and TorchFile share.
///
/// Owner: the views point into this object and die with it. The file must not be shortened
///        meanwhile (replacing it by rename, as this project does, is safe).
/// Threads: immutable after construction.
class TensorFile {
 public:
  virtual ~TensorFile();
  TensorFile(const TensorFile&) = delete;
  TensorFile& operator=(const TensorFile&) = delete;

  /// Returns all tensors in the order of their bytes or names.
  const std::vector<TensorView>& tensors() const { return tensors_; }
  /// Returns the tensor, or nullptr.
  const TensorView* find(std::string_view name) const;
  /// Returns the tensor.
  /// Errors: ConfigError that names file and tensor if there is none.
  const TensorView& at(std::string_view name) const;

 protected:
  /// `kind`: what is expected there, "safetensors file" say.
  /// Errors: ConfigError that names the file: it cannot be read, or is no regular file.
  TensorFile(const std::string& path, const std::string& kind);

  /// Returns whether the name is new.
  bool add(TensorView tensor);
  const std::string& path() const { return path_; }
  std::span<const std::byte> mapping() const { return mapping_; }

 private:
  std::string path_;
  std::span<const std::byte> mapping_;
  std::vector<TensorView> tensors_;
  std::map<std::string, size_t, std::less<>> index_;
};

}  // namespace cohort
