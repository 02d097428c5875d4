// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/job.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "cohort/base/error.h"
#include "cohort/ps/id_hash.h"
#include "cohort/ps/options_json.h"

namespace cohort::ps {

namespace {

void check(bool fine, const std::string& message) {
  if (!fine) throw ConfigError("job: " + message);
}

bool is_file_name(const std::string& name) {
  const auto is_plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  };
  return !name.empty() && name.size() <= 100 && name[0] != '.' &&
         std::all_of(name.begin(), name.end(), is_plain);
}

// "/trainers is 2, this trainer's 3" of two jobs' JSON; "" where they are equal. For lists of
// different lengths: the lengths.
std::string difference(const nlohmann::json& here, const nlohmann::json& there,
                       const std::string& place = "") {
  if (here == there) return "";
  const bool is_list = here.is_array();
  if (is_list && here.size() != there.size())
    return place + " are " + std::to_string(here.size()) + ", this trainer's " +
           std::to_string(there.size());
  if (!here.is_structured())
    return place + " is " + here.dump() + ", this trainer's " + there.dump();
  for (const auto& [name, value] : here.items()) {
    const auto& other = is_list ? there.at(std::stoul(name)) : there.at(name);
    std::string found = difference(value, other, place + "/" + name);
    if (!found.empty()) return found;
  }
  return "";
}

}  // namespace

std::string to_string(Mode mode) {
  return name_of(mode);
}

std::string to_string(Reduce reduce) {
  return name_of(reduce);
}

std::string JobOptions::to_json() const {
  return nlohmann::json(*this).dump();
}

JobOptions JobOptions::parse(const std::string& text) {
  auto job = parse_options<JobOptions>("job", text);
  validate(job);
  return job;
}

uint64_t JobOptions::fingerprint() const {
  uint64_t hash = 0;
  for (const char c : to_json()) hash = splitmix64_finalizer(hash ^ static_cast<unsigned char>(c));
  return hash;
}

std::string first_difference(const JobOptions& here, const JobOptions& there) {
  const nlohmann::json own = here, other = there;
  std::string found = difference(own.at("servers"), other.at("servers"), "/servers");
  if (found.empty()) found = difference(own, other);
  // A field that a program of another version does not have is at its default in both.
  return found.empty() ? "expected a program of this server's version" : found;
}

void validate(const JobOptions& options) {
  check(options.trainers >= 1, "expected at least 1 trainer");
  constexpr int kMostTrainers = 1 << 20;
  check(options.max_trainers <= kMostTrainers, "max_trainers: expected at most " +
                                                   std::to_string(kMostTrainers) + ", got " +
                                                   std::to_string(options.max_trainers));
  check(options.max_trainers >= options.trainers,
        "max_trainers: expected at least as many as trainers, " + std::to_string(options.trainers) +
            ", got " + std::to_string(options.max_trainers));
  check(options.servers >= 1, "expected at least 1 server");
  check(options.max_staleness >= -1, "max_staleness: expected -1 (no bound) or more");
  check(options.batch_size >= 0,
        "batch_size: expected 0 (not given) or more, got " + std::to_string(options.batch_size));
  validate(options.dense_rule);
  for (const BlockOptions& block : options.blocks) {
    const std::string name = "block of '" + block.parameter + "': ";
    check(block.begin >= 0 && block.begin < block.end, name + "it has no elements");
    check(block.server >= 0 && block.server < options.servers,
          name + "server " + std::to_string(block.server) + " is not one of " +
              std::to_string(options.servers));
  }
  std::set<std::string_view> names;
  for (const TableOptions& table : options.tables) {
    check(is_file_name(table.name),
          "table '" + table.name +
              "': name: expected letters, digits, '.', '_' and '-', not first a '.', 100 at most: "
              "files bear it");
    check(table.name != "dense", "table 'dense': name: it is that of the dense parameters' file");
    check(names.insert(table.name).second, "two tables are named '" + table.name + "'");
    check(table.width >= 1 && table.width <= 65536, "table '" + table.name +
                                                        "': width: expected 1 to 65536, got " +
                                                        std::to_string(table.width));
    check(table.at_cap != AtCap::kSpill || table.memory_cap_bytes > 0,
          "table '" + table.name + "': at_cap spill: expected a memory cap");
    validate(table);
  }
}

}  // namespace cohort::ps
