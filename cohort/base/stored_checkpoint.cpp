// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/stored_checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "cohort/base/atomic_file.h"
#include "cohort/base/checksum.h"
#include "cohort/base/error.h"
#include "cohort/base/imported_checkpoint.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;

constexpr const char* kEnding = ".safetensors";
constexpr size_t kNameDigits = 8;  // of the SHA-256

// Key and stem of a share's file: "weights.0-of-2", "weights-500.0-of-2".
struct Names {
  Names(const std::string& part, const ShareInfo& info) {
    // In another folder no manifest finds the file, and a manifest may be anybody's.
    if (part.empty() || part.find('/') != part.npos) {
      throw ConfigError("checkpoint: expected a part's name without a slash, got " +
                        (part.empty() ? "an empty one" : part));
    }
    const std::string share = info.world_size == 1 ? ""
                                                   : "." + std::to_string(info.rank) + "-of-" +
                                                         std::to_string(info.world_size);
    key = part + share;
    stem = part + "-" + std::to_string(info.update) + share;
  }
  std::string key, stem;
};

// The manifest that is in the folder. A damaged one is as none: it loads nothing.
std::optional<Manifest> manifest_in(const std::string& folder) {
  std::error_code ignored;
  if (!fs::exists(folder + "/manifest.json", ignored)) return std::nullopt;
  try {
    return Manifest::read(folder);
  } catch (const ConfigError&) {
    return std::nullopt;
  }
}

// Whether the folder's checkpoint has the file `name` with other content than `sha256`.
bool is_taken(const std::string& folder, const std::string& name, const std::string& sha256) {
  const auto manifest = manifest_in(folder);
  if (!manifest) return false;
  return std::any_of(manifest->files.begin(), manifest->files.end(), [&](const auto& item) {
    return item.second.name == name && item.second.sha256 != sha256;
  });
}

// One rank's file has a plain name where it may. Several ranks' carry their content in it: that
// needs no word among the ranks of which names are free.
WrittenFile write_file(const std::string& folder, const std::vector<TensorPieces>& tensors,
                       const TensorMetadata& metadata, const std::string& stem, bool plain) {
  make_folder(folder);
  return write_safetensors(folder + "/" + stem + kEnding, tensors, metadata,
                           [&](const std::string& sha256) {
                             if (plain && !is_taken(folder, stem + kEnding, sha256))
                               return stem + kEnding;
                             return stem + "." + sha256.substr(0, kNameDigits) + kEnding;
                           });
}

std::set<std::string> names_of(const Manifest& manifest) {
  std::set<std::string> names;
  for (const auto& [key, file] : manifest.files) names.insert(file.name);
  return names;
}

// Whether a save of this part has named a file so: "weights-5.safetensors",
// "weights-5.0-of-2.65a222b8.safetensors".
bool is_of_part(const std::string& name, const std::string& part) {
  if (!name.starts_with(part + "-") || !name.ends_with(kEnding)) return false;
  const std::string rest = name.substr(part.size() + 1);
  const std::string update = rest.substr(0, rest.find('.'));
  return !update.empty() && update.find_first_not_of("0123456789") == std::string::npos;
}

// What earlier saves and killed ones have left beside the files of `manifest`; `before` is the
// manifest of one of them. Other files stay, but for tensor files that it lists.
std::vector<std::string> others_than(const Manifest& manifest,
                                     const std::optional<Manifest>& before,
                                     const std::string& folder) {
  const std::set<std::string> names = names_of(manifest);
  std::set<std::string> listed, parts;
  for (const auto& [part, tensors] : manifest.parts) parts.insert(part);
  if (before) {
    listed = names_of(*before);
    for (const auto& [part, tensors] : before->parts) parts.insert(part);
  }
  std::error_code error;
  std::vector<std::string> others;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    const bool left_over = name.find(std::string(kEnding) + ".tmp-") != std::string::npos ||
                           name.starts_with("manifest.json.tmp-");
    // Anybody can write a manifest: it makes no file ours that is not a tensor file.
    const bool is_ours =
        (listed.contains(name) && name.ends_with(kEnding)) ||
        std::ranges::any_of(parts, [&](const auto& part) { return is_of_part(name, part); });
    if (left_over || (is_ours && !names.contains(name))) others.push_back(name);
  }
  return others;
}

int64_t count_of(const std::vector<ElementRange>& ranges) {
  int64_t count = 0;
  for (const ElementRange& range : ranges) count += range.end - range.begin;
  return count;
}

