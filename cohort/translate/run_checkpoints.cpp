// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/run_checkpoints.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <exception>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <torch/types.h>
#include <utility>

#include "cohort/base/checksum.h"
#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/stored_checkpoint.h"
#include "cohort/base/system_error.h"
#include "cohort/translate/run_folder.h"
#include "cohort/translate/run_on_ranks.h"

namespace cohort::translate {
namespace {

namespace fs = std::filesystem;

// Reading some gigabytes and their checksums.
constexpr std::chrono::minutes kLoadLimit{30};

constexpr std::array kMadeByARun{"last",          "best",        "checkpoints",    "servers",
                                 "history.jsonl", "tensorboard", "result-dev.txt", "report.html"};

// Of the job, in all of its rounds. torchrun's may be the same for all jobs ("none").
std::string run_id() {
  if (const auto job = env_string("COHORT_JOB_ID")) return *job;
  return env_string("TORCHELASTIC_RUN_ID").value_or("");
}

// Reads last/, by which the run resumes.
template <class Read>
auto read_to_resume(const Read& read) {
  try {
    return read();
  } catch (const ConfigError& error) {
    throw ConfigError(one_line(error) +
                      ": expected a whole last/, or another --model-dir, or --overwrite");
  }
}

// Whether the launcher has started the job's processes before.
bool is_started_again() {
  // A round that another node's coming or going began is no restart.
  return env_int("TORCHELASTIC_RESTART_COUNT", 0).value_or(0) > 0 ||
         env_int("COHORT_ROUND").value_or(1) > 1;
}

// Whether this process is the launcher's second attempt at the run that wrote this checkpoint.
bool is_restart_of(const fs::path& last) {
  if (!is_started_again()) return false;
  const train::Metadata metadata = train::read_manifest(last);
  const auto found = metadata.find("run_id");
  return found != metadata.end() && found->second == run_id();
}

// Whether a run has left its record there and nothing else: it ended before its first checkpoint.
bool has_only_begun(const fs::path& folder) {
  if (fs::exists(folder / "best") || fs::exists(folder / "checkpoints")) return false;
  std::ifstream history(folder / "history.jsonl");
  bool has_begun = false;
  for (std::string line; std::getline(history, line);) {
    const auto found = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (found.is_discarded() && history.eof()) break;  // Half a line, of a run that was killed.
    if (!found.is_object()) return false;
    const auto has = [&](const char* key, const nlohmann::json& value) {
      return found.contains(key) && found[key] == value;
    };
    if (!has("update", 0) || !(has("type", "start") || has("type", "end"))) return false;
    has_begun = true;
  }
  return has_begun;
}

// Nothing if there is no checkpoint. Reads all of it: one that is damaged must not pass for the
// best, nor for none, which the next save would replace.
std::optional<train::Metadata> metadata_in(const std::string& folder) {
  if (!fs::exists(fs::path(folder) / "manifest.json")) return std::nullopt;
  try {
    StoredCheckpoint checkpoint(folder);
    for (const auto& [key, file] : checkpoint.manifest().files) checkpoint.file(key);
    return checkpoint.manifest().metadata;
  } catch (const ConfigError& error) {
    throw ConfigError(one_line(error) + "; once " + folder +
                      " is moved away, the run resumes without its best weights so far");
  }
}

// `metadata` is that of `folder`.
int64_t update_of(const train::Metadata& metadata, const std::string& folder) {
  const auto found = metadata.find("update");
  const std::string text = found == metadata.end() ? "none" : found->second;
  int64_t update = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), update);
  if (error != std::errc() || end != text.data() + text.size() || update < 0)
    throw ConfigError(folder +
                      "/manifest.json: expected the metadata entry update of a training run's "
                      "checkpoint, a number, got " +
                      text);
  return update;
}

}  // namespace

