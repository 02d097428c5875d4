// Settings that jemalloc reads from the program: freed pages stay for a minute, which is longer than a step,
// and go back to the system then, so that memory does not grow with every new shape.
// Its own variable, MALLOC_CONF, goes before.
extern "C" {
extern const char* malloc_conf;
const char* malloc_conf = "dirty_decay_ms:60000,muzzy_decay_ms:60000";
}
