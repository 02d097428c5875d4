// SPDX-License-Identifier: Apache-2.0
// Fuzzing of the reader of checkpoints' manifests. What is read is written and read again.
#include "cohort/base/manifest.h"

#include "cohort/base/error.h"

#include "tests/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cohort;
  Manifest manifest;
  try {
    manifest = Manifest::parse(fuzz::text_of({data, size}), "manifest");
  } catch (const ConfigError&) {
    return 0;  // Refused, as it should be. Anything else that is thrown ends the program.
  }
  // An older version is written as what it is.
  const Manifest again = Manifest::parse(manifest.to_json(), "manifest");
  TORCH_CHECK(again.files == manifest.files && again.metadata == manifest.metadata &&
                  again.update == manifest.update && again.parts.size() == manifest.parts.size(),
              "a manifest that was written reads otherwise");
  try {
    manifest.check_coverage("manifest");
  } catch (const ConfigError&) {
  }
  return 0;
}
