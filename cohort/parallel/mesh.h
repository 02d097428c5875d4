// The ranks of a job in two dimensions: those that compute one model together, and those that hold
// the same part of it.
#pragma once
#include <memory>

#include "cohort/comm/process_group.h"

namespace cohort::parallel {

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
  comm::ProcessGroup& data() { return data_ ? *data_ : world_; }
  /// The ranks with the other parts of this rank's model, which compute the same batches; null if
  /// the model is whole.
  comm::ProcessGroup* tensor() { return tensor_.get(); }

 private:
  comm::ProcessGroup& world_;
  std::unique_ptr<comm::ProcessGroup> data_, tensor_;
};

}  // namespace cohort::parallel
