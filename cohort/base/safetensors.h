// Reads and writes safetensors files: named, typed, shaped byte ranges. Knows nothing of torch.
//
// Layout: 8 bytes little-endian header length, JSON header padded with spaces to a multiple of 8,
// then the tensors' bytes without gaps, little-endian, row-major.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
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
/// Returns the name in the file: "F32", "BF16", "BOOL" ...
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
  std::span<const std::byte> bytes{};  ///< product(shape) * item_size(dtype) bytes.
};

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

/// A tensor that is made while it is written: nobody needs memory for all of it.
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

/// A safetensors file mapped into memory, checked whole on opening. Nothing in it is executed.
///
/// Owner: the views point into this object and die with it. The file must not be shortened
///        meanwhile (replacing it by rename, as this project does, is safe).
/// Threads: immutable after construction.
class SafetensorsFile {
 public:
  /// Errors: ConfigError that names the file and the damage: header length, JSON, a missing or
  ///         doubled or unknown entry, an unknown dtype, offsets that overlap, leave a gap or end
  ///         elsewhere than the file, a shape that does not match its bytes.
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) = delete;

  /// Returns all tensors in the order of their bytes.
  const std::vector<TensorView>& tensors() const { return tensors_; }
  const TensorMetadata& metadata() const { return metadata_; }
  /// Returns the tensor, or nullptr.
  const TensorView* find(std::string_view name) const;
  /// Returns the tensor. Errors: ConfigError that names file and tensor if there is none.
  const TensorView& at(std::string_view name) const;

 private:
  void parse();
  void parse_header(std::string_view header, std::span<const std::byte> data);

  std::string path_;
  std::span<const std::byte> mapping_;
  std::vector<TensorView> tensors_;
  std::map<std::string, size_t, std::less<>> index_;
  TensorMetadata metadata_;
};

}  // namespace cohort
