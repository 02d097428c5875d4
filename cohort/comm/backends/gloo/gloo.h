// The Gloo engine inside libtorch, behind one function: no other file sees Gloo's headers.
#pragma once
#include <ATen/core/ivalue.h>
#include <chrono>
#include <string>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace cohort::comm {

/// Connects the ranks of `store` by Gloo over TCP on the interface that owns `address`
/// (an IP or host name of this machine). GLOO_SOCKET_IFNAME, where set, names the interface
/// instead.
///
/// Collective: every rank calls it; blocks until all have, at most `timeout`, which then bounds
/// every operation of the backend too. Errors: what c10d and Gloo throw; the caller maps it.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int world_size,
                                                    std::chrono::milliseconds timeout,
                                                    const std::string& address);

}  // namespace cohort::comm
