// The ranks of a job in two dimensions: those that compute one model, and those that hold the same
// part of it.
#pragma once
#include <string>

#include "cohort/comm/process_group.h"

namespace cohort::parallel {

/// The ranks of a group in rows of `width` neighbours: rank r is in row r / width and in column
/// r % width. The groups of this rank's own row and column, named as said.
struct RankGrid {
  comm::ProcessGroup row, column;
};

/// Collective; blocks.
/// Errors: c10::ValueError unless `width` divides the number of ranks.
RankGrid make_rank_grid(const comm::ProcessGroup& group, int width, const std::string& row_name,
                        const std::string& column_name);

/// World = data x tensor. Ranks of one tensor group are neighbours, so that they share a host: rank
/// r has part r % tensor of the model, and is number r / tensor of those that have it.
///
/// Collective: constructor. Threads: one.
class Mesh {
 public:
  /// `tensor`: ranks that compute one model. 1 makes no groups.
  /// Errors: ConfigError if the number of ranks is no multiple of it; PeerError.
  Mesh(const comm::ProcessGroup& world, int tensor);

  const comm::ProcessGroup& world() const { return world_; }
  /// The ranks with this rank's part; each computes its own batches.
  const comm::ProcessGroup& data() const { return grid_.column ? grid_.column : world_; }
  /// The ranks with the other parts of this rank's model, which compute the same batches; empty
  /// if the model is whole.
  const comm::ProcessGroup& tensor() const { return grid_.row; }

 private:
  comm::ProcessGroup world_;
  RankGrid grid_;
};

}  // namespace cohort::parallel
