// SPDX-License-Identifier: Apache-2.0
#include "examples/ctr/table_limits.h"

#include <sstream>
#include <utility>

#include "cohort/base/error.h"

namespace ctr {
namespace {

using cohort::ConfigError;
using cohort::ps::AtCap;
using cohort::ps::EntryPolicy;
using cohort::ps::TableOptions;

constexpr std::pair<const char*, AtCap> kAtCaps[] = {{"refuse", AtCap::kRefuse},
                                                     {"evict_least_used", AtCap::kEvictLeastUsed},
                                                     {"spill", AtCap::kSpill}};

template <class Value>
std::string text_of(const char* flag, const Value& value) {
  std::ostringstream text;
  text << flag << " " << value;
  return text.str();
}

// Called after each flag, so that it is this one's value which the library does not take.
void check(const TableOptions& table, const std::string& flag) {
  try {
    validate(table);
  } catch (const ConfigError& error) {
    throw ConfigError(flag + ": " + cohort::one_line(error));
  }
}

AtCap at_cap_named(const std::string& name) {
  std::string names;
  for (const auto& [word, at_cap] : kAtCaps) {
    if (name == word) return at_cap;
    names += (names.empty() ? "" : ", ") + std::string(word);
  }
  throw ConfigError(text_of("--at-cap", name) + ": expected one of " + names);
}

void set_cap(TableOptions& table, const TableLimits& limits) {
  if (limits.memory_mib) {
    table.memory_cap_bytes = *limits.memory_mib * (int64_t{1} << 20);
    check(table, text_of("--table-memory-mib", *limits.memory_mib));
  }
  if (limits.at_cap.empty()) return;
  table.at_cap = at_cap_named(limits.at_cap);
  if (table.memory_cap_bytes == 0) {
    throw ConfigError(text_of("--at-cap", limits.at_cap) +
                      ": expected with --table-memory-mib, the cap that it speaks of");
  }
}

void set_entry_policy(TableOptions& table, const TableLimits& limits) {
  if (limits.admit_after) {
    table.entry = {.kind = EntryPolicy::Kind::kCount, .pushes = *limits.admit_after};
    check(table, text_of("--admit-after", *limits.admit_after));
  }
  if (limits.admit_probability) {
    table.entry = {.kind = EntryPolicy::Kind::kProbability,
                   .probability = *limits.admit_probability};
    check(table, text_of("--admit-probability", *limits.admit_probability));
  }
}

}  // namespace

TableOptions with_limits(TableOptions table, const TableLimits& limits) {
  set_cap(table, limits);
  set_entry_policy(table, limits);
  if (limits.row_ttl_s) {
    table.eviction.time_to_live_s = *limits.row_ttl_s;
    check(table, text_of("--row-ttl", *limits.row_ttl_s));
  }
  return table;
}

}  // namespace ctr