// The shape under which a file holds these ranges of a tensor.
std::vector<int64_t> shape_in_file(const StoredTensor& tensor,
                                   const std::vector<ElementRange>& ranges) {
  const int64_t count = count_of(ranges);
  if (count == num_elements(tensor.shape)) return tensor.shape;
  return {count};
}

void append(std::vector<ElementRange>& ranges, ElementRange range) {
  if (range.begin == range.end) return;
  if (!ranges.empty() && ranges.back().end == range.begin) {
    ranges.back().end = range.end;
  } else {
    ranges.push_back(range);
  }
}

void check(const std::string& where, const StoredShard& shard) {
  const auto count = num_elements(shard.shape);
  const auto [begin, end] = shard.range;
  const bool good = count && 0 <= begin && begin <= end && end <= *count &&
                    shard.bytes.size() == static_cast<size_t>(end - begin) * item_size(shard.dtype);
  if (good) return;
  throw ConfigError(where + ": " + shard.name + ": expected elements within shape " +
                    to_string(shard.shape) + " and their bytes, found " + std::to_string(begin) +
                    " to " + std::to_string(end) + " and " + std::to_string(shard.bytes.size()) +
                    " bytes");
}

}  // namespace

Manifest write_share(const std::string& folder, const std::string& part,
                     const std::vector<StoredShard>& shards, const ShareInfo& info) {
  if (folder.empty()) throw ConfigError("expected a folder for the checkpoint, got an empty name");
  const Names names(part, info);
  const std::string where = folder + "/" + names.stem;
  Manifest share{.update = info.update};
  auto& tensors = share.parts[part];
  std::vector<const StoredShard*> order;
  for (const StoredShard& shard : shards) {
    check(where, shard);
    order.push_back(&shard);
  }
  std::stable_sort(order.begin(), order.end(), [](const StoredShard* a, const StoredShard* b) {
    return std::pair(a->name, a->range.begin) < std::pair(b->name, b->range.begin);
  });
  std::map<std::string, TensorPieces> pieces;
  for (const StoredShard* shard : order) {
    // An empty shard says only that the tensor exists, unless that is all of it.
    if (shard->bytes.empty() && num_elements(shard->shape) != 0) continue;
    const auto [found, is_new] =
        tensors.try_emplace(shard->name, StoredTensor{shard->dtype, shard->shape, {}});
    StoredTensor& tensor = found->second;
    auto& ranges = tensor.ranges[names.key];
    if (tensor.dtype != shard->dtype || tensor.shape != shard->shape ||
        (!ranges.empty() && shard->range.begin < ranges.back().end)) {
      throw ConfigError(where + ": shards of " + shard->name +
                        " overlap or differ in type or shape of the whole");
    }
    append(ranges, shard->range);
    pieces[shard->name].pieces.push_back(shard->bytes);
  }
  if (tensors.empty() && info.world_size > 1) return share;
  std::vector<TensorPieces> content;
  for (auto& [name, tensor] : tensors) {
    content.push_back({name, tensor.dtype, shape_in_file(tensor, tensor.ranges[names.key]),
                       std::move(pieces[name].pieces)});
  }
  TensorMetadata metadata{{"format", "pt"}};
  if (info.world_size > 1) {
    metadata["share"] = names.key;
    metadata["update"] = std::to_string(info.update);
  }
  const WrittenFile written =
      write_file(folder, content, metadata, names.stem, info.world_size == 1);
  share.files[names.key] = {written.name, written.sha256, written.bytes};
  return share;
}

void commit_manifest(const std::string& folder, const Manifest& manifest) {
  std::error_code ignored;
  for (const std::string& path : commit_manifest_keeping(folder, manifest))
    fs::remove(path, ignored);
}

// What another save left goes at once: a save that is repeated has files of the same names, and
// they must not be removed when those are there.
std::vector<std::string> commit_manifest_keeping(const std::string& folder,
                                                 const Manifest& manifest) {
  const std::string path = folder + "/manifest.json";
  manifest.check_coverage(path);
  const std::string json = manifest.to_json();
  make_folder(folder);
  const auto before = manifest_in(folder);
  const std::set<std::string> kept = before ? names_of(*before) : std::set<std::string>();
  write_atomically(path, json);
  std::vector<std::string> paths;
  std::error_code ignored;
  for (const std::string& name : others_than(manifest, before, folder)) {
    if (kept.contains(name)) {
      paths.push_back(folder + "/" + name);
    } else {
      fs::remove(folder + "/" + name, ignored);
    }
  }
  return paths;
}

void discard_share(const std::string& folder, const Manifest& share) {
  std::set<std::string> names = names_of(share);
  if (const auto manifest = manifest_in(folder))
    for (const std::string& kept : names_of(*manifest)) names.erase(kept);
  std::error_code ignored;
  for (const std::string& name : names) fs::remove(folder + "/" + name, ignored);
}

