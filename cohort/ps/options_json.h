// SPDX-License-Identifier: Apache-2.0
// A job's options to and from JSON: one list of fields for each struct, read in both directions.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/json_field.h"
#include "cohort/ps/job.h"

namespace cohort::ps {

// Enums by their names in JSON: the library's own macro takes an unknown name for the first.
template <class Enum>
using Names = std::vector<std::pair<Enum, const char*>>;

inline Names<Mode> names_of(Mode) {
  return {{Mode::kSync, "sync"}, {Mode::kAsync, "async"}};
}
inline Names<Reduce> names_of(Reduce) {
  return {{Reduce::kMean, "mean"}, {Reduce::kSum, "sum"}};
}
inline Names<Schedule::Kind> names_of(Schedule::Kind) {
  using Kind = Schedule::Kind;
  return {{Kind::kConstant, "constant"},
          {Kind::kWarmup, "warmup"},
          {Kind::kNoam, "noam"},
          {Kind::kInverseTime, "inverse_time"},
          {Kind::kSteps, "steps"}};
}
inline Names<Initializer::Kind> names_of(Initializer::Kind) {
  using Kind = Initializer::Kind;
  return {{Kind::kZeros, "zeros"}, {Kind::kUniform, "uniform"}, {Kind::kNormal, "normal"}};
}
inline Names<EntryPolicy::Kind> names_of(EntryPolicy::Kind) {
  using Kind = EntryPolicy::Kind;
  return {{Kind::kAll, "all"}, {Kind::kCount, "count"}, {Kind::kProbability, "probability"}};
}
inline Names<AtCap> names_of(AtCap) {
  return {{AtCap::kRefuse, "refuse"},
          {AtCap::kEvictLeastUsed, "evict_least_used"},
          {AtCap::kSpill, "spill"}};
}

template <class Enum>
concept Named = requires(Enum value) {
  names_of(value);
};

template <Named Enum>
std::string name_of(Enum value) {
  for (const auto& [known, name] : names_of(value)) {
    if (known == value) return name;
  }
  return "unknown";
}

template <Named Enum>
void to_json(nlohmann::json& json, const Enum& value) {
  json = name_of(value);
}
template <Named Enum>
void from_json(const nlohmann::json& json, Enum& value) {
  const auto text = json.get<std::string>();
  std::string all;
  for (const auto& [known, name] : names_of(value)) {
    if (text == name) {
      value = known;
      return;
    }
    all += (all.empty() ? "" : ", ") + std::string(name);
  }
  throw ConfigError("expected one of " + all + ", found \"" + text + "\"");
}
inline void to_json(nlohmann::json& json, const Rule& rule) {
  json = to_string(rule);
}
inline void from_json(const nlohmann::json& json, Rule& rule) {
  rule = rule_named(json.get<std::string>());
}
inline void to_json(nlohmann::json& json, const WireDtype& dtype) {
  json = to_string(dtype);
}
inline void from_json(const nlohmann::json& json, WireDtype& dtype) {
  dtype = wire_dtype_named(json.get<std::string>());
}

// Calls `visit(name, field)` for each field of a struct, and `visit(name, field, true)` for those
// that older versions did not write.
void visit_fields(Schedule& options, const auto& visit) {
  visit("kind", options.kind);
  visit("warmup", options.warmup);
  visit("decay", options.decay);
  visit("width", options.width);
  visit("period", options.period);
  visit("fall", options.fall);
}
void visit_fields(RuleOptions& options, const auto& visit) {
  visit("rule", options.rule);
  visit("learning_rate", options.learning_rate);
  visit("momentum", options.momentum);
  visit("beta1", options.beta1);
  visit("beta2", options.beta2);
  visit("eps", options.eps);
  visit("initial_accumulator", options.initial_accumulator);
  visit("l1", options.l1);
  visit("l2", options.l2);
  visit("clip_value", options.clip_value);
  visit("clip_norm", options.clip_norm);
  visit("schedule", options.schedule);
}
void visit_fields(Initializer& options, const auto& visit) {
  visit("kind", options.kind);
  visit("scale", options.scale);
}
void visit_fields(EntryPolicy& options, const auto& visit) {
  visit("kind", options.kind);
  visit("pushes", options.pushes);
  visit("probability", options.probability);
}
void visit_fields(Eviction& options, const auto& visit) {
  visit("time_to_live_s", options.time_to_live_s);
  visit("minimum_score", options.minimum_score);
  visit("decay", options.decay);
}
void visit_fields(TableOptions& options, const auto& visit) {
  visit("name", options.name);
  visit("width", options.width);
  visit("seed", options.seed);
  visit("rule", options.rule);
  visit("initializer", options.initializer);
  visit("admission", options.entry);  // The key that older versions wrote.
  visit("eviction", options.eviction);
  visit("memory_cap_bytes", options.memory_cap_bytes);
  visit("at_cap", options.at_cap);
  visit("wire_dtype", options.wire_dtype, true);  // Since 0.4.
}
void visit_fields(BlockOptions& options, const auto& visit) {
  visit("parameter", options.parameter);
  visit("begin", options.begin);
  visit("end", options.end);
  visit("server", options.server);
}
void visit_fields(JobOptions& options, const auto& visit) {
  visit("mode", options.mode);
  visit("reduce", options.reduce);
  visit("trainers", options.trainers);
  visit("max_trainers", options.max_trainers, true);  // Since 0.4.
  visit("servers", options.servers);
  visit("max_staleness", options.max_staleness);
  visit("batch_size", options.batch_size, true);                  // Since 0.4.
  visit("error_if_nonfinite", options.error_if_nonfinite, true);  // Since 0.4.
  visit("dense_rule", options.dense_rule);
  visit("dense_wire_dtype", options.dense_wire_dtype, true);  // Since 0.4.
  visit("blocks", options.blocks);
  visit("tables", options.tables);
}

template <class Options>
concept HasFields = requires(Options& options) {
  visit_fields(options, [](auto&&...) {});
};

template <HasFields Options>
void to_json(nlohmann::json& json, const Options& options) {
  Options copy = options;  // visit_fields serves both directions.
  json = nlohmann::json::object();
  visit_fields(copy,
               [&](const char* name, const auto& field, bool = false) { json[name] = field; });
}
template <HasFields Options>
void from_json(const nlohmann::json& json, Options& options) {
  visit_fields(options, [&](const char* name, auto& field, bool is_optional = false) {
    if (is_optional && !json.contains(name)) return;
    std::remove_reference_t<decltype(field)> value = JsonField(json, name);
    field = std::move(value);
  });
}

/// Errors: ConfigError that begins with `what`.
template <HasFields Options>
Options parse_options(const std::string& what, const std::string& text) {
  try {
    return nlohmann::json::parse(text).get<Options>();
  } catch (const nlohmann::json::exception& error) {
    throw ConfigError(what + ": cannot be read as JSON: " + error.what());
  } catch (const ConfigError& error) {
    throw ConfigError(what + ": " + one_line(error));
  }
}

}  // namespace cohort::ps