Start find_start(const TrainingOptions& options) {
  const fs::path folder = options.model_dir;
  if (fs::exists(folder / "last" / "manifest.json") &&
      (!options.overwrite || is_restart_of(folder / "last"))) {
    return Start::kResume;
  }
  if (options.overwrite || has_only_begun(folder)) return Start::kFresh;
  if (fs::exists(folder / "history.jsonl") || fs::exists(folder / "best")) {
    throw ConfigError(
        "--model-dir " + options.model_dir +
        " has history.jsonl or best/ but no last/, from which a run resumes (a run that ended "
        "before its first checkpoint, or what nmt quantize or nmt average wrote): name another "
        "folder, or pass --overwrite");
  }
  for (const char* made : kMadeByARun) {
    const auto kind = fs::symlink_status(folder / made);
    if (!fs::exists(kind) || (fs::is_directory(kind) && fs::is_empty(folder / made))) continue;
    throw ConfigError("--model-dir " + options.model_dir + " holds " + made +
                      ", which a run would replace: name another folder, or pass --overwrite");
  }
  return Start::kFresh;
}

std::string stored_precision(const std::string& model_dir) {
  const auto metadata = read_to_resume([&] { return train::read_manifest(model_dir + "/last"); });
  const auto found = metadata.find("precision");
  return found == metadata.end() ? "" : found->second;
}

void remove_earlier_run(const std::string& model_dir) {
  for (const char* made : kMadeByARun) fs::remove_all(fs::path(model_dir) / made);
}

RunCheckpoints::RunCheckpoints(const TrainingOptions& options, std::string text_sha256,
                               std::string valid_sha256, const Log& log)
    : options_(options),
      log_(log),
      last_(options.model_dir + "/last"),
      best_(options.model_dir + "/best"),
      text_sha256_(std::move(text_sha256)),
      valid_sha256_(std::move(valid_sha256)) {}

// Computed when it is first asked for: a new run's vocabularies come into the folder late.
const train::Metadata& RunCheckpoints::data_metadata() const {
  if (!data_metadata_) {
    data_metadata_ = vocabulary_metadata(options_.model_dir);
    data_metadata_->emplace("train_sets_sha256", text_sha256_);
  }
  return *data_metadata_;
}

train::Metadata RunCheckpoints::model_metadata(int64_t update) const {
  train::Metadata metadata = metadata_of(options_.model);
  metadata["precision"] = nmt::to_string(*options_.precision);
  metadata["update"] = std::to_string(update);
  for (const auto& [name, value] : data_metadata()) {
    if (name.starts_with("vocabulary.")) metadata[name] = value;
  }
  return metadata;
}

void RunCheckpoints::check_same_run(const train::Metadata& found) const {
  train::Metadata expected = metadata_of(options_.model);
  expected.insert(data_metadata().begin(), data_metadata().end());
  expected["valid_metric"] = to_string(options_.valid_metrics.front());
  // Scores of two texts are no one scale. Versions up to 0.3 do not tell the text.
  if (found.contains("valid_sets_sha256")) expected["valid_sets_sha256"] = valid_sha256_;
  // BLEU of two tokenizers is no one scale.
  if (options_.valid_metrics.front() == ValidMetric::kBleu) {
    const std::string tokenizer = to_string(options_.evaluation.bleu.tokenizer);
    if (found.contains("valid_tokenize")) {
      expected["valid_tokenize"] = tokenizer;
    } else {
      log_.warn(
          "the run does not say the --tokenize of its best BLEU: versions up to 0.3 had zh by "
          "default",
          {{"tokenize", tokenizer}});
    }
  }
  for (const auto& [name, value] : expected) {
    const auto there = found.find(name);
    if (there == found.end() || there->second != value) {
      const bool text = name == "train_sets_sha256" || name == "valid_sets_sha256";
      throw ConfigError("--model-dir " + options_.model_dir + " holds a run with " +
                        (text ? "another text of --" + name.substr(0, 5) + "-sets: " : "") + name +
                        " " + (there == found.end() ? "missing" : there->second) + ", now it is " +
                        value + ": name another folder, or pass --overwrite");
    }
  }
}

// A best/ of a later update is of what the run does again.
void RunCheckpoints::take_best_that_is_there(RunState& state) const {
  const auto there = metadata_in(best_);
  const int64_t update = there ? update_of(*there, best_) : -1;
  if (update > state.updates)
    log_.warn("best/ is of a later update than last/: the run replaces it once it is better again",
              {{"best_update", update}, {"last_update", state.updates}});
  if (!state.best || update >= state.best_update) return;
  log_.warn("best/ does not hold the best weights: their save failed",
            {{"best_update", state.best_update}, {"there", update}});
  state.best = there ? read_scores("valid_", *there) : std::nullopt;
  state.best_update = std::max<int64_t>(update, 0);
  state.early_stopping.best.reset();
  if (!state.best) return;
  const double value = value_of(*state.best, options_.valid_metrics.front());
  if (!std::isnan(value)) state.early_stopping.best = value;
}

