// SPDX-License-Identifier: Apache-2.0
// The GPUs that programs see, and the cores beside each: --numa-binding node.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

/// Returns the entries of CUDA_VISIBLE_DEVICES that count, by CUDA's rule: those before a number
/// below 0. Nothing if it is not set; set to nothing, it hides all GPUs.
std::optional<std::vector<std::string>> visible_gpus();

/// Returns the cores of each of `num_workers` workers: those of `cores` that are on the NUMA node of
/// the worker's GPU.
///
/// Worker i has the i-th GPU that a program of this environment sees: of CUDA_VISIBLE_DEVICES if
/// that is set (numbers or UUIDs), else of all, in the order of their PCI addresses. GPUs whose
/// /dev/nvidia<Device Minor> this process may not read and write, such as those that a device
/// cgroup keeps from it, do not count. A GPU whose node the machine does not tell is on node 0, as
/// for torchrun. `root` is put before /dev, /proc and /sys.
/// Local; reads files.
/// Errors: ConfigError that names --numa-binding: fewer GPUs than workers, an entry of
///         CUDA_VISIBLE_DEVICES that is no GPU of this node, or a node without a core of `cores`.
std::vector<std::vector<int>> cores_beside_gpus(const std::vector<int>& cores, int num_workers,
                                                const std::string& root = "");

}  // namespace cohort::launch
