// SPDX-License-Identifier: Apache-2.0
// How large a model is that a command line names.
#pragma once
#include <cstdint>
#include <string>

namespace cohort::cli {

struct ModelSize {
  std::string found_in;      ///< The checkpoint's folder; "" for a number.
  int64_t parameters = 0;    ///< > 0.
  int64_t largest_unit = 0;  ///< Parameters of the largest layer, or of all that is in none; > 0.
  bool unit_is_assumed = false;  ///< By `assumed_largest_unit`.
};

/// Returns the parameters of the largest unit of a translator of this size that has 6 + 6 layers
/// and two vocabularies of 32,000 pieces, as the presets have: of what is in no layer (three
/// tables, 96,000 D parameters of width D, beside 168 D^2 in layers), or of a decoder's layer (16
/// D^2).
int64_t assumed_largest_unit(int64_t parameters);

/// Reads the size of the model in a run's folder (last/, else best/) or a checkpoint's, by its
/// manifest; or a number such as 93M, which says nothing of units: that is assumed. A layer is what
/// has a number in its names: "encoder.layers.3.".
/// Errors: ConfigError that begins with --model.
ModelSize size_of_model(const std::string& folder_or_count);

}  // namespace cohort::cli