BestScores RunCheckpoints::read_best(const comm::ProcessGroup& group) const {
  train::Metadata metadata;
  run_on_ranks(group, "best weights", group.rank() == 0, kLoadLimit, [&] {
    if (fs::exists(fs::path(best_) / "manifest.json")) metadata = train::read_manifest(best_);
  });
  metadata = nlohmann::json::parse(group.broadcast_object(nlohmann::json(metadata).dump()))
                 .get<train::Metadata>();
  if (metadata.empty()) return {};
  return {.update = update_of(metadata, best_), .scores = read_scores("valid_", metadata)};
}

RunState RunCheckpoints::read_last(const comm::ProcessGroup& group) const {
  train::Metadata metadata;
  run_on_ranks(group, "state of the run", group.rank() == 0, kLoadLimit, [&] {
    metadata = read_to_resume([&] { return train::read_manifest(last_); });
    check_same_run(metadata);
    RunState state = read_state(metadata);
    take_best_that_is_there(state);
    metadata.clear();
    write_metadata(state, metadata);
  });
  const std::string told = group.broadcast_object(nlohmann::json(metadata).dump());
  return read_state(nlohmann::json::parse(told).get<train::Metadata>());
}

bool RunCheckpoints::last_has(const std::string& part, const comm::ProcessGroup& group) const {
  std::string answer;
  run_on_ranks(group, "parts of the run", group.rank() == 0, kLoadLimit, [&] {
    const auto parts = read_to_resume([&] { return StoredCheckpoint(last_).parts(); });
    if (std::ranges::find(parts, part) != parts.end()) answer = part;
  });
  return group.broadcast_object(answer) == part;
}

void RunCheckpoints::load_last(const train::ShardedParts& parts, bool sharded,
                               const comm::ProcessGroup& group) const {
  if (sharded) {
    read_to_resume([&] { train::load_shards(last_, parts, group); });
    return;
  }
  comm::ProcessGroup alone{comm::RankInfo{}};
  run_on_ranks(group, "last checkpoint", group.rank() == 0, kLoadLimit,
               [&] { read_to_resume([&] { train::load_shards(last_, parts, alone); }); });
  for (const auto& [part, shards] : parts) {
    for (const train::TensorShard& shard : shards) {
      at::Tensor shared = shard.tensor.detach();
      group.broadcast(shared, 0);
    }
  }
}

void RunCheckpoints::save_with(const comm::ProcessGroup& writers) {
  if (!writers) return;
  writer_.emplace(writers);
  is_first_writer_ = writers.rank() == 0;
}

void RunCheckpoints::save_last(const RunState& state, const train::ShardedParts& parts) {
  if (!saves()) return;
  servers_newest_ = state.servers;
  write_best();
  train::Metadata metadata = model_metadata(state.updates);
  metadata.insert(data_metadata().begin(), data_metadata().end());
  metadata["run_id"] = run_id();
  metadata["valid_metric"] = to_string(options_.valid_metrics.front());
  metadata["valid_tokenize"] = to_string(options_.evaluation.bleu.tokenizer);
  metadata["valid_sets_sha256"] = valid_sha256_;
  write_metadata(state, metadata);
  begin(last_, parts, state.updates, metadata);
  servers_begun_ = state.servers;
}

void RunCheckpoints::save_best(const RunState& state,
                               const std::vector<train::TensorShard>& weights) {
  if (!saves()) return;
  finish_save();
  train::Metadata metadata = model_metadata(state.best_update);
  if (state.best) write_scores(*state.best, "valid_", metadata);
  unwritten_best_ = {.update = state.best_update, .metadata = std::move(metadata)};
  for (train::TensorShard shard : weights) {
    shard.tensor = shard.tensor.detach().to(at::kCPU, false, true);
    unwritten_best_->parts["weights"].push_back(std::move(shard));
  }
  begin_best();
}

void RunCheckpoints::save_kept(const RunState& state, const train::ShardedParts& parts) {
  if (!saves()) return;
  write_best();
  const auto average = parts.find("average");
  begin(kept_folder(options_.model_dir, state.updates),
        {{"weights", average == parts.end() ? parts.at("weights") : average->second}},
        state.updates, model_metadata(state.updates));
}

