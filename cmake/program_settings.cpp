// SPDX-License-Identifier: Apache-2.0
// Settings of the allocator that a program which computes with tensors is better off with. A value of
// your own in MALLOC_CONF takes precedence.

// jemalloc keeps freed pages for the next step rather than give them back to the system. With any
// finite decay it gave back gigabytes within each step of the base translator and spent a fifth of
// the step on page faults; kept, they add 6 % to the largest resident size.
extern "C" {
extern const char* malloc_conf;
const char* malloc_conf = "dirty_decay_ms:-1,muzzy_decay_ms:-1";
}
