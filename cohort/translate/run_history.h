// SPDX-License-Identifier: Apache-2.0
// What a run's folder holds about its course, as read back from history.jsonl and config.json.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cohort/train/chart.h"

namespace cohort::translate {

using Json = nlohmann::ordered_json;

/// The lines of history.jsonl by their "type"; those of earlier versions have none and are
/// validations. Lines that are no JSON objects, or of an unknown type, are left out. A field of any
/// line may be missing, or of another kind than it should be.
struct RunHistory {
  std::vector<Json> starts, trains, validations;
  Json end;     ///< The last line of the run; null if it has not ended, or resumed after it.
  Json config;  ///< Null if it is missing.

  /// The validation whose weights are in best/; nullptr if there is none.
  const Json* best() const;
  /// Where the run stands; nullptr if there is no line.
  const Json* last() const;
};

/// Errors: ConfigError that names history.jsonl if it cannot be read.
RunHistory read_history(const std::string& model_dir);

/// A field of a line, or an element of a field. What is missing, null (a number that is not finite)
/// or of another kind is NaN or "".
double number_of(const Json& line, const char* key);
double element_of(const Json& line, const char* key, size_t i);
std::string text_of(const Json& line, const char* key);
std::vector<std::string> texts_of(const Json& line, const char* key);

/// A field, or an element of one, by update.
train::Points points_of(const std::vector<Json>& lines, const char* key);
train::Points points_of(const std::vector<Json>& lines, const char* key, size_t i);
/// The finite values of a curve.
std::vector<double> values_of(const train::Points& points);

/// "24.30"; a dash for a number that is not finite.
std::string fixed(double value, int decimals);

}  // namespace cohort::translate
