// SPDX-License-Identifier: Apache-2.0
// Tables of plain text.
#pragma once
#include <set>
#include <string>
#include <vector>

namespace cohort {

using Row = std::vector<std::string>;

/// Returns one line for each row, `indent` first, in columns as wide as their widest cell with two
/// spaces between; all rows have as many cells. Cells of the columns `right` are aligned to the
/// right.
std::string align_columns(const std::vector<Row>& rows, const std::string& indent,
                          const std::set<size_t>& right = {});

}  // namespace cohort