StoredCheckpoint::StoredCheckpoint(const std::string& path, const std::string& key)
    : folder_(path), path_(path + "/manifest.json") {
  std::error_code ignored;
  const bool has_manifest = fs::exists(path_, ignored);
  const bool is_there = fs::exists(path, ignored);
  if (!is_there && fs::path(path).has_extension())
    throw ConfigError(path + ": there is no such file or folder");
  if (!has_manifest && is_there) {
    if (auto imported = open_imported(path, key)) {
      path_ = imported->path;
      folder_ = fs::path(path_).parent_path().string();
      if (folder_.empty()) folder_ = ".";
      is_imported_ = true;
      manifest_ = std::move(imported->manifest);
      files_ = std::move(imported->files);
      return;
    }
  }
  if (has_manifest && !key.empty())
    throw ConfigError(path_ + ": expected a file of torch.save, for a key was given: " + key);
  manifest_ = Manifest::read(path);
}

bool StoredCheckpoint::is_replaced() const {
  if (is_imported_) return false;
  const auto now = manifest_in(folder_);
  return now && now->files != manifest_.files;
}

std::vector<std::string> StoredCheckpoint::parts() const {
  std::vector<std::string> names;
  if (manifest_.version == 1) {
    for (const auto& [part, file] : manifest_.files) names.push_back(part);
  } else {
    for (const auto& [part, tensors] : manifest_.parts) names.push_back(part);
  }
  return names;
}

const std::map<std::string, StoredTensor>& StoredCheckpoint::part(const std::string& name) {
  if (manifest_.version == 1 && manifest_.files.contains(name) && !manifest_.parts.contains(name)) {
    auto& tensors = manifest_.parts[name];
    for (const TensorView& stored : file(name).tensors()) {
      auto& ranges = tensors.try_emplace(stored.name, StoredTensor{stored.dtype, stored.shape, {}})
                         .first->second.ranges[name];
      append(ranges, {0, num_elements(stored.shape).value()});
    }
  }
  const auto found = manifest_.parts.find(name);
  if (found == manifest_.parts.end()) {
    throw ConfigError(path_ + ": the checkpoint has no " + name +
                      ": expected one of a training run");
  }
  return found->second;
}

std::vector<std::span<const std::byte>> StoredCheckpoint::elements(const std::string& part_name,
                                                                   const std::string& name,
                                                                   ElementRange range) {
  const StoredTensor& tensor = part(part_name).at(name);
  const auto item = static_cast<int64_t>(item_size(tensor.dtype));
  std::vector<std::pair<int64_t, std::span<const std::byte>>> found;  // by first element
  for (const auto& [key, ranges] : tensor.ranges) {
    int64_t offset = 0;  // of the range in the file, in elements
    for (const ElementRange& held : ranges) {
      const int64_t begin = std::max(range.begin, held.begin);
      const int64_t end = std::min(range.end, held.end);
      if (begin < end) {
        found.emplace_back(begin, file(key).at(name).bytes.subspan(
                                      static_cast<size_t>((offset + begin - held.begin) * item),
                                      static_cast<size_t>((end - begin) * item)));
      }
      offset += held.end - held.begin;
    }
  }
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::span<const std::byte>> spans;
  for (const auto& [begin, bytes] : found) spans.push_back(bytes);
  return spans;
}

std::string StoredCheckpoint::path_of(const std::string& key) const {
  return folder_ + "/" + manifest_.files.at(key).name;
}

const TensorFile& StoredCheckpoint::file(const std::string& key) {
  const auto open = files_.find(key);
  if (open != files_.end()) return *open->second;
  const StoredFile& expected = manifest_.files.at(key);
  const std::string path = path_of(key);
  std::error_code error;
  if (!fs::exists(path, error)) {
    throw ConfigError(path + (is_replaced() ? ": is gone, for a later save took its place meanwhile"
                                            : ": is missing, but manifest.json names it"));
  }
  const auto size = fs::file_size(path, error);
  if (error) throw ConfigError(path + ": expected a file: " + error.message());  // A device, say.
  if (expected.bytes && size != *expected.bytes) {
    throw ConfigError(path + ": expected " + std::to_string(*expected.bytes) +
                      " bytes by manifest.json, found " + std::to_string(size));
  }
  if (sha256_of_file(path) != expected.sha256) {
    std::string found;
    try {
      const SafetensorsFile other(path);
      const auto& metadata = other.metadata();
      if (metadata.contains("share") && metadata.contains("update"))
        found = ": it says it is " + metadata.at("share") + " of update " + metadata.at("update");
    } catch (const ConfigError&) {
      found = ": " + std::string("no valid safetensors file");
    }
    throw ConfigError(path +
                      ": its SHA-256 is not the one in manifest.json: the file was changed, "
                      "or is another save's" +
                      found);
  }
  auto opened = std::make_unique<const SafetensorsFile>(path);
  if (manifest_.version > 1) check_tensors(key, *opened);
  return *files_.emplace(key, std::move(opened)).first->second;
}

