// SPDX-License-Identifier: Apache-2.0
// The rows of a table that a trainer uses in one step: ids, values and gradients.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "cohort/ps/client/distinct_ids.h"
#include "cohort/ps/row_merger.h"
#include "cohort/ps/table/table_options.h"

namespace cohort::ps {

/// Threads: one.
class PrefetchedRows {
 public:
  /// `fetch` pulls rows that were not prefetched, and blocks; `prediction` as for a pull.
  using Fetch =
      std::function<void(std::span<const uint64_t> ids, std::span<float> weights, bool prediction)>;
  PrefetchedRows(const TableOptions& table, Fetch fetch);

  const TableOptions& table() const { return table_; }

  /// Rows that were prefetched: requested, or received.
  struct Batch {
    at::Tensor ids;  // As the user gave them: compared with those of forward.
    DistinctIds distinct;
    std::vector<float> weights;    // [distinct x width]
    std::vector<float> gradients;  // Likewise, empty until backward.
  };

  void prefetch(const at::Tensor& ids, const int64_t* padding);
  /// Returns the prefetched batch, whose weights a pull is to fill; nullptr if there is none.
  std::shared_ptr<Batch> start_pull();
  /// That batch is ready for the next forward. Rows of an earlier pull are out of date.
  void finish_pull() { ready_ = std::move(arriving_); }

  /// The batch of `ids`: the ready one, or one that is fetched now.
  std::shared_ptr<Batch> look_up(const at::Tensor& ids, const int64_t* padding, bool prediction);

  /// Batches whose backward ran since the last `forget`.
  std::vector<std::shared_ptr<Batch>>& used() { return used_; }
  /// Their gradients, each id once; valid until the next call, or `forget`.
  struct Gradients {
    std::span<const uint64_t> ids;
    std::span<const float> values;
  };
  Gradients gradients();
  /// After a push: clears the gradients and drops the rows, which are out of date.
  void forget();

 private:
  std::shared_ptr<Batch> make_batch(const at::Tensor& ids, const int64_t* padding) const;

  TableOptions table_;
  Fetch fetch_;
  std::shared_ptr<Batch> prefetched_;
  std::shared_ptr<Batch> arriving_;
  std::shared_ptr<Batch> ready_;
  std::vector<std::shared_ptr<Batch>> used_;
  RowMerger merger_;
};

}  // namespace cohort::ps
