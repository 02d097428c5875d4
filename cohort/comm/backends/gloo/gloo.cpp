// Debian's Gloo headers describe an older Gloo than the one inside libtorch: this file only passes
// shared pointers around and never touches a Gloo object.
#define USE_C10D_GLOO
#include "cohort/comm/backends/gloo/gloo.h"

#include <cstdlib>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace cohort::comm {

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int world_size,
                                                    std::chrono::milliseconds timeout,
                                                    const std::string& address) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  options->devices.push_back(interface != nullptr && *interface != '\0'
                                 ? c10d::ProcessGroupGloo::createDeviceForInterface(interface)
                                 : c10d::ProcessGroupGloo::createDeviceForHostname(address));
  options->threads = 1;  // Buckets arrive one after another; a second thread only takes a core.
  auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, world_size, options);
  backend->setSequenceNumberForGroup();
  return backend;
}

}  // namespace cohort::comm
