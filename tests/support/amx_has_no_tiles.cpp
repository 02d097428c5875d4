// SPDX-License-Identifier: Apache-2.0
// Exits with 1 where the processor lists AMX but no tiles for it.
#include "cohort/base/amx.h"

int main() {
  return cohort::amx_has_no_tiles() ? 1 : 0;
}
