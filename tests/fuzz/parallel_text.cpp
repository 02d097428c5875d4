// SPDX-License-Identifier: Apache-2.0
// Fuzzing of the readers of parallel text. The first byte says which: 't' source<TAB>target lines,
// 'j' JSON, anything else two files, of which a zero byte begins the second.
#include "cohort/text/parallel_text.h"

#include <filesystem>
#include <vector>

#include "cohort/base/error.h"

#include "tests/fuzz/input.h"

namespace fs = std::filesystem;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // The extension says what a file is.
  static const cohort::fuzz::Folder folder;
  if (size == 0) return 0;
  const std::string_view content(reinterpret_cast<const char*>(data) + 1, size - 1);
  std::vector<fs::path> paths;
  switch (data[0]) {
    case 't':
      paths = {folder.write("text.tsv", content)};
      break;
    case 'j':
      paths = {folder.write("text.json", content)};
      break;
    default: {
      const size_t end = std::min(content.find('\0'), content.size());
      const size_t begin = std::min(end + 1, content.size());
      paths = {folder.write("source", content.substr(0, end)),
               folder.write("target", content.substr(begin))};
    }
  }
  try {
    const auto pairs = cohort::text::read_parallel_text(paths);
    TORCH_CHECK(pairs.source.size() == pairs.target.size() && !pairs.source.empty(),
                "sentences without a partner");
    for (size_t i = 0; i < pairs.source.size(); ++i) {
      TORCH_CHECK((pairs.source[i] + pairs.target[i]).find('\n') == std::string::npos,
                  "a sentence of two lines");
    }
  } catch (const cohort::ConfigError&) {
    // Refused, as it should be. Anything else that is thrown ends the program.
  }
  return 0;
}
