// SPDX-License-Identifier: Apache-2.0
// CUDA at run time: programs link libtorch's CPU half alone.
#pragma once
#include <c10/core/Device.h>
#include <string>

#include "cohort/comm/rank_info.h"

namespace cohort::comm {

/// Loads libtorch's CUDA half into this process, once, and returns how many CUDA devices it has:
/// those of CUDA_VISIBLE_DEVICES if that is set.
///
/// libtorch_cuda.so is taken from the folder of libtorch_cpu.so. Loading takes about a second and
/// half a gigabyte, and is done only where there is a driver. Then cuda_kernels_file() is loaded.
/// Errors:  ConfigError in one line that names what is missing: the driver, its version, libtorch's
///          CUDA half or a library that it needs, or a device; or why the kernels cannot be loaded.
/// Threads: one. Local. Early in main: before torch::manual_seed, a backward and whatever else asks
///          libtorch for CUDA, for libtorch keeps the answer that there is none.
int init_cuda();

/// Returns the file with Cohort's own CUDA kernels, libcohort_cuda.so, which is searched for as
/// backends are (backend.h), but not where the dynamic loader looks. Empty if there is none:
/// operations of libtorch take their place.
/// Local; reads folders, loads nothing.
std::string cuda_kernels_file();

/// Returns the device that `name` asks for: "cpu", "cuda" (of this rank, as device_index()) or
/// "cuda:N", after init_cuda() if it is needed; likewise of another type whose driver this process
/// has loaded ("privateuseone:N", say, after find_backend of a plug-in that brings it). The device
/// is the current one of the calling thread then.
/// Errors: ConfigError for other names, for an N that is not there, and as init_cuda() and
///         device_index().
at::Device init_accelerator(const std::string& name, const RankInfo& info);

/// Returns which card CUDA device `index` of this process is, as the driver tells: the hexadecimal
/// digits of its UUID (of a part of a card that is shared by MIG: the part's). It is the same in
/// every process, whatever CUDA_VISIBLE_DEVICES says there. Empty if the driver does not tell.
/// Local; after init_cuda().
std::string card_uuid(int index);

}  // namespace cohort::comm
