// The rows of a table that a trainer uses in one step: which, their values, their gradients.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "cohort/ps/client/distinct_ids.h"
#include "cohort/ps/table/table_options.h"

namespace cohort::ps {

/// Threads: one.
class LookedUpRows {
 public:
  /// `fetch` brings the rows of ids at once, `prediction` as for a pull; for ids nobody announced.
  using Fetch =
      std::function<void(std::span<const uint64_t> ids, std::span<float> weights, bool prediction)>;
  LookedUpRows(const TableOptions& table, Fetch fetch);

  const TableOptions& table() const { return table_; }

  /// Rows that were announced and are under way or here.
  struct Batch {
    at::Tensor ids;  // As the user gave them: to know them again.
    DistinctIds distinct;
    std::vector<float> weights;    // [distinct x width]
    std::vector<float> gradients;  // Likewise, empty until backward.
  };

  void announce(const at::Tensor& ids, const int64_t* padding);
  /// Announced and not yet pulled; empty if there is none.
  std::shared_ptr<Batch>& announced() { return announced_; }
  /// Pulled, for the next forward.
  std::shared_ptr<Batch>& ready() { return ready_; }

  /// The batch of `ids`: the ready one, or one that is fetched now.
  std::shared_ptr<Batch> look_up(const at::Tensor& ids, const int64_t* padding, bool prediction);

  /// Batches whose backward came since the last `forget`.
  std::vector<std::shared_ptr<Batch>>& used() { return used_; }
  /// After a push: gradients begin with zeros again, and the rows are out of date.
  void forget();

 private:
  TableOptions table_;
  Fetch fetch_;
  std::shared_ptr<Batch> announced_;
  std::shared_ptr<Batch> ready_;
  std::vector<std::shared_ptr<Batch>> used_;
};

}  // namespace cohort::ps
