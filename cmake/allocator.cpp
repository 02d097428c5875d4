// Settings that jemalloc reads from the program: never give pages back to the system.
// Its own variable, MALLOC_CONF, goes before.
extern "C" {
extern const char* malloc_conf;
const char* malloc_conf = "dirty_decay_ms:-1,muzzy_decay_ms:-1";
}
