// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/torch_file.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/pickle.h"
#include "cohort/base/zip_archive.h"

namespace cohort {
namespace {

using Kind = PickleValue::Kind;

constexpr size_t kMaxPickleBytes = 100'000'000;
constexpr int kMaxDepth = 64;           // of modules in one another
constexpr int kMaxObjects = 1'000'000;  // One may be in several others.
constexpr size_t kMaxName = 4096;
constexpr size_t kMaxDimensions = 64;

std::optional<std::vector<int64_t>> sizes_of(const PickleValue& tuple) {
  std::vector<int64_t> sizes;
  for (const PickleValue* item : tuple.items) {
    if (item->kind != Kind::kInteger || item->integer < 0) return std::nullopt;
    sizes.push_back(item->integer);
  }
  return sizes;
}

bool is_contiguous(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
  int64_t expected = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

// The number of elements from the first to behind the last; nothing if it exceeds 2^63.
std::optional<int64_t> extent_of(const std::vector<int64_t>& shape,
                                 const std::vector<int64_t>& strides) {
  int64_t extent = 1;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == 0) return 0;
    int64_t step = 0;
    if (__builtin_mul_overflow(shape[i] - 1, strides[i], &step) ||
        __builtin_add_overflow(extent, step, &extent))
      return std::nullopt;
  }
  return extent;
}

// Copies elements in the order of rows; returns where the next goes.
std::byte* gather(const std::byte* from, std::byte* to, std::span<const int64_t> shape,
                  std::span<const int64_t> strides, size_t item) {
  if (shape.empty()) {
    std::memcpy(to, from, item);
    return to + item;
  }
  for (int64_t i = 0; i < shape[0]; ++i)
    to = gather(from + i * strides[0] * static_cast<int64_t>(item), to, shape.subspan(1),
                strides.subspan(1), item);
  return to;
}

}  // namespace

struct TorchFile::Reader {
  TorchFile& file;
  decltype(zip_entries({}, {})) entries;
  std::string folder{};  // of the archive, with its slash
  int objects = 0;
  size_t copied = 0;  // bytes

  [[noreturn]] void fail(const std::string& what) const {
    throw ConfigError(file.path() + ": " + what);
  }

  std::span<const std::byte> find_pickle() {
    for (const auto& [name, bytes] : entries) {
      const size_t slash = name.find('/');
      if (slash == name.npos || name.substr(slash) != "/data.pkl") continue;
      folder = name.substr(0, slash + 1);
      const auto order = entries.find(folder + "byteorder");
      if (order != entries.end() &&
          std::string_view(reinterpret_cast<const char*>(order->second.data()),
                           order->second.size()) != "little")
        fail("expected little-endian elements");
      if (bytes.size() > kMaxPickleBytes) fail("expected a pickle of at most 100 MB");
      return bytes;
    }
    fail("expected an archive of torch.save: it has no data.pkl that is not compressed");
  }

  const PickleValue& at_key(const PickleValue& root, const std::string& key) const {
    std::string found;
    for (size_t i = 0; i + 1 < root.items.size(); i += 2) {
      const PickleValue& name = *root.items[i];
      if (name.kind != Kind::kText) continue;
      if (name.text == key) return *root.items[i + 1];
      found += (found.empty() ? "" : ", ") + name.text;
    }
    fail("expected a state dict under the key " + key + ", found keys: " + found);
  }

  // What is no tensor in a module's archive is no state: whether it trains, say.
  void add_all(const PickleValue& from, const std::string& prefix, int depth) {
    if (depth > kMaxDepth || ++objects > kMaxObjects) fail("its modules are nested too deeply");
    const bool is_object = from.kind == Kind::kObject;
    if (!is_object && from.kind != Kind::kDict)
      fail(std::string("expected a state dict, found ") + to_string(from.kind));
    for (size_t i = 0; i + 1 < from.items.size(); i += 2) {
      const PickleValue& key = *from.items[i];
      const PickleValue& value = *from.items[i + 1];
      if (key.kind != Kind::kText)
        fail(std::string("expected names as keys of the state dict, found ") + to_string(key.kind));
      if (prefix.size() + key.text.size() > kMaxName) fail("a name is longer than 4096 bytes");
      const std::string name = prefix + key.text;
      if (value.kind == Kind::kTensor) {
        add_tensor(name, value);
      } else if (is_object) {
        if (value.kind == Kind::kObject) add_all(value, name + ".", depth + 1);
      } else {
        fail("expected a tensor as " + name + ", found " + to_string(value.kind) +
             (value.kind == Kind::kDict ? ": if that is the state dict, pass its key" : ""));
      }
    }
  }

  void add_tensor(const std::string& name, const PickleValue& tensor) {
    const PickleValue& storage = *tensor.items[0];
    const int64_t offset = tensor.items[1]->integer;
    const auto shape = sizes_of(*tensor.items[2]);
    const auto strides = sizes_of(*tensor.items[3]);
    const auto count = shape ? num_elements(*shape) : std::nullopt;
    if (!count || !strides || strides->size() != shape->size() || shape->size() > kMaxDimensions ||
        offset < 0)
      fail("tensor " + name + ": expected sizes, strides and an offset");
    const auto record = entries.find(folder + "data/" + storage.items[0]->text);
    if (record == entries.end())
      fail("tensor " + name + ": its record data/" + storage.items[0]->text + " is missing");
    const size_t item = item_size(storage.dtype);
    const auto held = static_cast<int64_t>(record->second.size() / item);
    const auto extent = extent_of(*shape, *strides);
    int64_t end = 0;
    const bool within = held >= storage.integer && extent &&
                        !__builtin_add_overflow(offset, *extent, &end) && end <= storage.integer;
    if (!within || *count > held)
      fail("tensor " + name + ": its elements are not all in record data/" +
           storage.items[0]->text);
    TensorView view{.name = name, .dtype = storage.dtype, .shape = *shape};
    const auto bytes = record->second.subspan(static_cast<size_t>(offset) * item,
                                              static_cast<size_t>(*extent) * item);
    if (*count == 0 || is_contiguous(*shape, *strides)) {
      view.bytes = bytes;
    } else {
      const size_t size = static_cast<size_t>(*count) * item;
      copied += size;
      if (copied > file.mapping().size())
        fail("tensor " + name + ": it shares its elements with others");
      auto& copy = file.copies_.emplace_back(std::make_unique<std::byte[]>(size));
      gather(bytes.data(), copy.get(), *shape, *strides, item);
      view.bytes = {copy.get(), size};
    }
    if (!file.add(std::move(view))) fail("tensor " + name + " occurs twice");
  }
};

TorchFile::TorchFile(const std::string& path, const std::string& key)
    : TensorFile(path, "file of torch.save") {
  if (!is_zip_archive(mapping())) {
    throw ConfigError(path +
                      ": expected a file of torch.save in its zip format (torch 1.6 or later)");
  }
  Reader reader{.file = *this, .entries = zip_entries(path, mapping())};
  const Pickle pickle(path, reader.find_pickle());
  const PickleValue& root = pickle.root();
  reader.add_all(key.empty() ? root : reader.at_key(root, key), "", 0);
  if (tensors().empty()) throw ConfigError(path + ": expected tensors, found none");
}

}  // namespace cohort
