// SPDX-License-Identifier: Apache-2.0
// Reads and writes safetensors files: named, typed, shaped byte ranges. Knows nothing of torch.
//
// Layout: 8 bytes little-endian header length, JSON header padded with spaces to a multiple of 8,
// then the tensors' bytes without gaps, little-endian, row-major.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cohort/base/tensor_file.h"

namespace cohort {

using TensorMetadata = std::map<std::string, std::string>;

/// Writes `tensors` to `path` atomically, block by block (block_writer.h): memory for no tensor.
///
/// Order in the file: larger element types first, then by name, so every tensor is aligned to its
/// element and equal input gives an equal file.
/// Returns: the file's SHA-256 (checksum.h).
/// Errors: ConfigError: a shape does not match its bytes, a name occurs twice, is "__metadata__" or
///         not UTF-8, the header would exceed 100 MB, or the folder is not writable.
///         c10::Error: writing failed.
std::string write_safetensors(const std::string& path, std::span<const TensorView> tensors,
                              const TensorMetadata& metadata = {});

/// A tensor to be written whose elements lie in several places: the pieces follow one another.
struct TensorPieces {
  std::string name{};
  DType dtype = DType::kF32;
  std::vector<int64_t> shape{};
  std::vector<std::span<const std::byte>> pieces{};  ///< Together what TensorView::bytes would be.
};

/// Takes the next bytes of a file.
using ByteSink = std::function<void(std::span<const std::byte>)>;

/// A tensor that is made while it is written: no process needs memory for all of it.
struct TensorStream {
  std::string name{};
  DType dtype = DType::kF32;
  std::vector<int64_t> shape{};
  std::function<void(const ByteSink&)>
      produce{};  ///< Gives all bytes, piece by piece; called once.
};

/// write_safetensors() of such. Errors besides: ConfigError if a stream gives fewer or more bytes
/// than its shape; what `produce` throws passes through.
std::string stream_safetensors(const std::string& path, std::span<const TensorStream> tensors,
                               const TensorMetadata& metadata = {});

struct WrittenFile {
  std::string name;  ///< Without its folder.
  std::string sha256;
  uint64_t bytes = 0;
};

/// The same, to a file beside `path` that `name_of` names when its SHA-256 is known. Errors name
/// `path`.
WrittenFile write_safetensors(const std::string& path, std::span<const TensorPieces> tensors,
                              const TensorMetadata& metadata,
                              const std::function<std::string(const std::string& sha256)>& name_of);

/// A safetensors file mapped into memory. Opening checks the whole header against the file's size;
/// the format has no checksum of the elements. Nothing in it is executed. Tensors are in the order
/// of their bytes.
class SafetensorsFile : public TensorFile {
 public:
  /// Errors: ConfigError that names the file and the damage: header length, JSON, a missing or
  ///         doubled or unknown entry, an unknown dtype, offsets that overlap, leave a gap or end
  ///         elsewhere than the file, a shape that does not match its bytes.
  explicit SafetensorsFile(const std::string& path);

  const TensorMetadata& metadata() const { return metadata_; }

 private:
  void parse_header(std::string_view header, std::span<const std::byte> data);

  TensorMetadata metadata_;
};

}  // namespace cohort
