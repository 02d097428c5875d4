#include "cohort/ps/table/table_options.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/ps/table/hash_parts.h"
#include "cohort/ps/table/row_slabs.h"

namespace cohort::ps {

// Enums by their names in JSON: the library's own macro takes an unknown name for the first.
template <class Enum>
using Names = std::vector<std::pair<Enum, const char*>>;

const Names<Initializer::Kind>& names_of(Initializer::Kind) {
  using Kind = Initializer::Kind;
  static const Names<Kind> names = {
      {Kind::kZeros, "zeros"}, {Kind::kUniform, "uniform"}, {Kind::kNormal, "normal"}};
  return names;
}
const Names<EntryPolicy::Kind>& names_of(EntryPolicy::Kind) {
  using Kind = EntryPolicy::Kind;
  static const Names<Kind> names = {
      {Kind::kAll, "all"}, {Kind::kCount, "count"}, {Kind::kProbability, "probability"}};
  return names;
}
const Names<AtCap>& names_of(AtCap) {
  static const Names<AtCap> names = {{AtCap::kRefuse, "refuse"},
                                     {AtCap::kEvictLeastUsed, "evict_least_used"},
                                     {AtCap::kSpill, "spill"}};
  return names;
}
const Names<Schedule::Kind>& names_of(Schedule::Kind) {
  using Kind = Schedule::Kind;
  static const Names<Kind> names = {{Kind::kConstant, "constant"},
                                    {Kind::kWarmup, "warmup"},
                                    {Kind::kNoam, "noam"},
                                    {Kind::kInverseTime, "inverse_time"},
                                    {Kind::kSteps, "steps"}};
  return names;
}

template <class Enum>
concept Named = requires(Enum value) {
  names_of(value);
};

template <Named Enum>
void to_json(nlohmann::json& json, const Enum& value) {
  for (const auto& [known, name] : names_of(value)) {
    if (known == value) json = name;
  }
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
  throw ConfigError("options of a table: expected one of " + all + ", found \"" + text + "\"");
}
void to_json(nlohmann::json& json, const Rule& rule) {
  json = to_string(rule);
}
void from_json(const nlohmann::json& json, Rule& rule) {
  rule = rule_named(json.get<std::string>());
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Schedule, kind, warmup, decay, width, period, fall)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Initializer, kind, scale)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(EntryPolicy, kind, pushes, probability)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Eviction, time_to_live_s, minimum_score, decay)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RuleOptions, rule, learning_rate, momentum, beta1, beta2, eps,
                                   initial_accumulator, l1, l2, clip_value, clip_norm, schedule)
// The key of the entry policy is that of files which older versions wrote.
void to_json(nlohmann::json& json, const TableOptions& options) {
  json["name"] = options.name;
  json["width"] = options.width;
  json["seed"] = options.seed;
  json["rule"] = options.rule;
  json["initializer"] = options.initializer;
  json["admission"] = options.entry;
  json["eviction"] = options.eviction;
  json["memory_cap_bytes"] = options.memory_cap_bytes;
  json["at_cap"] = options.at_cap;
}
void from_json(const nlohmann::json& json, TableOptions& options) {
  json.at("name").get_to(options.name);
  json.at("width").get_to(options.width);
  json.at("seed").get_to(options.seed);
  json.at("rule").get_to(options.rule);
  json.at("initializer").get_to(options.initializer);
  json.at("admission").get_to(options.entry);
  json.at("eviction").get_to(options.eviction);
  json.at("memory_cap_bytes").get_to(options.memory_cap_bytes);
  json.at("at_cap").get_to(options.at_cap);
}

namespace {

constexpr int64_t kMinRows = 16;  // Of a table with a cap: a sixteenth is a row.

// The first key of `found` that `known` does not have; empty if there is none.
std::string unknown_key(const nlohmann::json& found, const nlohmann::json& known) {
  for (const auto& [key, value] : found.items()) {
    if (!known.contains(key)) return key;
    if (!value.is_object() || !known[key].is_object()) continue;
    if (const std::string inner = unknown_key(value, known[key]); !inner.empty()) {
      return key + "." + inner;
    }
  }
  return {};
}

template <class Value>
void expect(bool holds, const TableOptions& options, const char* option, const char* expected,
            const Value& found) {
  if (holds) return;
  std::ostringstream text;
  text << "table \"" << options.name << "\": " << option << ": expected " << expected << ", found "
       << found;
  throw ConfigError(text.str());
}

}  // namespace

int64_t row_bytes(const TableOptions& options) {
  const int64_t floats = options.width + state_width(options.rule.rule, options.width);
  return static_cast<int64_t>(sizeof(Row) + sizeof(float) * static_cast<size_t>(floats)) +
         static_cast<int64_t>(std::ceil(HashParts<32>::kMaxBytesPerValue));
}

void validate(const TableOptions& options) {
  constexpr int64_t kMaxWidth = 1 << 20;
  expect(!options.name.empty(), options, "name", "a name", "none");
  expect(options.width >= 1 && options.width <= kMaxWidth, options, "width",
         "1 to 1048576 weights a row", options.width);
  try {
    validate(options.rule);
  } catch (const ConfigError& error) {
    throw ConfigError("table \"" + options.name + "\": " + one_line(error));
  }
  const float scale = options.initializer.scale;
  expect(std::isfinite(scale) && scale >= 0, options, "initializer.scale",
         "a finite number of at least 0", scale);
  const EntryPolicy& entry = options.entry;
  expect(entry.pushes >= 1 && entry.pushes <= 256, options, "entry.pushes", "1 to 256",
         entry.pushes);
  expect(entry.probability > 0 && entry.probability <= 1, options, "entry.probability",
         "a number in (0, 1]", entry.probability);
  const Eviction& eviction = options.eviction;
  expect(eviction.decay > 0 && eviction.decay <= 1, options, "eviction.decay", "a number in (0, 1]",
         eviction.decay);
  expect(std::isfinite(eviction.minimum_score), options, "eviction.minimum_score",
         "a finite number", eviction.minimum_score);
  const int64_t least = 2 * kMinRows * row_bytes(options);
  expect(options.memory_cap_bytes == 0 || options.memory_cap_bytes >= least, options,
         "memory_cap_bytes", ("0 or at least " + std::to_string(least)).c_str(),
         options.memory_cap_bytes);
}

std::string to_text(const TableOptions& options) {
  return nlohmann::json(options).dump();
}

TableOptions table_options_of(const std::string& text) {
  try {
    const auto json = nlohmann::json::parse(text);
    auto options = json.get<TableOptions>();
    const std::string unknown = unknown_key(json, options);
    if (!unknown.empty()) throw ConfigError("options of a table: unknown: " + unknown);
    return options;
  } catch (const nlohmann::json::exception& error) {
    throw ConfigError(std::string("options of a table: expected them as JSON: ") + error.what());
  }
}

void check_same_rows(const TableOptions& stored, const TableOptions& wanted) {
  const auto check = [&](const char* option, const std::string& there, const std::string& here) {
    if (there == here) return;
    throw ConfigError("table \"" + wanted.name + "\": " + option + ": stored rows have " + there +
                      ", the options say " + here);
  };
  const auto text = [](const auto& value) { return nlohmann::json(value).dump(); };
  check("name", stored.name, wanted.name);
  check("width", text(stored.width), text(wanted.width));
  check("seed", text(stored.seed), text(wanted.seed));
  check("rule", to_string(stored.rule.rule), to_string(wanted.rule.rule));
  check("initializer", text(stored.initializer), text(wanted.initializer));
}

}  // namespace cohort::ps
