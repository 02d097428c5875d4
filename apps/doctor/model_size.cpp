// SPDX-License-Identifier: Apache-2.0
#include "apps/doctor/model_size.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <map>

#include "cohort/base/error.h"
#include "cohort/base/stored_checkpoint.h"
#include "cohort/parallel/strategy_advice.h"

namespace cohort::cli {
namespace {

namespace fs = std::filesystem;

bool is_number(const std::string& word) {
  return !word.empty() &&
         std::ranges::all_of(word, [](unsigned char c) { return std::isdigit(c) != 0; });
}

// "encoder.layers.3.linear1.weight" -> "encoder.layers.3."; "" for what is in no layer.
std::string layer_of(const std::string& name) {
  for (size_t begin = 0, dot = 0; (dot = name.find('.', begin)) != std::string::npos;
       begin = dot + 1) {
    if (is_number(name.substr(begin, dot - begin))) return name.substr(0, dot + 1);
  }
  return "";
}

bool is_floating(DType type) {
  return type == DType::kF64 || type == DType::kF32 || type == DType::kF16 || type == DType::kBF16;
}

ModelSize size_of_checkpoint(const std::string& folder) {
  StoredCheckpoint checkpoint(folder);
  ModelSize size{.found_in = folder};
  std::map<std::string, int64_t> layers;
  for (const auto& [name, tensor] : checkpoint.part("weights")) {
    const int64_t elements = num_elements(tensor.shape).value_or(0);
    if (!is_floating(tensor.dtype)) continue;
    size.parameters += elements;
    layers[layer_of(name)] += elements;
  }
  for (const auto& [layer, elements] : layers)
    size.largest_unit = std::max(size.largest_unit, elements);
  if (size.parameters == 0) throw ConfigError(folder + ": expected weights that are numbers");
  return size;
}

}  // namespace

int64_t assumed_largest_unit(int64_t parameters) {
  constexpr double kTables = 3 * 32'000, kLayers = 6 * 12 + 6 * 16, kLargestLayer = 16;
  const auto all = static_cast<double>(parameters);
  const double width = (std::sqrt(kTables * kTables + 4 * kLayers * all) - kTables) / (2 * kLayers);
  const double unit = std::max(kTables * width, kLargestLayer * width * width);
  return std::clamp<int64_t>(std::llround(unit), 1, parameters);
}

ModelSize size_of_model(const std::string& folder_or_count) {
  try {
    for (const char* place : {"", "last", "best"}) {
      const std::string folder = (fs::path(folder_or_count) / place / "").lexically_normal();
      if (fs::exists(folder + "manifest.json"))
        return size_of_checkpoint(folder.substr(0, folder.size() - 1));
    }
  } catch (const ConfigError& error) {
    throw ConfigError("--model " + one_line(error));
  }
  if (const auto count = parallel::parse_parameter_count(folder_or_count))
    return {.parameters = *count,
            .largest_unit = assumed_largest_unit(*count),
            .unit_is_assumed = true};
  throw ConfigError("--model " + folder_or_count +
                    ": expected a run's or a checkpoint's folder, or a number of parameters such "
                    "as 93M");
}

}  // namespace cohort::cli
