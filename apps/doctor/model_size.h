// How large a model is that a command line names.
#pragma once
#include <cstdint>
#include <string>

namespace cohort::apps {

struct ModelSize {
  std::string found_in;      ///< The checkpoint's folder; "" for a number.
  int64_t parameters = 0;    ///< > 0.
  int64_t largest_unit = 0;  ///< Parameters of the largest layer, or of all that is in none; 0: not
                             ///< known.
};

/// Reads the size of the model in a run's folder (last/, else best/) or a checkpoint's, by its
/// manifest; or a number such as 93M. A layer is what has a number in its names:
/// "encoder.layers.3.".
/// Errors: ConfigError that begins with --model.
ModelSize size_of_model(const std::string& folder_or_count);

}  // namespace cohort::apps
