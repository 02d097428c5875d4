// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/manifest.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <system_error>

#include "cohort/base/checksum.h"
#include "cohort/base/error.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;
using OrderedJson = nlohmann::ordered_json;

constexpr int kVersion = 2;
constexpr const char* kSumKey = ",\n  \"sha256\": \"";  // after the text that it is of
constexpr const char* kEnd = "\n}\n";

std::string sha256_of(std::string_view text) {
  Sha256 sum;
  sum.update(text);
  return sum.hex();
}

// A text as JSON writes it.
std::string quoted(const std::string& text) {
  try {
    return OrderedJson(text).dump();
  } catch (const OrderedJson::exception&) {
    throw ConfigError(
        "manifest.json: expected names and metadata in UTF-8, got " +
        OrderedJson(text).dump(-1, ' ', false, OrderedJson::error_handler_t::replace));
  }
}

// Reads JSON's values; every complaint begins with the place.
class Reader {
 public:
  explicit Reader(const std::string& where) : where_(where) {}

  void require(bool holds, const std::string& expected) const {
    if (!holds) throw ConfigError(where_ + ": " + expected);
  }

  StoredFile file(const std::string& key, const OrderedJson& json) const {
    const bool good = json.is_object() && json.contains("name") && json["name"].is_string() &&
                      json.contains("sha256") && json["sha256"].is_string();
    require(good, "expected a manifest with files and facts: file " + key);
    StoredFile file{json["name"].get<std::string>(), json["sha256"].get<std::string>(), {}};
    require(fs::path(file.name).filename() == file.name && !file.name.empty(),
            "file " + key + ": expected a name without a folder, found " + file.name);
    if (json.contains("bytes")) {
      require(json["bytes"].is_number_unsigned(), "file " + key + ": expected a number of bytes");
      file.bytes = json["bytes"].get<uint64_t>();
    }
    return file;
  }

  StoredTensor tensor(const std::string& name, const OrderedJson& json,
                      const Manifest& manifest) const {
    const std::string prefix = "tensor " + name + ": expected ";
    require(json.is_object() && json.contains("dtype") && json["dtype"].is_string() &&
                json.contains("shape") && json.contains("ranges") && json["ranges"].is_object(),
            prefix + "dtype, shape and ranges");
    const auto dtype = dtype_named(json["dtype"].get_ref<const std::string&>());
    require(dtype.has_value(),
            prefix + "a dtype that is known, found " + json["dtype"].get<std::string>());
    StoredTensor tensor{*dtype, numbers(prefix + "sizes as shape", json["shape"]), {}};
    const auto count = num_elements(tensor.shape);
    require(count.has_value(), prefix + "fewer than 2^63 elements");
    for (const auto& [key, value] : json["ranges"].items()) {
      require(manifest.files.contains(key), prefix + "a file of this manifest, found " + key);
      const auto bounds = numbers(prefix + "numbers as ranges", value);
      // begin < end <= next begin < next end ... <= count
      bool good = bounds.size() % 2 == 0 && (bounds.empty() || bounds.back() <= *count);
      for (size_t i = 1; i < bounds.size(); ++i)
        good = good && bounds[i - 1] + static_cast<int64_t>(i % 2) <= bounds[i];
      require(good, prefix + "ascending ranges within " + std::to_string(*count) + " elements");
      auto& ranges = tensor.ranges[key];
      for (size_t i = 0; i < bounds.size(); i += 2) ranges.push_back({bounds[i], bounds[i + 1]});
    }
    return tensor;
  }

  // A key that was changed must not pass for one that is not there.
  void check_keys(const OrderedJson& json, int version) const {
    for (const auto& [key, value] : json.items()) {
      const bool known = key == "version" || key == "update" || key == "files" || key == "facts" ||
                         (version > 1 && (key == "tensors" || key == "sha256"));
      require(known, "found \"" + key + "\", which a manifest of version " +
                         std::to_string(version) + " does not have");
    }
  }

  void check_sum(const OrderedJson& json, const std::string& text) const {
    if (!json.contains("sha256")) return;
    const std::string_view all(text);
    const size_t end = all.rfind(kSumKey);
    require(
        end != all.npos && all.substr(end) == kSumKey + sha256_of(all.substr(0, end)) + "\"" + kEnd,
        "its SHA-256 is not the one in its last line: it was changed");
  }

 private:
  std::vector<int64_t> numbers(const std::string& expected, const OrderedJson& json) const {
    require(json.is_array(), expected);
    for (const OrderedJson& number : json)
      require(number.is_number_unsigned() && number.get<uint64_t>() <= INT64_MAX, expected);
    return json.get<std::vector<int64_t>>();
  }

  const std::string& where_;
};

OrderedJson to_json(const StoredTensor& tensor) {
  OrderedJson ranges = OrderedJson::object();
  for (const auto& [key, stored] : tensor.ranges) {
    OrderedJson& bounds = ranges[key] = OrderedJson::array();
    for (const ElementRange& range : stored) {
      bounds.push_back(range.begin);
      bounds.push_back(range.end);
    }
  }
  return {{"dtype", to_string(tensor.dtype)}, {"shape", tensor.shape}, {"ranges", ranges}};
}

OrderedJson to_json(const StoredFile& file) {
  OrderedJson json = {{"name", file.name}, {"sha256", file.sha256}};
  if (file.bytes) json["bytes"] = *file.bytes;
  return json;
}

