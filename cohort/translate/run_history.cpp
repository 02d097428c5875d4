// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/run_history.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>

#include "cohort/base/error.h"

namespace cohort::translate {

const Json* RunHistory::best() const {
  const Json* found = nullptr;
  for (const Json& line : validations)
    if (const auto best = line.find("best"); best != line.end() && *best == true) found = &line;
  return found;
}

const Json* RunHistory::last() const {
  const Json* found = nullptr;
  for (const auto* lines : {&starts, &trains, &validations}) {
    if (!lines->empty() &&
        (found == nullptr || number_of(lines->back(), "update") >= number_of(*found, "update"))) {
      found = &lines->back();
    }
  }
  return end.is_object() ? &end : found;
}

RunHistory read_history(const std::string& model_dir) {
  const std::string path = model_dir + "/history.jsonl";
  std::ifstream file(path);
  if (!file) throw ConfigError(path + ": cannot be read: expected the history of a run");
  RunHistory history;
  for (std::string line; std::getline(file, line);) {
    Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) continue;  // The line that is being written.
    const std::string type = json.contains("type") ? text_of(json, "type") : "valid";
    if (type == "start") {
      history.starts.push_back(std::move(json));
      history.end = nullptr;
    } else if (type == "train") {
      history.trains.push_back(std::move(json));
    } else if (type == "valid") {
      history.validations.push_back(std::move(json));
    } else if (type == "end") {
      history.end = std::move(json);
    }
  }
  std::ifstream config(model_dir + "/config.json");
  if (config) history.config = Json::parse(config, nullptr, /*allow_exceptions=*/false);
  return history;
}

double number_of(const Json& line, const char* key) {
  const auto found = line.find(key);
  return found != line.end() && found->is_number() ? found->get<double>() : std::nan("");
}

double element_of(const Json& line, const char* key, size_t i) {
  const auto found = line.find(key);
  if (found == line.end() || !found->is_array() || i >= found->size()) return std::nan("");
  return (*found)[i].is_number() ? (*found)[i].get<double>() : std::nan("");
}

std::string text_of(const Json& line, const char* key) {
  const auto found = line.find(key);
  return found != line.end() && found->is_string() ? found->get<std::string>() : "";
}

std::vector<std::string> texts_of(const Json& line, const char* key) {
  std::vector<std::string> found;
  if (const auto there = line.find(key); there != line.end() && there->is_array()) {
    for (const Json& one : *there) found.push_back(one.is_string() ? one.get<std::string>() : "");
  }
  return found;
}

train::Points points_of(const std::vector<Json>& lines, const char* key) {
  train::Points found;
  for (const Json& line : lines)
    found.emplace_back(number_of(line, "update"), number_of(line, key));
  return found;
}

train::Points points_of(const std::vector<Json>& lines, const char* key, size_t i) {
  train::Points found;
  for (const Json& line : lines)
    found.emplace_back(number_of(line, "update"), element_of(line, key, i));
  return found;
}

std::vector<double> values_of(const train::Points& from) {
  std::vector<double> ys;
  for (const auto& [x, y] : from) {
    if (std::isfinite(y)) ys.push_back(y);
  }
  return ys;
}

std::string fixed(double value, int decimals) {
  if (!std::isfinite(value)) return train::readable(value);
  std::array<char, 32> digits{};
  std::snprintf(digits.data(), digits.size(), "%.*f", decimals, value);
  return digits.data();
}

}  // namespace cohort::translate
