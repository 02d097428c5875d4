// SPDX-License-Identifier: Apache-2.0
// safetensors files whose metadata have SHA-256 sums: "sha256.NAME" of the tensor NAME, and "sha256.facts" of all other entries.
#pragma once
#include <span>
#include <string>

#include "cohort/base/safetensors.h"

namespace cohort::translate {

/// Returns the sum over all entries but "sha256.facts", as that entry has it.
std::string sum_of_metadata(const TensorMetadata& metadata);
/// Adds the sums of `tensors` and, last, of the metadata, which nothing may be added to after this.
void add_sums(TensorMetadata& metadata, std::span<const TensorView> tensors);
/// Returns the entry, or "" if there is none.
std::string entry_of(const TensorMetadata& metadata, const std::string& name);
/// Returns what is damaged of a file that should have the entry "format" with this value and these tensors, else "".
/// Errors: ConfigError that names a tensor that is missing.
std::string damage_of(const SafetensorsFile& file, const std::string& format,
                      std::span<const char* const> tensors);

}  // namespace cohort::translate
