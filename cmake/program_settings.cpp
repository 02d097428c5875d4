// Settings of libraries that a program which computes with tensors is better off with. Whoever sets
// the libraries' own variables, MALLOC_CONF and ONEDNN_PRIMITIVE_CACHE_CAPACITY, goes before.
#include <cstdlib>

// jemalloc: freed pages stay for a minute, which is longer than a step, and go back to the system
// then, so that memory does not grow with every new shape.
extern "C" {
extern const char* malloc_conf;
const char* malloc_conf = "dirty_decay_ms:60000,muzzy_decay_ms:60000";
}

namespace {

// oneDNN compiles a kernel for each shape and keeps 1,024 of them; batches of sentences have more
// shapes than that, so it compiled the same ones again and again (5 to 8 % of a small model's
// step).
[[gnu::constructor]] void keep_compiled_kernels() {
  setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384", /*overwrite=*/0);
}

}  // namespace
