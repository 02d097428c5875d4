// SPDX-License-Identifier: Apache-2.0
// Fuzzing of what a server does with a call whose message is in shared memory: where it says that
// its bytes and its answer's are. The area's number is made to fit, unless it is 0.
#include <cstring>
#include <span>

#include "cohort/ps/rpc/shared_area.h"

#include "tests/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cohort::ps;
  static const SharedArea area(1 << 16);
  static SharedAreas areas;
  if (!areas.find(area.name().number)) areas.add(1, area.name());
  auto shared = read_shared_message(std::as_bytes(std::span(data, size)));
  if (!shared) return 0;
  if (shared->area != 0) shared->area = area.name().number;
  const auto places = areas.find(*shared);
  if (!places) return 0;
  cohort::fuzz::touch(places->message);
  if (places->answer) std::memset(places->answer->data(), 0x5a, places->answer->size());
  // What is written over the number is another process's.
  const SharedArea same(area.name());
  return 0;
}