// The manifest and the file's header must say the same.
void StoredCheckpoint::check_tensors(const std::string& key, const SafetensorsFile& file) const {
  size_t num_expected = 0;
  for (const auto& [part, tensors] : manifest_.parts) {
    for (const auto& [name, tensor] : tensors) {
      const auto held = tensor.ranges.find(key);
      if (held == tensor.ranges.end()) continue;
      ++num_expected;
      const TensorView* stored = file.find(name);
      if (stored == nullptr || stored->dtype != tensor.dtype ||
          stored->shape != shape_in_file(tensor, held->second)) {
        throw ConfigError(path_of(key) + ": does not hold " + name + " as manifest.json says");
      }
    }
  }
  if (num_expected != file.tensors().size()) {
    throw ConfigError(path_of(key) + ": holds " + std::to_string(file.tensors().size()) +
                      " tensors, manifest.json names " + std::to_string(num_expected));
  }
}

// `parts`, whole, as the checkpoint of `folder`.
static void write_whole(StoredCheckpoint& checkpoint, const std::vector<std::string>& parts,
                        const std::string& folder) {
  const Manifest& from = checkpoint.manifest();
  Manifest manifest{.update = from.update, .metadata = from.metadata};
  // Of a checkpoint with a missing or damaged file nothing is written.
  for (const std::string& part : parts)
    for (const auto& [name, stored] : checkpoint.part(part))
      for (const auto& [key, ranges] : stored.ranges) checkpoint.file(key);
  for (const std::string& part : parts) {
    std::vector<TensorPieces> content;
    auto& tensors = manifest.parts[part];
    for (const auto& [name, stored] : checkpoint.part(part)) {
      const ElementRange all{0, num_elements(stored.shape).value()};
      StoredTensor& tensor = tensors[name] = {stored.dtype, stored.shape, {}};
      append(tensor.ranges[part], all);
      content.push_back({name, stored.dtype, stored.shape, checkpoint.elements(part, name, all)});
    }
    const WrittenFile written = write_file(folder, content, {{"format", "pt"}},
                                           Names(part, {.update = from.update.value_or(0)}).stem,
                                           /*plain=*/true);
    manifest.files[part] = {written.name, written.sha256, written.bytes};
  }
  commit_manifest(folder, manifest);
}

// "update 7: optimizer, weights" of the folder's checkpoint.
static std::string describe_checkpoint(const std::string& folder) {
  if (!manifest_in(folder)) return "a damaged one";
  const StoredCheckpoint checkpoint(folder);
  const auto update = checkpoint.manifest().update;
  std::string text = update ? "update " + std::to_string(*update) + ": " : "";
  const char* separator = "";
  for (const std::string& part : checkpoint.parts()) {
    text += separator + part;
    separator = ", ";
  }
  return text;
}

void consolidate_checkpoint(StoredCheckpoint& checkpoint, const std::vector<std::string>& parts,
                            const std::string& folder, CheckpointThere there) {
  std::error_code error;
  if (fs::equivalent(folder, checkpoint.folder(), error))
    throw ConfigError(folder + ": expected another folder than the checkpoint's own");
  // Other files of the folder are removed, so they must not be the user's own.
  if (fs::exists(folder, error) && !fs::is_empty(folder, error) &&
      !fs::exists(folder + "/manifest.json", error))
    throw ConfigError(folder + ": expected no folder yet, an empty one, or that of a checkpoint");
  if (there == CheckpointThere::kStays && fs::exists(folder + "/manifest.json", error))
    throw ConfigError(folder + ": holds a checkpoint, which would be lost (" +
                      describe_checkpoint(folder) + "): name another folder, or pass --overwrite");
  write_whole(checkpoint, parts, folder);
}

void make_checkpoint_whole(const std::string& folder) {
  StoredCheckpoint checkpoint(folder);
  const auto& files = checkpoint.manifest().files;
  const std::vector<std::string> parts = checkpoint.parts();
  const bool is_whole = std::ranges::all_of(
      files, [&](const auto& file) { return std::ranges::count(parts, file.first) > 0; });
  if (!is_whole) write_whole(checkpoint, parts, folder);
}

}  // namespace cohort
