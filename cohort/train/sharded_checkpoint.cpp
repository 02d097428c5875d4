// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/sharded_checkpoint.h"

#include <algorithm>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/stored_checkpoint.h"
#include "cohort/train/stored_tensor.h"

namespace cohort::train {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// What went wrong, to be told to other ranks: {"error": text, "config": whether the user's fault}.
Json to_json(const std::exception& error) {
  const bool config = dynamic_cast<const c10::ValueError*>(&error) != nullptr;
  return {{"error", one_line(error)}, {"config", config}};
}

// A path in an error need not be UTF-8.
std::string text_of(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

template <class Call>
Json errors_of(const Call& call) {
  try {
    call();
    return Json::object();
  } catch (const std::exception& error) {
    return to_json(error);
  }
}

void throw_if_error(const Json& json) {
  if (!json.contains("error")) return;
  const auto text = json["error"].get<std::string>();
  if (json["config"].get<bool>()) throw ConfigError(text);
  throw_without_stack(text);
}

// Throws the first rank's error that there is.
void throw_first_error(const std::vector<Json>& reports) {
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    Json report = reports[rank];
    if (!report.contains("error")) continue;
    report["error"] = "rank " + std::to_string(rank) + ": " + report["error"].get<std::string>();
    throw_if_error(report);
  }
}

// Rank 0 judges all ranks' reports; what it returns or throws, every rank returns or throws.
template <class Judge>
Json judge(const comm::ProcessGroup& group, const std::string& report, const Judge& on_root) {
  const std::vector<std::string> texts = group.gather_object(report);
  Json outcome = Json::object();
  if (group.rank() == 0) {
    Json result;
    outcome = errors_of([&] {
      std::vector<Json> reports;
      for (const std::string& text : texts) reports.push_back(Json::parse(text));
      throw_first_error(reports);
      result = on_root(reports);
    });
    if (outcome.empty()) outcome = {{"result", result}};
  }
  outcome = Json::parse(group.broadcast_object(text_of(outcome)));
  throw_if_error(outcome);
  return outcome["result"];
}

// A file may take a moment to be seen on another computer.
void wait_until_seen(const std::string& path, uint64_t bytes,
                     std::chrono::steady_clock::time_point deadline) {
  std::error_code error;
  while (true) {
    const auto size = fs::file_size(path, error);
    if (!error && size == bytes) return;
    if (std::chrono::steady_clock::now() >= deadline) {
      throw ConfigError(path + ": rank 0 does not see this file of " + std::to_string(bytes) +
                        " bytes that another rank wrote: expected a folder that all ranks share" +
                        (error ? "" : ", found " + std::to_string(size) + " bytes"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

// For what this thread has started: the one that writes reads on a stream of its own.
void wait_for_devices(const ShardedParts& parts) {
  c10::Device last = c10::kCPU;
  for (const auto& [part, shards] : parts) {
    for (const TensorShard& shard : shards) {
      const c10::Device device = shard.tensor.device();
      if (device.is_cpu() || device == last) continue;
      c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
      last = device;
    }
  }
}

// Names, types and shapes alone.
Manifest without_elements(const ShardedParts& parts) {
  Manifest manifest;
  for (const auto& [part, shards] : parts) {
    auto& tensors = manifest.parts[part];
    for (const TensorShard& shard : shards)
      tensors.try_emplace(shard.name, StoredTensor{dtype_of(shard.tensor), shard.shape, {}});
  }
  return manifest;
}

bool can_fill(const StoredTensor& saved, const StoredTensor& wanted) {
  return saved.shape == wanted.shape &&
         (saved.dtype == wanted.dtype || (is_floating(saved.dtype) && is_floating(wanted.dtype)));
}

std::string form_of(const StoredTensor& tensor) {
  return std::string(to_string(tensor.dtype)) + " " + to_string(tensor.shape);
}

void check_loadable(const Manifest& saved, const Manifest& wanted, const std::string& folder,
                    size_t rank) {
  for (const auto& [part, tensors] : wanted.parts) {
    const auto there = saved.parts.find(part);
    if (there == saved.parts.end()) continue;
    for (const auto& [name, tensor] : tensors) {
      const auto found = there->second.find(name);
      if (found == there->second.end() || can_fill(found->second, tensor)) continue;
      const auto& ranges = found->second.ranges;
      throw ConfigError(folder + ": ranks do not agree on " + name + " of " + part + ": " +
                        form_of(found->second) +
                        (ranges.empty() ? " as saved" : " in " + ranges.begin()->first) + ", " +
                        form_of(tensor) + " on rank " + std::to_string(rank) +
                        ", which could not load it: expected one shape and type on all ranks, or a "
                        "tensor that is not registered in the module, saved apart");
    }
  }
}

// The last save that has begun into each folder: the commit of one removes another's files. By
// rank, for several may be threads of one process.
class LatestSaves {
 public:
  int64_t begin(const std::string& folder, int rank) {
    const std::lock_guard lock(mutex_);
    return latest_[key(folder, rank)] = ++count_;
  }
  // Whether that is the last one. It is forgotten.
  bool end(const std::string& folder, int rank, int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = latest_.find(key(folder, rank));
    if (found == latest_.end() || found->second != number) return false;
    latest_.erase(found);
    return true;
  }

 private:
  static std::pair<std::string, int> key(const std::string& folder, int rank) {
    // By its name alone: the folder may be made between begin() and commit().
    return {(fs::current_path() / folder / "").lexically_normal().string(), rank};
  }

  std::mutex mutex_;
  std::map<std::pair<std::string, int>, int64_t> latest_;
  int64_t count_ = 0;
};

LatestSaves& latest_saves() {
  static LatestSaves saves;
  return saves;
}

}  // namespace

std::vector<TensorShard> shards_of(const std::vector<TensorShard>& parameters) {
  std::vector<TensorShard> shards = parameters;
  for (TensorShard& shard : shards) shard.tensor = shard.tensor.detach();
  return shards;
}

void ShardedCheckpointWriter::begin(const std::string& folder, const ShardedParts& parts,
                                    int64_t update, const Metadata& metadata) {
  check_idle();
  start(folder, snapshot_.take(parts), update, metadata);
}

void ShardedCheckpointWriter::begin_without_copy(const std::string& folder,
                                                 const ShardedParts& parts, int64_t update,
                                                 const Metadata& metadata) {
  check_idle();
  wait_for_devices(parts);
  start(folder, parts, update, metadata);
}

void ShardedCheckpointWriter::require_loadable(const std::function<ShardedParts()>& loaded) {
  TORCH_CHECK_VALUE(pending_, "checkpoint: expected begin before require_loadable");
  try {
    wanted_ = without_elements(loaded()).to_json();
  } catch (const std::exception&) {
    wanted_error_ = std::current_exception();
  }
}

void ShardedCheckpointWriter::check_idle() const {
  TORCH_CHECK_VALUE(!pending_, "checkpoint: expected commit of the save before, into ", folder_);
}

void ShardedCheckpointWriter::start(const std::string& folder, const ShardedParts& parts,
                                    int64_t update, const Metadata& metadata) {
  number_ = latest_saves().begin(folder, group_.rank());
  folder_ = folder;
  metadata_ = metadata;
  share_.reset();
  wanted_.clear();
  wanted_error_ = nullptr;
  pending_ = true;
  const ShareInfo info{update, group_.rank(), group_.size()};
  task_.start([this, folder, info, parts] {
    const auto freed = c10::make_scope_exit([this] { snapshot_.free_pages(); });
    share_ = write_parts(folder, parts, info);
  });
}

void ShardedCheckpointWriter::commit(CallSite site) {
  const CallSiteScope scope(site);
  const bool was_pending = std::exchange(pending_, false);
  const bool is_latest = was_pending && latest_saves().end(folder_, group_.rank(), number_);
  Json report;
  // Of a save that is lost, too: the next one takes its memory, and must not meet its error.
  const Json written = errors_of([&] { task_.wait(); });
  const Json error = errors_of([&] {
    TORCH_CHECK_VALUE(was_pending, "checkpoint: expected begin before commit");
    TORCH_CHECK_VALUE(is_latest, "checkpoint: another save into ", folder_,
                      " has begun: expected wait() for this one before; it is lost");
    throw_if_error(written);
    if (wanted_error_) std::rethrow_exception(wanted_error_);
    report = {{"share", share_.value().to_json()}, {"folder", folder_}, {"wanted", wanted_}};
  });
  std::vector<std::string> outdated;
  try {
    outdated = commit_shares(text_of(error.empty() ? report : error));
  } catch (const PeerError&) {
    throw;  // Whether the others have committed is not known.
  } catch (const std::exception&) {
    if (is_latest && share_) discard_share(folder_, *share_);
    throw;
  }
  if (outdated.empty()) return;
  run_in_background([outdated] {
    std::error_code ignored;  // What stays, the next save finds.
    for (const std::string& path : outdated) fs::remove(path, ignored);
  });
}

// Returns what rank 0 has to remove.
std::vector<std::string> ShardedCheckpointWriter::commit_shares(const std::string& report) {
  std::vector<std::string> outdated;
  judge(group_, report, [&](const std::vector<Json>& reports) {
    Manifest manifest;
    for (size_t rank = 0; rank < reports.size(); ++rank) {
      const Manifest share = Manifest::parse(reports[rank]["share"].get<std::string>(),
                                             folder_ + ": rank " + std::to_string(rank));
      if (rank == 0) manifest.update = share.update;
      const Json& folder = reports[rank]["folder"];
      TORCH_CHECK_VALUE(folder == reports[0]["folder"] && share.update == manifest.update,
                        "checkpoint: expected one folder and update on all ranks: rank 0 saves "
                        "update ",
                        *manifest.update, " to ", folder_, ", rank ", rank, " update ",
                        *share.update, " to ", folder.get<std::string>());
      manifest.add(share, folder_);
    }
    for (size_t rank = 0; rank < reports.size(); ++rank) {
      const auto wanted = reports[rank]["wanted"].get<std::string>();
      if (wanted.empty()) continue;
      check_loadable(manifest, Manifest::parse(wanted, folder_ + ": rank " + std::to_string(rank)),
                     folder_, rank);
    }
    manifest.metadata = metadata_;
    const auto deadline = std::chrono::steady_clock::now() + visible_timeout_;
    for (const auto& [key, file] : manifest.files)
      wait_until_seen(folder_ + "/" + file.name, file.bytes.value(), deadline);
    outdated = commit_manifest_keeping(folder_, manifest);
    return Json();
  });
  return outdated;
}

IncompatibleKeys load_shards(const std::string& path, const ShardedParts& parts,
                             const comm::ProcessGroup& group, const LoadOptions& options,
                             CallSite site) {
  return load_shards(
      path, [&](StoredCheckpoint&) { return parts; }, group, options, site);
}

IncompatibleKeys load_shards(const std::string& path, const MakeParts& parts,
                             const comm::ProcessGroup& group, const LoadOptions& options,
                             CallSite site) {
  const CallSiteScope scope(site);
  using Keys = CheckpointLoad::Keys;
  std::optional<CheckpointLoad> load;
  Json report = errors_of([&] { load.emplace(path, parts, options); });
  if (load) {
    report = {{"missing", load->missing()},
              {"unexpected", load->unexpected()},
              {"identity", load->identity()}};
  }
  const Json keys = judge(group, text_of(report), [&](const std::vector<Json>& reports) {
    Keys missing;
    auto unexpected = reports.front()["unexpected"].get<Keys>();
    for (size_t rank = 0; rank < reports.size(); ++rank) {
      if (reports[rank]["identity"] != reports[0]["identity"])
        throw ConfigError(path + ": ranks 0 and " + std::to_string(rank) +
                          " read different saves: expected that nobody saves there meanwhile, and "
                          "a folder that all ranks share");
      missing.merge(reports[rank]["missing"].get<Keys>());
      const auto here = reports[rank]["unexpected"].get<Keys>();
      std::erase_if(unexpected, [&](const auto& key) { return !here.contains(key); });
    }
    if (options.strict) check_strict(missing, unexpected);
    return Json{{"missing", missing}, {"unexpected", unexpected}};
  });
  load->fill();
  return incompatible_keys(keys["missing"].get<Keys>(), keys["unexpected"].get<Keys>());
}

}  // namespace cohort::train
