// SPDX-License-Identifier: Apache-2.0
// The weights that a row begins with: a function, so that no server needs to tell another.
#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "cohort/ps/table/table_options.h"

namespace cohort::ps {

/// A number in [0, 1) for (seed, id, number), and nothing else.
double uniform_of(uint64_t seed, uint64_t id, uint64_t number);

/// The initial weights of a table's rows. The bits are the same on every machine: no function of
/// the C library is in them.
/// Threads: immutable after construction.
class InitialWeights {
 public:
  /// Of `options`: seed, name and initializer.
  explicit InitialWeights(const TableOptions& options);

  /// Sets the weights of row `id`.
  void fill(uint64_t id, std::span<float> weights) const;

 private:
  Initializer initializer_;
  uint64_t key_;
};

}  // namespace cohort::ps
