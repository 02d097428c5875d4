// SPDX-License-Identifier: Apache-2.0
// What an embedding table is: plain values that every server of a job is given alike.
#pragma once
#include <cstdint>
#include <string>

#include "cohort/ps/update_rule.h"
#include "cohort/ps/wire_dtype.h"

namespace cohort::ps {

/// Where the weights of a new row come from: a function of (seed, table, id, element).
struct Initializer {
  enum class Kind { kZeros, kUniform, kNormal };
  Kind kind = Kind::kUniform;
  float scale = 0.01f;  ///< Uniform in [-scale, scale), or the standard deviation.
};

/// Entry policy: which ids get a row. Without a row an id is pulled as zeros, and pushes to it are
/// dropped. The key in JSON is "admission".
///
/// kCount counts ids without a row in 10 to 13 bytes each. Under a memory cap an eighth of it is
/// for the counts: when that is full, all are halved until half of it is free, and those at 0
/// forgotten. Without a cap nothing is forgotten.
struct EntryPolicy {
  enum class Kind { kAll, kCount, kProbability };
  Kind kind = Kind::kAll;
  uint32_t pushes = 1;     ///< kCount: a row from this push on; at most 256.
  double probability = 1;  ///< kProbability: of each push; drawn from (seed, id, step).
};

/// Which rows an eviction drops; 0 or less turns a rule off.
struct Eviction {
  int64_t time_to_live_s = 0;  ///< Rows without a push for this time.
  double minimum_score = 0;  ///< Rows of a lower score: pushes * decay^(whole days since the last).
  double decay = 0.98;
};

/// What happens when a push would need more memory than `memory_cap_bytes`. Which rows go depends
/// on rows alone, not on where they lie: equal pushes give equal tables, also across a restart.
enum class AtCap {
  kRefuse,          ///< New rows are not made, pushes to them are dropped and counted.
  kEvictLeastUsed,  ///< A sixteenth of the rows goes: fewest pushes first, then the oldest.
  kSpill,           ///< A sixteenth goes to RocksDB: longest not pushed to first.
};

struct TableOptions {
  /// Unique in its job: 1 to 100 letters, digits, '.', '_' and '-', not first a '.'; not "dense".
  std::string name;
  int64_t width = 16;  ///< Weights of a row ("dim"), 1 to 1,048,576.
  uint64_t seed = 1;
  RuleOptions rule{.rule = Rule::kRowwiseAdagrad};
  Initializer initializer;
  EntryPolicy entry;
  Eviction eviction;
  /// Of one server; 0: none. Counted by arithmetic: a row takes row_bytes(). A table that spills
  /// holds half as much again (8 to 256 MiB) and what RocksDB itself needs: docs/ps.md has figures.
  int64_t memory_cap_bytes = 0;
  AtCap at_cap = AtCap::kRefuse;
  /// Of weights in pulls and gradients in pushes; the rows themselves are float32.
  WireDtype wire_dtype = WireDtype::kFloat32;
};

/// Errors: ConfigError that names the table and the option.
void validate(const TableOptions& options);

/// What a row takes of the memory cap: itself and its place in the index, at most.
int64_t row_bytes(const TableOptions& options);

/// The options as JSON on one line; reading it gives the same values to the bit.
std::string to_text(const TableOptions& options);
/// Errors: ConfigError that names what is missing, unknown or of another type.
TableOptions table_options_of(const std::string& text);

/// Errors: ConfigError that names the table and the option, unless rows of a table with options
/// `stored` can be used in one with `wanted`: name, width, seed, rule and initializer must be the
/// same. The rule's numbers, entry policy, eviction, memory and wire_dtype may change.
void check_same_rows(const TableOptions& stored, const TableOptions& wanted);

}  // namespace cohort::ps
