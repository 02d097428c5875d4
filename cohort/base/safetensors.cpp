// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "cohort/base/atomic_file.h"
#include "cohort/base/block_writer.h"
#include "cohort/base/checksum.h"
#include "cohort/base/error.h"
#include "cohort/base/json_keys.h"

namespace cohort {
namespace {

static_assert(std::endian::native == std::endian::little, "the file holds little-endian elements");

using Json = nlohmann::json;

constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr const char* kMetadataKey = "__metadata__";

// Returns the size in bytes; nothing if a dimension is negative or the product overflows.
std::optional<uint64_t> byte_count(const std::vector<int64_t>& shape, DType dtype) {
  uint64_t bytes = item_size(dtype);
  for (int64_t dimension : shape) {
    if (dimension < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(dimension), &bytes)) {
      return std::nullopt;
    }
  }
  return bytes;
}

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw ConfigError(path + ": not a valid safetensors file: " + what);
}

// A tensor's entry in the header, checked as far as it goes alone.
struct Entry {
  TensorView view;
  uint64_t begin = 0;
  uint64_t end = 0;
};

Entry read_entry(const std::string& path, const std::string& name, const Json& json) {
  const std::string tensor = "tensor \"" + name + "\": ";
  const auto require = [&](bool holds, const std::string& expected) {
    if (!holds) fail(path, tensor + "expected " + expected);
  };
  const auto all_unsigned = [](const Json& array) {
    return array.is_array() && std::all_of(array.begin(), array.end(), [](const Json& number) {
             return number.is_number_unsigned() && number.get<uint64_t>() <= INT64_MAX;
           });
  };
  require(json.is_object() && json.size() == 3 && json.contains("dtype") &&
              json.contains("shape") && json.contains("data_offsets"),
          "exactly dtype, shape and data_offsets");
  require(json["dtype"].is_string(), "dtype to be a string");
  const auto& dtype_name = json["dtype"].get_ref<const std::string&>();
  const auto dtype = dtype_named(dtype_name);
  require(dtype.has_value(), "a dtype that this reader knows, found " + dtype_name);
  require(all_unsigned(json["shape"]), "shape to be a list of sizes");
  const Json& offsets = json["data_offsets"];
  require(all_unsigned(offsets) && offsets.size() == 2, "data_offsets to be two offsets");

  Entry entry{.view = {name, *dtype, json["shape"].get<std::vector<int64_t>>(), {}},
              .begin = offsets[0].get<uint64_t>(),
              .end = offsets[1].get<uint64_t>()};
  require(entry.begin <= entry.end, "data_offsets in ascending order");
  const auto expected = byte_count(entry.view.shape, entry.view.dtype);
  const uint64_t found = entry.end - entry.begin;
  require(expected == found, (expected ? std::to_string(*expected) : "fewer than 2^64") +
                                 " bytes by dtype and shape, found " + std::to_string(found));
  return entry;
}

TensorMetadata read_metadata(const std::string& path, const Json& json) {
  TensorMetadata metadata;
  if (!json.is_object()) fail(path, "expected __metadata__ to be an object");
  for (const auto& [key, value] : json.items()) {
    if (!value.is_string()) fail(path, "expected __metadata__ \"" + key + "\" to be a string");
    metadata.emplace(key, value.get<std::string>());
  }
  return metadata;
}

std::string cannot_write(const std::string& path, const std::string& tensor) {
  return path + ": cannot write tensor \"" + tensor + "\": ";
}

[[noreturn]] void fail_size(const std::string& path, const std::string& tensor,
                            std::optional<uint64_t> expected, uint64_t found) {
  throw ConfigError(cannot_write(path, tensor) + "expected " +
                    (expected ? std::to_string(*expected) : "fewer than 2^64") +
                    " bytes by dtype and shape, found " + std::to_string(found));
}

