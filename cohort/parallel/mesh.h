// The ranks of a job in two dimensions: those that compute one model together, and those that hold
// the same part of it.
#pragma once
#include <memory>
#include <string>

#include "cohort/comm/process_group.h"

namespace cohort::parallel {

/// The ranks of a group in rows of `width` neighbours: rank r is in row r / width and in column
/// r % width. Owner: of the groups of its own row and column, named as said.
struct RankGrid {
  std::unique_ptr<comm::ProcessGroup> row, column;
};

/// Collective; blocks. `group` must outlive the result.
/// Errors: c10::ValueError unless `width` divides the number of ranks.
RankGrid make_rank_grid(comm::ProcessGroup& group, int width, const std::string& row_name,
                        const std::string& column_name);

/// World = data x tensor. Ranks of one tensor group are neighbours, so that they share a host: rank
/// r has part r % tensor of the model, and is number r / tensor of those that have it.
///
/// Owner: of the groups; `world` must outlive this. Collective: constructor. Threads: one.
class Mesh {
 public:
  /// `tensor`: ranks that compute one model. 1 makes no groups.
  /// Errors: ConfigError if the number of ranks is no multiple of it; PeerError.
  Mesh(comm::ProcessGroup& world, int tensor);

  comm::ProcessGroup& world() { return world_; }
  /// The ranks with this rank's part; each computes its own batches.
  comm::ProcessGroup& data() { return grid_.column ? *grid_.column : world_; }
  /// The ranks with the other parts of this rank's model, which compute the same batches; null if
  /// the model is whole.
  comm::ProcessGroup* tensor() { return grid_.row.get(); }

 private:
  comm::ProcessGroup& world_;
  RankGrid grid_;
};

}  // namespace cohort::parallel
