// SPDX-License-Identifier: Apache-2.0
// Fuzzing of the messages that a client of the store and its server send each other. What is read
// is written again.
#include "cohort/comm/store_protocol.h"

#include "tests/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cohort;
  const std::string input = fuzz::text_of({data, size});
  std::string_view bytes = input;
  try {
    while (const auto message = comm::first_message(bytes)) {
      TORCH_CHECK(comm::frame_of(message->kind, message->fields) == bytes.substr(0, message->size),
                  "a message that was written reads otherwise");
      bytes.remove_prefix(message->size);
    }
  } catch (const c10::DistNetworkError&) {
    // Refused, as it should be. Anything else that is thrown ends the program.
  }
  return 0;
}