// An object with an entry a line: `write` gives each value's text.
template <class Map, class Write>
std::string block(const Map& map, const std::string& indent, const Write& write) {
  std::string text = "{";
  for (const auto& [key, value] : map) {
    text += (text.size() > 1 ? ",\n" : "\n") + indent + "  " + quoted(key) + ": ";
    text += write(value);
  }
  return text + (map.empty() ? "}" : "\n" + indent + "}");
}

}  // namespace

std::string to_string(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

Manifest Manifest::read(const std::string& folder) {
  if (folder.empty()) throw ConfigError("expected a checkpoint's folder, got an empty name");
  const std::string path = folder + "/manifest.json";
  std::error_code ignored;
  const bool is_file = fs::is_regular_file(path, ignored);  // A device or a pipe may never end.
  std::ifstream file;
  if (is_file) file.open(path);
  if (!file.is_open()) throw ConfigError(path + ": no checkpoint here");
  Manifest manifest = parse({std::istreambuf_iterator<char>(file), {}}, path);
  manifest.check_coverage(path);
  return manifest;
}

Manifest Manifest::parse(const std::string& text, const std::string& where) {
  const OrderedJson json = OrderedJson::parse(text, nullptr, /*allow_exceptions=*/false);
  const Reader reader(where);
  const auto has_object = [&](const char* key) {
    return json.is_object() && json.contains(key) && json[key].is_object();
  };
  reader.require(has_object("files") && has_object("facts"),
                 std::string("expected a manifest with files and facts, found ") +
                     (text.empty()          ? "an empty file"
                      : json.is_discarded() ? "what is no JSON"
                                            : "other JSON"));
  Manifest manifest{.version = 1};
  if (json.contains("version")) {
    reader.require(json["version"].is_number_unsigned(), "expected a number as version");
    const auto version = json["version"].get<uint64_t>();
    reader.require(version >= 1 && version <= kVersion,
                   "its version is " + std::to_string(version) + ", this program reads up to " +
                       std::to_string(kVersion));
    manifest.version = static_cast<int>(version);
  }
  reader.check_keys(json, manifest.version);
  if (json.contains("update")) {
    reader.require(json["update"].is_number_integer(), "expected a number as update");
    manifest.update = json["update"].get<int64_t>();
  }
  for (const auto& [key, value] : json["facts"].items()) {
    reader.require(value.is_string(), key + ": expected a text");
    manifest.metadata[key] = value.get<std::string>();
  }
  for (const auto& [key, value] : json["files"].items())
    manifest.files[key] = reader.file(key, value);
  if (manifest.version == 1) return manifest;
  reader.require(has_object("tensors"), "expected tensors by part");
  for (const auto& [part, tensors] : json["tensors"].items()) {
    reader.require(tensors.is_object(), "part " + part + ": expected tensors by name");
    auto& stored = manifest.parts[part];
    for (const auto& [name, value] : tensors.items())
      stored[name] = reader.tensor(name, value, manifest);
  }
  reader.check_sum(json, text);
  return manifest;
}

std::string Manifest::to_json() const {
  std::string text = "{\n  \"version\": " + std::to_string(version) + ",\n";
  if (update) text += "  \"update\": " + std::to_string(*update) + ",\n";
  text += "  \"files\": " +
          block(files, "  ", [](const StoredFile& file) { return cohort::to_json(file).dump(); });
  text += ",\n  \"facts\": " + block(metadata, "  ", quoted);
  if (version == 1) return text + kEnd;
  text += ",\n  \"tensors\": " + block(parts, "  ", [](const auto& tensors) {
            return block(tensors, "    ",
                         [](const StoredTensor& tensor) { return cohort::to_json(tensor).dump(); });
          });
  return text + kSumKey + sha256_of(text) + "\"" + kEnd;
}

void Manifest::add(const Manifest& other, const std::string& where) {
  files.insert(other.files.begin(), other.files.end());
  for (const auto& [part, tensors] : other.parts) {
    auto& known_tensors = parts[part];  // may be empty: an optimizer without state
    for (const auto& [name, tensor] : tensors) {
      StoredTensor& known =
          known_tensors.try_emplace(name, StoredTensor{tensor.dtype, tensor.shape, {}})
              .first->second;
      if (known.dtype != tensor.dtype || known.shape != tensor.shape) {
        throw ConfigError(where + ": ranks do not agree on " + name + " of " + part + ": " +
                          cohort::to_string(known.dtype) + " " + cohort::to_string(known.shape) +
                          " and " + cohort::to_string(tensor.dtype) + " " +
                          cohort::to_string(tensor.shape));
      }
      known.ranges.insert(tensor.ranges.begin(), tensor.ranges.end());
    }
  }
}

void Manifest::check_coverage(const std::string& where) const {
  for (const auto& [part, tensors] : parts) {
    for (const auto& [name, tensor] : tensors) {
      std::vector<ElementRange> all;
      for (const auto& [key, ranges] : tensor.ranges)
        all.insert(all.end(), ranges.begin(), ranges.end());
      std::sort(all.begin(), all.end(), [](const ElementRange& a, const ElementRange& b) {
        return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
      });
      const int64_t count = num_elements(tensor.shape).value();
      all.push_back({count, count});
      int64_t covered = 0;
      for (const ElementRange& range : all) {
        if (range.begin != covered) {
          const bool doubled = range.begin < covered;
          throw ConfigError(
              where + ": elements " + std::to_string(doubled ? range.begin : covered) + " to " +
              std::to_string(doubled ? std::min(covered, range.end) : range.begin) + " of " + name +
              " of " + part + " are in " + (doubled ? "two files" : "no file"));
        }
        covered = range.end;
      }
    }
  }
}

}  // namespace cohort
