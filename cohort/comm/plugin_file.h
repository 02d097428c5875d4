// SPDX-License-Identifier: Apache-2.0
// Finds and loads shared objects of Cohort's that no program links: backends, and CUDA kernels.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

namespace cohort::comm {

/// Returns the folders to search, in order: those of COHORT_BACKEND_PATH (a colon between two), the
/// program's, its ../lib, that of libcohort_base.so and cohort/lib in it.
std::vector<std::filesystem::path> plugin_folders();

/// Returns the path of `file` in the first of `folders` that has it; empty if none has. It has a
/// slash, so that the dynamic loader takes just this one.
std::string find_plugin_file(const std::string& file,
                             const std::vector<std::filesystem::path>& folders);

/// Loads the object at `path`, with the flags of dlopen(3), and returns its handle. A `path` without
/// a slash is looked up by the dynamic loader; null if it finds none.
/// Errors: ConfigError "`what` in `path` cannot be loaded: ...", also for a file with a slash in its
///         path that was cut short, whose loading would end the process.
void* load_plugin_file(const std::string& what, const std::string& path, int flags);

}  // namespace cohort::comm
