// SPDX-License-Identifier: Apache-2.0
// The flags of `ctr train` for what its table may hold, as options of the table.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "cohort/ps/table/table_options.h"

namespace ctr {

/// Each one as on the command line; those not given leave the table's option as it is.
struct TableLimits {
  std::optional<int64_t> memory_mib;  ///< --table-memory-mib; 0: no cap.
  std::string at_cap;                 ///< --at-cap: "refuse", "evict_least_used", "spill".
  std::optional<uint32_t> admit_after;
  std::optional<double> admit_probability;
  std::optional<int64_t> row_ttl_s;
};

/// Errors: ConfigError that names the flag, with the library's word on its value.
cohort::ps::TableOptions with_limits(cohort::ps::TableOptions table, const TableLimits& limits);

}  // namespace ctr
