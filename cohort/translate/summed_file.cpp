// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/summed_file.h"

#include "cohort/base/checksum.h"

namespace cohort::translate {
namespace {

constexpr const char* kMetadataSum = "sha256.facts";

std::string sha256_of(std::span<const std::byte> bytes) {
  Sha256 sum;
  sum.update(bytes);
  return sum.hex();
}

}  // namespace

std::string sum_of_metadata(const TensorMetadata& metadata) {
  Sha256 sum;
  for (const auto& [name, value] : metadata) {
    if (name != kMetadataSum) sum.update(name + "=" + value + "\n");
  }
  return sum.hex();
}

void add_sums(TensorMetadata& metadata, std::span<const TensorView> tensors) {
  for (const TensorView& tensor : tensors)
    metadata["sha256." + tensor.name] = sha256_of(tensor.bytes);
  metadata[kMetadataSum] = sum_of_metadata(metadata);
}

std::string entry_of(const TensorMetadata& metadata, const std::string& name) {
  const auto found = metadata.find(name);
  return found == metadata.end() ? "" : found->second;
}

std::string damage_of(const SafetensorsFile& file, const std::string& format,
                      std::span<const char* const> tensors) {
  const TensorMetadata& metadata = file.metadata();
  if (entry_of(metadata, "format") != format)
    return "its format is \"" + entry_of(metadata, "format") + "\", expected \"" + format + "\"";
  if (sum_of_metadata(metadata) != entry_of(metadata, kMetadataSum))
    return "the checksum of its metadata is wrong";
  for (const char* name : tensors) {
    if (sha256_of(file.at(name).bytes) != entry_of(metadata, std::string("sha256.") + name))
      return std::string("the checksum of ") + name + " is wrong";
  }
  return "";
}

}  // namespace cohort::translate
