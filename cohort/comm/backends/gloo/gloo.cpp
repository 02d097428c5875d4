// Debian's Gloo headers describe an older Gloo than the one inside libtorch: this file only passes
// shared pointers around and never touches a Gloo object.
#define USE_C10D_GLOO
#include "cohort/comm/backends/gloo/gloo.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace cohort::comm {
namespace {

class NumberedGloo : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;
  void number_next(uint32_t number) { collectiveCounter_ = number; }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendRequest& request) {
  using Gloo = c10d::ProcessGroupGloo;
  auto options = Gloo::Options::create(request.timeout);
  options->devices.push_back(request.interface.empty()
                                 ? Gloo::createDeviceForHostname(request.address)
                                 : Gloo::createDeviceForInterface(request.interface));
  options->threads = 1;  // Buckets arrive one after another; a second thread only takes a core.
  auto backend =
      c10::make_intrusive<NumberedGloo>(request.store, request.rank, request.world_size, options);
  backend->setSequenceNumberForGroup();
  return backend;
}

void number_next_collective(c10d::Backend& backend, uint32_t number) {
  if (auto* gloo = dynamic_cast<NumberedGloo*>(&backend)) gloo->number_next(number);
}

}  // namespace cohort::comm
