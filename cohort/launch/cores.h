// SPDX-License-Identifier: Apache-2.0
// The cores of this node, and how its workers share them.
#pragma once
#include <string>
#include <vector>

namespace cohort::launch {

/// Returns the numbers of the cores that this process may run on, ascending; never empty.
std::vector<int> usable_cores();

/// Reads --nproc-per-node: a number, or "cpu" or "auto", the usable cores.
/// Errors: ConfigError for other texts, "gpu" among them: no program computes on one.
int parse_nproc_per_node(const std::string& text);

/// Returns the cores of each of `num_workers` workers: contiguous parts of `cores`, equally many
/// for each; what does not divide is left over at the end.
/// Errors: ConfigError that names --bind-cores if there are fewer cores than workers.
std::vector<std::vector<int>> share_cores(const std::vector<int>& cores, int num_workers);

/// Returns "2 workers, 2 threads each, cores 0-1 | 2,5".
std::string describe_cores(const std::vector<std::vector<int>>& shares, const std::string& threads);

}  // namespace cohort::launch
