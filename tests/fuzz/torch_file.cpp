// SPDX-License-Identifier: Apache-2.0
// Fuzzing of the reader of torch.save's files.
#include "cohort/base/torch_file.h"

#include "cohort/base/error.h"

#include "tests/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cohort;
  static fuzz::MemoryFile file;
  file.write({reinterpret_cast<const char*>(data), size});
  for (const char* key : {"", "state_dict"}) {
    try {
      const TorchFile opened(file.path(), key);
      for (const TensorView& tensor : opened.tensors()) {
        fuzz::touch(tensor.bytes);
        const auto count = num_elements(tensor.shape);
        TORCH_CHECK(
            count && static_cast<uint64_t>(*count) * item_size(tensor.dtype) == tensor.bytes.size(),
            "a tensor's shape does not fit its bytes");
        TORCH_CHECK(opened.find(tensor.name) == &tensor, "a tensor is not found by its name");
      }
    } catch (const ConfigError&) {
      // Refused, as it should be. Anything else that is thrown ends the program.
    }
  }
  return 0;
}
