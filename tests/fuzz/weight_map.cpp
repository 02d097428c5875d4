// SPDX-License-Identifier: Apache-2.0
// Fuzzing of the reader of Hugging Face's index of safetensors files.
#include "cohort/base/error.h"
#include "cohort/base/imported_checkpoint.h"

#include "tests/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cohort;
  try {
    for (const auto& [tensor, file] : parse_weight_map(fuzz::text_of({data, size}), "index"))
      TORCH_CHECK(!file.empty() && file != ".." && file.find('/') == file.npos,
                  "a file's name leaves the folder");
  } catch (const ConfigError&) {
    // Refused, as it should be. Anything else that is thrown ends the program.
  }
  return 0;
}
