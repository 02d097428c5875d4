// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/saved_state.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cohort/base/atomic_file.h"
#include "cohort/base/error.h"

namespace cohort::ps {

namespace {

namespace fs = std::filesystem;

// "server-0-of-2".
std::string part_name(int server, int servers) {
  return "server-" + std::to_string(server) + "-of-" + std::to_string(servers);
}

std::string save_name(uint64_t nonce) {
  std::array<char, 32> name{};
  std::snprintf(name.data(), name.size(), "save-%016" PRIx64, nonce);
  return name.data();
}

bool is_save_name(const std::string& name) {
  uint64_t nonce = 0;
  return std::sscanf(name.c_str(), "save-%" SCNx64, &nonce) == 1 && name == save_name(nonce);
}

std::string name_path(const std::string& folder) {
  return (fs::path(folder) / "checkpoint").string();
}

// The save that a checkpoint's folder names.
std::optional<std::string> named_save(const std::string& folder) {
  std::ifstream file(name_path(folder));
  std::string name;
  return std::getline(file, name) ? std::optional(name) : std::nullopt;
}

// The folders of a save's parts, in the order of servers.
std::vector<std::string> parts_of(const std::string& save) {
  int servers = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(save, error)) {
    const std::string name = entry.path().filename().string();
    int server = 0, of = 0;
    if (std::sscanf(name.c_str(), "server-%d-of-%d", &server, &of) == 2 &&
        name == part_name(server, of))
      servers = std::max(servers, of);
  }
  if (servers == 0) throw ConfigError(save + ": expected parts of a checkpoint, found none");
  std::vector<std::string> folders;
  for (int server = 0; server < servers; ++server) {
    folders.push_back((fs::path(save) / part_name(server, servers)).string());
    if (!fs::exists(folders.back()))
      throw ConfigError(save + ": the part of server " + std::to_string(server) +
                        " is missing: " + part_name(server, servers));
  }
  return folders;
}

// The step that a saved state of a sync job is after.
std::optional<uint64_t> sync_step_of(const std::string& folder) {
  std::optional<uint64_t> step;
  bool is_sync = false;
  const auto look = [&](const Record& record) {
    if (record.kind == RecordKind::kJob)
      is_sync = JobOptions::parse(text_of(record)).mode == Mode::kSync;
    if (record.kind == kProgress && is_sync) step = steps_of(record);
  };
  read_records(records_path(folder), look, 2);
  return step;
}

// Refuses a save whose parts are not all there, or not of one step.
void check_steps(const std::string& save) {
  const auto folders = parts_of(save);
  const auto first = sync_step_of(folders.front());
  for (const std::string& folder : folders) {
    const auto step = sync_step_of(folder);
    if (step != first)
      throw ConfigError(save + ": " + fs::path(folders.front()).filename().string() +
                        " is the state after step " + std::to_string(first.value_or(0)) + ", " +
                        fs::path(folder).filename().string() + " that after step " +
                        std::to_string(step.value_or(0)));
  }
}

}  // namespace

std::string records_path(const std::string& folder) {
  return (fs::path(folder) / "state.records").string();
}

std::string saved_table_path(const std::string& folder, size_t number) {
  return (fs::path(folder) / ("table." + std::to_string(number))).string();
}

std::string saved_spill_path(const std::string& folder, size_t number) {
  return (fs::path(folder) / ("cold." + std::to_string(number))).string();
}

std::string text_of(const Record& record) {
  return {reinterpret_cast<const char*>(record.payload.data()), record.payload.size()};
}

uint64_t steps_of(const Record& progress) {
  return nlohmann::json::parse(text_of(progress)).at("steps");
}

std::string part_folder(const std::string& folder, uint64_t nonce, int server, int servers) {
  return (fs::path(folder) / save_name(nonce) / part_name(server, servers)).string();
}

bool is_finished(const std::string& folder, uint64_t nonce) {
  return named_save(folder) == save_name(nonce);
}

uint64_t finished_save(const std::string& folder) {
  const auto name = named_save(folder);
  uint64_t nonce = 0;
  if (name && is_save_name(*name)) std::sscanf(name->c_str(), "save-%" SCNx64, &nonce);
  return nonce;
}

void finish_checkpoint(const std::string& folder, uint64_t nonce) {
  if (is_finished(folder, nonce)) return;
  const std::string name = save_name(nonce);
  check_steps((fs::path(folder) / name).string());
  write_atomically(name_path(folder), name + "\n");
  std::vector<fs::path> others;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string other = entry.path().filename().string();
    if (is_save_name(other) && other != name) others.push_back(entry.path());
  }
  for (const fs::path& other : others) {
    std::error_code error;
    fs::remove_all(other, error);
    if (error)
      throw ConfigError(other.string() +
                        ": the checkpoint is there, but the one before it cannot " +
                        "be removed: " + error.message());
  }
}

std::vector<std::string> saved_folders(const std::string& folder) {
  const auto name = named_save(folder);
  if (!name) throw ConfigError(folder + ": expected a checkpoint of servers, found none");
  if (!is_save_name(*name))
    throw ConfigError(name_path(folder) + ": expected the name of a save, save-<16 digits>");
  return parts_of((fs::path(folder) / *name).string());
}

JobOptions saved_job(const std::string& folder) {
  std::optional<JobOptions> job;
  read_records(records_path(folder), [&](const Record& record) {
    if (record.kind == RecordKind::kJob) job = JobOptions::parse(text_of(record));
  });
  if (!job) throw ConfigError(records_path(folder) + ": it has no job");
  return *job;
}

}  // namespace cohort::ps
