// SPDX-License-Identifier: Apache-2.0
// Runs a fuzz target on the files of a folder, whole, cut off and with bytes changed: what CI does
// in the place of libFuzzer.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

int64_t run(const std::string& bytes) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "expected the folder of a corpus\n");
    return 2;
  }
  int64_t inputs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string whole{std::istreambuf_iterator<char>(file), {}};
    inputs += run(whole);
    for (size_t size = 0; size < whole.size(); ++size) inputs += run(whole.substr(0, size));
    for (size_t at = 0; at < whole.size(); ++at) {
      for (const int value : {0x00, 0x01, 0x02, 0x7f, 0x80, 0xff}) {
        std::string changed = whole;
        changed[at] = static_cast<char>(value);
        inputs += run(changed);
      }
    }
  }
  std::printf("%lld inputs\n", static_cast<long long>(inputs));
  return inputs > 0 ? 0 : 1;
}