// The pieces must outlive the streams.
std::vector<TensorStream> streams_of(const std::string& path,
                                     std::span<const TensorPieces> tensors) {
  std::vector<TensorStream> streams;
  for (const TensorPieces& tensor : tensors) {
    uint64_t bytes = 0;
    for (const auto& piece : tensor.pieces) bytes += piece.size();
    const auto expected = byte_count(tensor.shape, tensor.dtype);
    if (expected != bytes) fail_size(path, tensor.name, expected, bytes);
    streams.push_back({tensor.name, tensor.dtype, tensor.shape, [&tensor](const ByteSink& write) {
                         for (const auto& piece : tensor.pieces) write(piece);
                       }});
  }
  return streams;
}

uint64_t size_of(const TensorStream& tensor) {
  return byte_count(tensor.shape, tensor.dtype).value();
}

// Checks the input of the writer and returns it in the order of the file.
std::vector<const TensorStream*> file_order(const std::string& path,
                                            std::span<const TensorStream> tensors) {
  std::vector<const TensorStream*> order;
  std::set<std::string_view> names;
  for (const TensorStream& tensor : tensors) {
    const std::string prefix = cannot_write(path, tensor.name);
    if (tensor.name == kMetadataKey) throw ConfigError(prefix + "the name is reserved");
    if (!names.insert(tensor.name).second) throw ConfigError(prefix + "the name occurs twice");
    if (!byte_count(tensor.shape, tensor.dtype)) {
      throw ConfigError(prefix + "expected fewer than 2^64 bytes by dtype and shape");
    }
    order.push_back(&tensor);
  }
  std::sort(order.begin(), order.end(), [](const TensorStream* a, const TensorStream* b) {
    const size_t size_a = item_size(a->dtype);
    const size_t size_b = item_size(b->dtype);
    return std::tie(size_b, a->name) < std::tie(size_a, b->name);
  });
  return order;
}

