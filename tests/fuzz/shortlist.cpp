// SPDX-License-Identifier: Apache-2.0
// Fuzzing of the reader of shortlists: an input as it is, and once more with checksums that fit. A table that is taken is asked for
// the candidates of every piece.
#include <numeric>

#include "cohort/base/checksum.h"
#include "cohort/base/error.h"
#include "cohort/translate/lexical_table.h"
#include "cohort/translate/summed_file.h"

#include "tests/fuzz/input.h"

namespace {

using namespace cohort;

// Both empty.
const std::vector<std::filesystem::path>& vocabularies() {
  static fuzz::MemoryFile empty;
  static const std::vector<std::filesystem::path> both{empty.path(), empty.path()};
  return both;
}

void read(const std::string& path) {
  try {
    const auto table = translate::read_lexical_table(path, vocabularies());
    if (table.target_pieces > 1 << 20) return;  // A list of as many candidates is no more news.
    const nmt::Shortlist shortlist(table, {});
    std::vector<int64_t> source(static_cast<size_t>(shortlist.source_pieces()));
    std::iota(source.begin(), source.end(), 0);
    [[maybe_unused]] volatile size_t count = shortlist.candidates(source).size();
  } catch (const ConfigError&) {
    // Refused.
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static fuzz::MemoryFile raw;
  static const fuzz::Folder folder;
  raw.write({reinterpret_cast<const char*>(data), size});
  read(raw.path());
  const std::string sound = (folder.path() / "shortlist").string();
  try {
    const SafetensorsFile file(raw.path());
    TensorMetadata metadata = file.metadata();
    metadata["format"] = "cohort shortlist 1";
    metadata["vocabulary.source_sha256"] = metadata["vocabulary.target_sha256"] = Sha256().hex();
    translate::add_sums(metadata, file.tensors());
    write_safetensors(sound, file.tensors(), metadata);
  } catch (const ConfigError&) {
    return 0;  // No safetensors file at all.
  }
  read(sound);
  return 0;
}
