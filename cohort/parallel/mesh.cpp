#include "cohort/parallel/mesh.h"

#include <string>
#include <vector>

#include "cohort/base/error.h"

namespace cohort::parallel {

RankGrid make_rank_grid(const comm::ProcessGroup& group, int width, const std::string& row_name,
                        const std::string& column_name) {
  // Every rank makes every group, and is in one of each kind.
  const auto make = [&](int first, int step, int count, const std::string& name,
                        comm::ProcessGroup& mine) {
    std::vector<int> ranks;
    for (int i = 0; i < count; ++i) ranks.push_back(first + i * step);
    if (auto made = group.subgroup(ranks, name)) mine = std::move(made);
  };
  TORCH_CHECK_VALUE(width >= 1 && group.size() % width == 0, "rank grid of width ", width, " (\"",
                    row_name, "\", \"", column_name,
                    "\"): expected a divisor of the number of ranks, ", group.size());
  RankGrid grid;
  const int height = group.size() / width;
  for (int y = 0; y < height; ++y) make(y * width, 1, width, row_name, grid.row);
  for (int x = 0; x < width; ++x) make(x, width, height, column_name, grid.column);
  return grid;
}

Mesh::Mesh(const comm::ProcessGroup& world, int tensor) : world_(world) {
  if (tensor < 1 || world.size() % tensor != 0) {
    throw ConfigError("--tensor-parallel " + std::to_string(tensor) +
                      ": expected a divisor of the number of ranks, " +
                      std::to_string(world.size()));
  }
  if (tensor > 1) grid_ = make_rank_grid(world, tensor, "tensor", "data");
}

}  // namespace cohort::parallel
