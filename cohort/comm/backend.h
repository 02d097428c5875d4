// SPDX-License-Identifier: Apache-2.0
// The backends that carry collectives, by name: built in, registered by the program, or in a shared
// object beside it. Knows nothing of groups; cohort/comm/process_group.h asks here for the backend
// that its options name.
#pragma once
#include <c10/core/DeviceType.h>
#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/headeronly/version.h>
#include <vector>

namespace cohort::comm {

/// What a backend gets to connect the ranks of one group.
struct BackendRequest {
  c10::intrusive_ptr<c10d::Store>
      store;           ///< Seen by this group's ranks only; its keys are all the backend's.
  int rank = 0;        ///< In [0, world_size): the number within the group.
  int world_size = 1;  ///< Number of ranks in the group.
  std::chrono::milliseconds timeout{
      0};                 ///< Of connecting, and of every operation until setTimeout; > 0.
  std::string address;    ///< IP or host name of this machine to bind to; empty: any.
  std::string interface;  ///< Network interface to use instead, such as "eth0"; empty: none chosen.
  /// By rank: ranks of equal text can share memory; those of an empty one cannot.
  std::vector<std::string> memory;
  /// Whether the group's ranks on this host can have a core each: a rank that waits may spin.
  bool has_core_each = false;
};

/// A backend: which tensors it serves, and how to connect one.
struct BackendPlugin {
  c10::DeviceType device = c10::DeviceType::CPU;  ///< Where its tensors live.
  /// Connects this rank to its peers. Collective over the ranks of the request's store; blocks, at
  /// most `timeout`. A rank may drop the backend as soon as it has it, so this ends on no rank while
  /// another still needs that one to connect.
  /// Errors: ConfigError or c10::ValueError for bad settings; what the backend throws for the
  ///         network's fault.
  std::function<c10::intrusive_ptr<c10d::Backend>(const BackendRequest&)> make;
  /// For a backend of a device whose works keep their tensors: returns one that says whether the
  /// given one has ended, and keeps none. It is held until that has ended on the device, a tensor only
  /// as long as its user needs it. May return nothing: that work is not watched. Empty: the works
  /// themselves are held.
  std::function<c10::intrusive_ptr<c10d::Work>(const c10d::Work&)> progress = {};
};

/// Makes `plugin` known as `name` in this process; it goes before a backend of that name in a file.
/// Threads: any.
/// Errors:  c10::ValueError if the name is not [a-z0-9_]+, is registered or in use already, or
///          `make` is empty.
void register_backend(const std::string& name, BackendPlugin plugin);

/// Returns the backend called `name`; the reference stays good until the process ends.
///
/// Looks at backends that the program registered, at those built in ("gloo", "gloo_cuda",
/// "hierarchical", "shm"), then for the file
/// `libcohort_<name>.so` in the folders of COHORT_BACKEND_PATH (a colon between two), the program's
/// folder, its ../lib, the folder of libcohort_base.so and cohort/lib in it, where an installation
/// has its own, and where the dynamic loader looks. A file is loaded once and never
/// unloaded. Threads: any. Local; reads files. Errors: ConfigError if the name is not [a-z0-9_]+,
/// if nothing is called so (lists the names that exist and the
///         places that were searched), or if the file cannot be loaded, exports no
///         `cohort_backend`, or was built for another version of Cohort's interface or of libtorch
///         (names the file and both versions).
const BackendPlugin& find_backend(const std::string& name);

/// Version of BackendRequest and BackendAbi; a plug-in of another one is refused.
inline constexpr int kBackendAbiVersion = 3;

/// What a shared object says about its backend. The first two fields never move.
///
/// The object exports one C function, and needs no symbol of the program (docs/tutorial-backend.md
/// has a whole example):
///   extern "C" const cohort::comm::BackendAbi* cohort_backend();
/// Owner: the shared object, for as long as the process lives.
struct BackendAbi {
  int abi_version = kBackendAbiVersion;
  const char* libtorch_version = TORCH_VERSION;
  c10::DeviceType device = c10::DeviceType::CPU;
  c10::intrusive_ptr<c10d::Backend> (*make)(const BackendRequest&) = nullptr;
  c10::intrusive_ptr<c10d::Work> (*progress)(const c10d::Work&) =
      nullptr;  ///< BackendPlugin's; may be missing.
};

}  // namespace cohort::comm
