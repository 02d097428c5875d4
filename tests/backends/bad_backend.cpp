// SPDX-License-Identifier: Apache-2.0
// Plug-ins that find_backend must refuse; the build says which by a definition.
#include "cohort/comm/backend.h"

using cohort::comm::BackendAbi;

#if defined(BAD_VERSION)
static const BackendAbi abi{.abi_version = cohort::comm::kBackendAbiVersion + 41};
#elif defined(BAD_LIBTORCH)
static const BackendAbi abi{.libtorch_version = "1.13.1"};
#elif defined(BAD_MAKE)
static const BackendAbi abi{.make = nullptr};
#endif

#if defined(BAD_NULL)
extern "C" const BackendAbi* cohort_backend() {
  return nullptr;
}
#elif !defined(BAD_ENTRY)
extern "C" const BackendAbi* cohort_backend() {
  return &abi;
}
#endif
