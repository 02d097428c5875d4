#include "cohort/ps/job.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/json_field.h"
#include "cohort/ps/id_hash.h"

namespace cohort::ps {

namespace {

using nlohmann::json;

template <class Enum, size_t n>
using Words = std::array<std::pair<Enum, const char*>, n>;

constexpr Words<Mode, 2> kModes{{{Mode::kSync, "sync"}, {Mode::kAsync, "async"}}};
constexpr Words<Reduce, 2> kReduces{{{Reduce::kMean, "mean"}, {Reduce::kSum, "sum"}}};
constexpr Words<Schedule::Kind, 5> kSchedules{{{Schedule::Kind::kConstant, "constant"},
                                               {Schedule::Kind::kWarmup, "warmup"},
                                               {Schedule::Kind::kNoam, "noam"},
                                               {Schedule::Kind::kInverseTime, "inverse_time"},
                                               {Schedule::Kind::kSteps, "steps"}}};
constexpr Words<Initializer::Kind, 3> kInitializers{{{Initializer::Kind::kZeros, "zeros"},
                                                     {Initializer::Kind::kUniform, "uniform"},
                                                     {Initializer::Kind::kNormal, "normal"}}};
constexpr Words<EntryPolicy::Kind, 3> kEntryKinds{
    {{EntryPolicy::Kind::kAll, "all"},
     {EntryPolicy::Kind::kCount, "count"},
     {EntryPolicy::Kind::kProbability, "probability"}}};
constexpr Words<AtCap, 3> kAtCaps{{{AtCap::kRefuse, "refuse"},
                                   {AtCap::kEvictLeastUsed, "evict_least_used"},
                                   {AtCap::kSpill, "spill"}}};

template <class Enum, size_t n>
const char* word_of(const Words<Enum, n>& words, Enum value) {
  for (const auto& [candidate, word] : words) {
    if (candidate == value) return word;
  }
  return "?";
}

template <class Enum, size_t n>
Enum value_of(const Words<Enum, n>& words, const json& object, const char* field) {
  const std::string text = object.at(field);
  for (const auto& [value, word] : words) {
    if (text == word) return value;
  }
  throw ConfigError(std::string("job: ") + field + " '" + text + "' is unknown");
}

json to_json_value(const RuleOptions& rule) {
  return {{"rule", to_string(rule.rule)},
          {"learning_rate", rule.learning_rate},
          {"momentum", rule.momentum},
          {"beta1", rule.beta1},
          {"beta2", rule.beta2},
          {"eps", rule.eps},
          {"initial_accumulator", rule.initial_accumulator},
          {"l1", rule.l1},
          {"l2", rule.l2},
          {"clip_value", rule.clip_value},
          {"clip_norm", rule.clip_norm},
          {"schedule",
           {{"kind", word_of(kSchedules, rule.schedule.kind)},
            {"warmup", rule.schedule.warmup},
            {"decay", rule.schedule.decay},
            {"width", rule.schedule.width},
            {"period", rule.schedule.period},
            {"fall", rule.schedule.fall}}}};
}

RuleOptions rule_from(const json& object) {
  const json& schedule = object.at("schedule");
  return {.rule = rule_named(object.at("rule")),
          .learning_rate = object.at("learning_rate"),
          .momentum = object.at("momentum"),
          .beta1 = object.at("beta1"),
          .beta2 = object.at("beta2"),
          .eps = object.at("eps"),
          .initial_accumulator = object.at("initial_accumulator"),
          .l1 = object.at("l1"),
          .l2 = object.at("l2"),
          .clip_value = object.at("clip_value"),
          .clip_norm = object.at("clip_norm"),
          .schedule = {.kind = value_of(kSchedules, schedule, "kind"),
                       .warmup = schedule.at("warmup"),
                       .decay = schedule.at("decay"),
                       .width = schedule.at("width"),
                       .period = schedule.at("period"),
                       .fall = schedule.at("fall")}};
}

json to_json_value(const TableOptions& table) {
  return {{"name", table.name},
          {"width", table.width},
          {"seed", table.seed},
          {"rule", to_json_value(table.rule)},
          {"initializer",
           {{"kind", word_of(kInitializers, table.initializer.kind)},
            {"scale", table.initializer.scale}}},
          {"admission",
           {{"kind", word_of(kEntryKinds, table.entry.kind)},
            {"pushes", table.entry.pushes},
            {"probability", table.entry.probability}}},
          {"eviction",
           {{"time_to_live_s", table.eviction.time_to_live_s},
            {"minimum_score", table.eviction.minimum_score},
            {"decay", table.eviction.decay}}},
          {"memory_cap_bytes", table.memory_cap_bytes},
          {"at_cap", word_of(kAtCaps, table.at_cap)}};
}

TableOptions table_from(const json& object) {
  const json& initializer = object.at("initializer");
  const json& entry = object.at("admission");
  const json& eviction = object.at("eviction");
  return {.name = object.at("name"),
          .width = JsonField(object, "width"),
          .seed = JsonField(object, "seed"),
          .rule = rule_from(object.at("rule")),
          .initializer = {.kind = value_of(kInitializers, initializer, "kind"),
                          .scale = initializer.at("scale")},
          .entry = {.kind = value_of(kEntryKinds, entry, "kind"),
                    .pushes = JsonField(entry, "pushes"),
                    .probability = entry.at("probability")},
          .eviction = {.time_to_live_s = JsonField(eviction, "time_to_live_s"),
                       .minimum_score = eviction.at("minimum_score"),
                       .decay = eviction.at("decay")},
          .memory_cap_bytes = JsonField(object, "memory_cap_bytes"),
          .at_cap = value_of(kAtCaps, object, "at_cap")};
}

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

}  // namespace

std::string to_string(Mode mode) {
  return word_of(kModes, mode);
}

std::string to_string(Reduce reduce) {
  return word_of(kReduces, reduce);
}

std::string JobOptions::to_json() const {
  json object{{"mode", to_string(mode)},        {"reduce", to_string(reduce)},
              {"trainers", trainers},           {"servers", servers},
              {"max_staleness", max_staleness}, {"error_if_nonfinite", error_if_nonfinite},
              {"max_trainers", max_trainers},   {"blocks", json::array()},
              {"tables", json::array()},        {"dense_rule", to_json_value(dense_rule)}};
  for (const BlockOptions& block : blocks) {
    object["blocks"].push_back({{"parameter", block.parameter},
                                {"begin", block.begin},
                                {"end", block.end},
                                {"server", block.server}});
  }
  for (const TableOptions& table : tables) object["tables"].push_back(to_json_value(table));
  return object.dump();
}

JobOptions JobOptions::parse(const std::string& text) {
  try {
    const json object = json::parse(text);
    JobOptions job{.mode = value_of(kModes, object, "mode"),
                   .reduce = value_of(kReduces, object, "reduce"),
                   .trainers = JsonField(object, "trainers"),
                   .max_trainers = object.contains("max_trainers")
                                       ? int{JsonField(object, "max_trainers")}
                                       : JobOptions().max_trainers,
                   .servers = JsonField(object, "servers"),
                   .max_staleness = JsonField(object, "max_staleness"),
                   // Jobs of version 0.3 and before have neither.
                   .error_if_nonfinite = object.value("error_if_nonfinite", true),
                   .dense_rule = rule_from(object.at("dense_rule"))};
    for (const json& block : object.at("blocks")) {
      job.blocks.push_back({.parameter = block.at("parameter"),
                            .begin = JsonField(block, "begin"),
                            .end = JsonField(block, "end"),
                            .server = JsonField(block, "server")});
    }
    for (const json& table : object.at("tables")) job.tables.push_back(table_from(table));
    validate(job);
    return job;
  } catch (const json::exception& error) {
    throw ConfigError(std::string("job: ") + error.what());
  }
}

uint64_t JobOptions::fingerprint() const {
  uint64_t hash = 0;
  for (const char c : to_json()) hash = splitmix64_finalizer(hash ^ static_cast<unsigned char>(c));
  return hash;
}

void validate(const JobOptions& options) {
  check(options.trainers >= 1, "expected at least 1 trainer");
  constexpr int kMostTrainers = 1 << 20;
  check(options.max_trainers <= kMostTrainers,
        "max_trainers: expected at most " + std::to_string(kMostTrainers) + ", got " +
            std::to_string(options.max_trainers));
  check(options.max_trainers >= options.trainers,
        "max_trainers: expected at least as many as trainers, " + std::to_string(options.trainers) +
            ", got " + std::to_string(options.max_trainers));
  check(options.servers >= 1, "expected at least 1 server");
  check(options.max_staleness >= -1, "max_staleness: expected -1 (no bound) or more");
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
