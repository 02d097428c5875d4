// SPDX-License-Identifier: Apache-2.0
// Files for serving out of a checkpoint: what predicts, without what only training needs.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace cohort::ps {

struct ServingFile {
  std::string path;
  int64_t count = 0;
  std::string what;  ///< "parameter" or "row".
};

/// Writes to `output` (made): "dense.safetensors", every dense parameter in one dimension under its
/// name, and for each table "<name>.safetensors", table/export_rows.h. With `pushed_since` > 0
/// tables are deltas. What is in `output` stays until all of the new files are written.
///
/// Memory: that of all servers together, but for rows beyond the memory cap of a table that spills.
/// Errors: ConfigError that names file and damage.
std::vector<ServingFile> export_for_serving(const std::string& checkpoint,
                                            const std::string& output, uint32_t pushed_since = 0);

}  // namespace cohort::ps
