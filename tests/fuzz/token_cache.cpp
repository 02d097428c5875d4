// SPDX-License-Identifier: Apache-2.0
// Fuzzing of the reader of token caches: an input as it is, and once more with checksums and inputs
// that fit, so that it gets past them. Every pair of a cache that is taken is read.
#include "cohort/translate/token_cache.h"

#include <array>

#include "cohort/base/checksum.h"
#include "cohort/base/error.h"

#include "tests/fuzz/input.h"

namespace {

using namespace cohort;

std::string sha256_of(std::span<const std::byte> bytes) {
  Sha256 sum;
  sum.update(bytes);
  return sum.hex();
}

// As token_cache.cpp makes it.
std::string sum_of_metadata(const TensorMetadata& metadata) {
  Sha256 sum;
  for (const auto& [name, value] : metadata) {
    if (name != "sha256.facts") sum.update(name + "=" + value + "\n");
  }
  return sum.hex();
}

// One text and one vocabulary, both empty.
const translate::TokenCacheInputs& inputs() {
  static fuzz::MemoryFile empty;
  static const translate::TokenCacheInputs its{
      .text = {empty.path()}, .vocabularies = {empty.path(), empty.path()}, .lengths = {}};
  return its;
}

void read(const std::string& path) {
  const auto opened = translate::open_token_cache(path, inputs());
  if (!opened.text) return;
  const auto& corpus = opened.text->corpus;
  for (int64_t pair = 0; pair < corpus.size(); ++pair) {
    int64_t sum = 0;
    for (const auto& side : {corpus.source(pair), corpus.target(pair)}) {
      for (const int32_t id : side) sum += id;
    }
    [[maybe_unused]] volatile int64_t kept = sum;
  }
}

// The same tensors and metadata with sums that are right, of inputs() as they are.
void write_sound(const SafetensorsFile& file, const std::string& path) {
  TensorMetadata metadata = file.metadata();
  const std::string nothing = sha256_of({});
  metadata["format"] = "cohort token cache 1";
  metadata["text.count"] = "1";
  metadata["text.form"] = "";
  metadata["text.0.sha256"] = nothing;
  metadata["max_length"] = "0";
  metadata["max_length_crop"] = "0";
  metadata["vocabulary.source_sha256"] = metadata["vocabulary.target_sha256"] = nothing;
  for (const TensorView& tensor : file.tensors())
    metadata["sha256." + tensor.name] = sha256_of(tensor.bytes);
  metadata["sha256.facts"] = sum_of_metadata(metadata);
  write_safetensors(path, file.tensors(), metadata);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static fuzz::MemoryFile raw;
  static const fuzz::Folder folder;
  raw.write({reinterpret_cast<const char*>(data), size});
  read(raw.path());
  const std::string sound = (folder.path() / "tokens.safetensors").string();
  try {
    write_sound(SafetensorsFile(raw.path()), sound);
  } catch (const ConfigError&) {
    return 0;  // No safetensors file at all.
  }
  read(sound);
  return 0;
}
