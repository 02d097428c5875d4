// SPDX-License-Identifier: Apache-2.0
// Rows for serving: ids and vectors without what only training needs.
#pragma once
#include <cstdint>
#include <string>

#include "cohort/ps/table/row_table.h"

namespace cohort::ps {

struct ExportedRows {
  int64_t rows = 0;
  std::string sha256{};
};

/// Writes rows to a safetensors file in one step (base/atomic_file.h): `ids` [n], I64, sorted as
/// unsigned numbers, whose bits these are, and `weights` [n, width], F32, in the same order. Its
/// metadata: "table", "width", and "pushed_since", which is "0" where the file has every row.
///
/// With `pushed_since` > 0 (seconds since 1970) only rows pushed to then or later: the difference
/// to an export that was begun before. Rows that were dropped meanwhile are in no such file: a full
/// export forgets them.
/// Memory: 8 bytes a row.
/// Errors: ConfigError, c10::Error: the file's, the spill store's.
ExportedRows export_rows(const RowTable& table, const std::string& path, uint32_t pushed_since = 0);

}  // namespace cohort::ps
