// SPDX-License-Identifier: Apache-2.0
// Reads the compact lists in Slurm's environment.
#pragma once
#include <string>
#include <vector>

namespace cohort::comm {

/// Returns the hosts of a node list in order: "a[1-3,7]b,c[01-02]" -> a1b a2b a3b a7b c01 c02.
/// Several brackets multiply, brackets may nest, numbers keep their leading zeros.
/// Errors: ConfigError that begins with `variable` for an unbalanced bracket, a bad range, or more
///         than 65,536 hosts.
std::vector<std::string> expand_node_list(const std::string& list, const std::string& variable);

/// Returns the tasks of each node: "2(x3),1" -> 2 2 2 1.
/// Errors: ConfigError that begins with `variable` for anything else.
std::vector<int> expand_task_counts(const std::string& list, const std::string& variable);

}  // namespace cohort::comm
