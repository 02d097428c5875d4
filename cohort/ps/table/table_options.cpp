// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/table/table_options.h"

#include <cmath>
#include <sstream>

#include "cohort/base/error.h"
#include "cohort/ps/options_json.h"
#include "cohort/ps/table/hash_parts.h"
#include "cohort/ps/table/row_slabs.h"

namespace cohort::ps {

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
  const std::string what = "options of a table";
  auto options = parse_options<TableOptions>(what, text);
  const std::string unknown = unknown_key(nlohmann::json::parse(text), options);
  if (!unknown.empty()) throw ConfigError(what + ": unknown: " + unknown);
  return options;
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
