// SPDX-License-Identifier: Apache-2.0
// What a job is: the tables and dense blocks of its servers, and how its trainers work together.
// Trainer 0 hands it to every server; all must be told the same.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "cohort/ps/table/table_options.h"
#include "cohort/ps/update_rule.h"
#include "cohort/ps/wire_dtype.h"

namespace cohort::ps {

/// When a push takes effect.
enum class Mode {
  kSync,   ///< A step closes when every member has pushed it: one update from all gradients.
  kAsync,  ///< Each push is an update of its own, at once. Half-async and geo are kinds of
           ///< trainers: their servers work so.
};

enum class Reduce { kMean, kSum };

/// A piece of a dense parameter that one server holds.
struct BlockOptions {
  std::string parameter;
  int64_t begin = 0;  ///< Elements [begin, end) of the parameter, counted row by row.
  int64_t end = 0;
  int server = 0;
};

struct JobOptions {
  Mode mode = Mode::kSync;
  Reduce reduce =
      Reduce::kMean;        ///< kSync: over the trainers that pushed the step, in their order.
  int trainers = 1;         ///< Numbered from 0; a bare Client may have a higher number.
  int max_trainers = 4096;  ///< Every number is less: each is remembered, and waited for, for good.
  int servers = 1;
  int64_t max_staleness =
      -1;  ///< kAsync: a pull waits while its trainer is more steps ahead of the slowest
           ///< member (Ho et al. 2013, "stale synchronous parallel"); -1: never.
  /// Examples of a trainer in a step; 0: not given. Servers only compare it: a trainer with another
  /// is refused, since its steps, and those that it resumes after, are other examples.
  int64_t batch_size = 0;
  /// A server refuses a push, or initial values, with a NaN or an infinity by name, before it is
  /// logged: its trainer gets c10::ValueError, and can push no more. False: it is applied.
  bool error_if_nonfinite = true;
  RuleOptions dense_rule{.rule = Rule::kAdam, .learning_rate = 1e-3f};
  WireDtype dense_wire_dtype = WireDtype::kFloat32;  ///< Of the blocks' values in pulls and pushes.
  std::vector<BlockOptions> blocks;
  std::vector<TableOptions> tables;

  /// One line of JSON: equal options, equal text.
  std::string to_json() const;
  /// Errors: ConfigError that names the field.
  static JobOptions parse(const std::string& json);
  /// A hash of the text, which every message bears.
  uint64_t fingerprint() const;
};

/// Errors: ConfigError that names what is wrong: a table twice, a name that no file can bear, a
/// block without elements, whatever else a table would refuse ...
void validate(const JobOptions& options);

/// The first field in which a server's job and a trainer's differ: "/trainers is 2, this trainer's
/// 3". The number of servers first: all blocks depend on it.
std::string first_difference(const JobOptions& here, const JobOptions& there);

std::string to_string(Mode mode);
std::string to_string(Reduce reduce);

}  // namespace cohort::ps