void RunCheckpoints::wait_written() {
  if (writer_) writer_->wait_written();
}

void RunCheckpoints::finish() {
  const std::exception_ptr last_failed = commit();
  write_best();
  const std::exception_ptr best_failed = commit();
  wait_written();  // Files of an earlier best/ still go, and may have the names of plain ones.
  // A finished model is one plain file, whichever strategy wrote it.
  if (is_first_writer_ && fs::exists(best_ + "/manifest.json")) make_checkpoint_whole(best_);
  for (const auto& failed : {best_failed, last_failed})
    if (failed) std::rethrow_exception(failed);
}

void RunCheckpoints::begin(const std::string& folder, const train::ShardedParts& parts,
                           int64_t update, const train::Metadata& metadata) {
  finish_save();
  begun_ = folder;
  writer_->begin(folder, parts, update, metadata);
}

// Once more, if it could not be written.
void RunCheckpoints::write_best() {
  finish_save();
  if (!unwritten_best_) return;
  log_.info("best/ is written once more", {{"update", unwritten_best_->update}});
  begin_best();
}

// The weights are a copy already, which lasts until best/ is known to hold them.
void RunCheckpoints::begin_best() {
  begun_ = best_;
  writer_->begin_without_copy(best_, unwritten_best_->parts, unwritten_best_->update,
                              unwritten_best_->metadata);
}

// What went wrong, the same on all writers.
std::exception_ptr RunCheckpoints::commit() {
  if (!pending()) return nullptr;
  try {
    writer_->commit();
  } catch (const PeerError&) {
    throw;
  } catch (const std::exception&) {
    return std::current_exception();
  }
  if (begun_ == best_) unwritten_best_.reset();
  if (begun_ == last_) prune_servers();
  if (begun_ != best_ && begun_ != last_ && options_.keep_interval_updates > 0) prune();
  return nullptr;
}

void RunCheckpoints::finish_save() {
  const std::exception_ptr failed = commit();
  if (!failed) return;
  try {
    std::rethrow_exception(failed);
  } catch (const std::exception& error) {
    log_.error("a checkpoint was not written", {{"why", one_line(error)}});
  }
}

void RunCheckpoints::finish_first_save() {
  if (const std::exception_ptr failed = commit()) std::rethrow_exception(failed);
}

// last/ names the servers' checkpoint that belongs to it. The next one may be there already; the
// others are of earlier saves.
void RunCheckpoints::prune_servers() const {
  if (!is_first_writer_ || servers_begun_.empty()) return;
  const fs::path kept = servers_begun_;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(kept.parent_path(), error)) {
    std::error_code ignored;
    if (entry.path() != kept && entry.path() != servers_newest_)
      fs::remove_all(entry.path(), ignored);
  }
}

// kept_updates lists whole checkpoints, so what could not be written pushes nothing out.
void RunCheckpoints::prune() {
  if (!is_first_writer_) return;
  auto kept = kept_updates(options_.model_dir);
  const auto most = static_cast<size_t>(options_.keep_interval_updates);
  if (kept.size() <= most) return;
  kept.resize(kept.size() - most);
  remove_kept(kept);
}

void RunCheckpoints::remove_kept_after(int64_t update) {
  if (!is_first_writer_) return;
  auto kept = kept_updates(options_.model_dir);
  std::erase_if(kept, [&](int64_t each) { return each <= update; });
  if (kept.empty()) return;
  log_.info("checkpoints of later updates are removed: the run makes these updates again",
            {{"resumed_at", update}, {"removed", std::ssize(kept)}});
  remove_kept(kept);
}

void RunCheckpoints::remove_kept(const std::vector<int64_t>& updates) {
  writer_->run_in_background([this, updates] {
    for (const int64_t update : updates) {
      const fs::path folder = kept_folder(options_.model_dir, update);
      std::error_code error;
      fs::remove(folder / "manifest.json", error);  // First: half a checkpoint is none.
      if (!error) fs::remove_all(folder, error);
      if (error)
        log_.warn("an earlier checkpoint cannot be removed; training continues",
                  {{"folder", folder.string()}, {"why", error.message()}});
    }
  });
}

}  // namespace cohort::translate
