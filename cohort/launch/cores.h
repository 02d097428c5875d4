// SPDX-License-Identifier: Apache-2.0
// The cores and GPUs of this node, and how its workers share the cores.
#pragma once
#include <string>
#include <vector>

#include "cohort/launch/options.h"

namespace cohort::launch {

/// Returns the numbers of the cores that this process may run on, ascending; never empty.
std::vector<int> usable_cores();

/// Returns how many GPUs a program of this environment sees: those of CUDA_VISIBLE_DEVICES if that
/// is set, else those of the machine (gpu_monitor.h).
int count_gpus();

/// Reads --nproc-per-node: a number, "cpu" or "auto", the usable cores, or "gpu", the GPUs.
/// Errors: ConfigError for other texts, and for "gpu" where there is none.
int parse_nproc_per_node(const std::string& text);

/// Returns the cores of each of `num_workers` workers: contiguous parts of `cores`, equally many
/// for each; what does not divide is left over at the end.
/// Errors: ConfigError that names --bind-cores if there are fewer cores than workers.
std::vector<std::vector<int>> share_cores(const std::vector<int>& cores, int num_workers);

/// Returns the cores of each worker of this node, by local rank, as options.bind_cores says; empty:
/// they are not bound.
/// Errors: as share_cores() and cores_beside_gpus().
std::vector<std::vector<int>> bound_cores(const RunOptions& options);

/// Returns how many threads each of these workers can have, so that no core has two.
int threads_each(const std::vector<std::vector<int>>& shares);

/// Returns "2 workers, 2 threads each, cores 0-1 | 2,5".
std::string describe_cores(const std::vector<std::vector<int>>& shares, const std::string& threads);

}  // namespace cohort::launch