std::string make_header(const std::string& path, const std::vector<const TensorStream*>& order,
                        const TensorMetadata& metadata) {
  Json json = Json::object();
  if (!metadata.empty()) json[kMetadataKey] = metadata;
  uint64_t offset = 0;
  for (const TensorStream* tensor : order) {
    const uint64_t end = offset + size_of(*tensor);
    json[tensor->name] = {{"dtype", to_string(tensor->dtype)},
                          {"shape", tensor->shape},
                          {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string header;
  try {
    header = json.dump();
  } catch (const Json::exception&) {
    throw ConfigError(path + ": cannot write: expected names and metadata in UTF-8");
  }
  header.resize((header.size() + 7) / 8 * 8, ' ');
  if (header.size() > kMaxHeaderBytes) {
    throw ConfigError(path +
                      ": cannot write: expected a header of at most 100000000 bytes, found " +
                      std::to_string(header.size()));
  }
  return header;
}

// What a file will hold.
class Content {
 public:
  Content(const std::string& path, std::span<const TensorStream> tensors,
          const TensorMetadata& metadata)
      : path_(path),
        order_(file_order(path, tensors)),
        header_(make_header(path, order_, metadata)) {}

  // The name stays empty.
  WrittenFile write(FileWriter& writer) const {
    Sha256 sum;
    BlockWriter blocks(writer);
    WrittenFile written;
    const auto write = [&](std::span<const std::byte> bytes) {
      written.bytes += bytes.size();
      while (!bytes.empty()) {  // By pieces that stay in the CPU's cache: each is read twice.
        const auto piece = bytes.first(std::min(bytes.size(), size_t{1} << 18));
        sum.update(piece);
        blocks.write(piece);
        bytes = bytes.subspan(piece.size());
      }
    };
    const std::array<uint64_t, 1> length = {header_.size()};
    write(std::as_bytes(std::span(length)));
    write(std::as_bytes(std::span(header_)));
    for (const TensorStream* tensor : order_) {
      const uint64_t before = written.bytes;
      tensor->produce(write);
      const uint64_t found = written.bytes - before;
      if (found != size_of(*tensor)) fail_size(path_, tensor->name, size_of(*tensor), found);
    }
    blocks.finish();
    written.sha256 = sum.hex();
    return written;
  }

 private:
  std::string path_;
  std::vector<const TensorStream*> order_;
  std::string header_;
};

}  // namespace

std::string write_safetensors(const std::string& path, std::span<const TensorView> tensors,
                              const TensorMetadata& metadata) {
  std::vector<TensorPieces> whole;
  for (const TensorView& tensor : tensors)
    whole.push_back({tensor.name, tensor.dtype, tensor.shape, {tensor.bytes}});
  return stream_safetensors(path, streams_of(path, whole), metadata);
}

std::string stream_safetensors(const std::string& path, std::span<const TensorStream> tensors,
                               const TensorMetadata& metadata) {
  const Content content(path, tensors, metadata);
  std::string sha256;
  write_atomically(path, [&](FileWriter& writer) { sha256 = content.write(writer).sha256; });
  return sha256;
}

WrittenFile write_safetensors(
    const std::string& path, std::span<const TensorPieces> tensors, const TensorMetadata& metadata,
    const std::function<std::string(const std::string& sha256)>& name_of) {
  const auto streams = streams_of(path, tensors);
  const Content content(path, streams, metadata);
  WrittenFile written;
  write_atomically_renamed(path, [&](FileWriter& writer) {
    written = content.write(writer);
    written.name = name_of(written.sha256);
    return (std::filesystem::path(path).parent_path() / written.name).string();
  });
  return written;
}

SafetensorsFile::SafetensorsFile(const std::string& path) : TensorFile(path, "safetensors file") {
  const auto whole = mapping();
  if (whole.size() < 8)
    fail(path, "expected 8 bytes of header length, found " + std::to_string(whole.size()));
  uint64_t header_bytes = 0;
  std::copy_n(whole.data(), 8, reinterpret_cast<std::byte*>(&header_bytes));
  const auto rest = whole.subspan(8);
  if (header_bytes > kMaxHeaderBytes || header_bytes > rest.size()) {
    fail(path, "the header length is " + std::to_string(header_bytes) + ", expected at most " +
                   std::to_string(std::min<uint64_t>(kMaxHeaderBytes, rest.size())));
  }
  const auto header = rest.first(header_bytes);
  parse_header({reinterpret_cast<const char*>(header.data()), header.size()},
               rest.subspan(header_bytes));
}

void SafetensorsFile::parse_header(std::string_view header, std::span<const std::byte> data) {
  Json json;
  try {
    json = Json::parse(header.begin(), header.end(), UniqueKeys([&](const std::string& what) {
                         fail(path(), what + " in the header");
                       }));
  } catch (const Json::exception& error) {
    fail(path(), std::string("the header is not JSON: ") + error.what());
  }
  if (!json.is_object()) fail(path(), "expected the header to be a JSON object");
  std::vector<Entry> entries;
  for (const auto& [name, value] : json.items()) {
    if (name == kMetadataKey) {
      metadata_ = read_metadata(path(), value);
    } else {
      entries.push_back(read_entry(path(), name, value));
    }
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end, a.view.name) < std::tie(b.begin, b.end, b.view.name);
  });
  uint64_t offset = 0;
  for (Entry& entry : entries) {
    const std::string tensor = "tensor \"" + entry.view.name + "\"";
    if (entry.begin != offset) {
      fail(path(), tensor + " begins at " + std::to_string(entry.begin) + ", expected " +
                       std::to_string(offset));
    }
    if (entry.end > data.size()) {
      fail(path(), tensor + " ends at " + std::to_string(entry.end) + " of " +
                       std::to_string(data.size()) + " bytes: the file is cut short");
    }
    entry.view.bytes = data.subspan(entry.begin, entry.end - entry.begin);
    offset = entry.end;
    add(std::move(entry.view));
  }
  if (offset != data.size()) {
    fail(path(), "expected " + std::to_string(offset) + " bytes of data, found " +
                     std::to_string(data.size()));
  }
}

}  // namespace cohort
