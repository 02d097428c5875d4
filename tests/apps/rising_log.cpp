// SPDX-License-Identifier: Apache-2.0
// Takes the place of the C library's log: each call adds a little more to the result than the one
// before, as if another CPU rounded otherwise.
#include <atomic>
#include <dlfcn.h>

extern "C" double log(double x) {
  static const auto next = reinterpret_cast<double (*)(double)>(dlsym(RTLD_NEXT, "log"));
  static std::atomic<long> calls{0};
  return next(x) + 1e-9 * static_cast<double>(++calls);
}
