#include "cohort/parallel/mesh.h"

#include <string>
#include <vector>

#include "cohort/base/error.h"

namespace cohort::parallel {

Mesh::Mesh(comm::ProcessGroup& world, int tensor) : world_(world) {
  if (tensor < 1 || world.size() % tensor != 0) {
    throw ConfigError("--tensor-parallel " + std::to_string(tensor) +
                      ": expected a divisor of the number of ranks, " +
                      std::to_string(world.size()));
  }
  if (tensor == 1) return;
  // Every rank makes every group, and is in one of each kind.
  const auto make = [&](int first, int step, int count, const char* name,
                        std::unique_ptr<comm::ProcessGroup>& mine) {
    std::vector<int> ranks;
    for (int i = 0; i < count; ++i) ranks.push_back(first + i * step);
    if (auto group = world.subgroup(ranks, name)) mine = std::move(group);
  };
  const int data = world.size() / tensor;
  for (int d = 0; d < data; ++d) make(d * tensor, 1, tensor, "tensor", tensor_);
  for (int t = 0; t < tensor; ++t) make(t, tensor, data, "data", data_);
}

}  // namespace cohort::parallel
