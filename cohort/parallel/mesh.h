// SPDX-License-Identifier: Apache-2.0
// The ranks of a process group as a grid with named axes, one for each kind of parallelism, and the
// process groups along them.
#pragma once
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cohort/comm/process_group.h"

namespace cohort::parallel {

/// One axis of a mesh.
struct MeshAxis {
  std::string name;  ///< Not empty, and different from the names of the other axes.
  int size = -1;     ///< Ranks along it, at least 1. -1, of one axis: what the other sizes leave.
};

struct DeviceMeshOptions {
  /// Name of the first axis that lies within a host; all axes after it do, too. Ranks are then
  /// ordered by host, in the order of the hosts' first ranks, and within a host by rank:
  /// ProcessGroup::hosts says where each runs, so ranks of a host need not be neighbours. One axis
  /// before it and one from it on may have size -1: the number of hosts, and the ranks of a host.
  /// Empty: ranks are ordered by number.
  std::string within_host;
};

/// A handle to a mesh, or to a sub-mesh: some axes of one. Copies refer to one mesh, which lives as
/// long as one of them. An empty handle refers to none.
///
///   auto mesh = cohort::init_device_mesh(world, {{"dp", 2}, {"tp", 4}});
///   DistributedDataParallel ddp(net, mesh["dp"]);
///   at::Tensor y = row_parallel_linear(x, weight, bias, mesh.group("tp"));
///
/// Ranks are laid out row by row: ranks along the last axis are neighbours. A line along an axis is
/// the ranks that differ in this axis alone; this rank is in one line of each axis. In the group of
/// a line, a rank's number is its coordinate.
///
/// Threads: one. Local: everything but `group` of several axes.
/// Errors:  c10::ValueError that names the axes and sizes, for an axis that the mesh does not have,
///          and of an empty handle.
class DeviceMesh {
 public:
  /// An empty handle.
  DeviceMesh() = default;

  explicit operator bool() const { return impl_ != nullptr; }

  std::vector<std::string> axis_names() const;
  bool has(const std::string& axis) const;
  int size() const;                               ///< Ranks of this rank's part of the (sub-)mesh.
  int size(const std::string& axis) const;        ///< Ranks along an axis.
  int coordinate(const std::string& axis) const;  ///< This rank's, in [0, size(axis)).

  /// The sub-mesh of one axis, or of several, listed in the mesh's order.
  DeviceMesh operator[](const std::string& axis) const;
  DeviceMesh operator[](std::initializer_list<const char*> axes) const;

  /// This rank's line along an axis.
  comm::ProcessGroup group(const std::string& axis) const { return (*this)[axis].group(); }
  /// The ranks that differ from this one in no axis but those of this (sub-)mesh, row by row. Of
  /// several axes the first call for them makes the groups: it is collective over `world` and
  /// blocks. Where that is all ranks in the order of their numbers, it is `world` itself.
  comm::ProcessGroup group(CallSite site = CallSite::here()) const;
  const comm::ProcessGroup& world() const;  ///< What the mesh was made of.

  std::string describe() const;  ///< "dp 2 x tp 4"

 private:
  struct Impl;
  friend DeviceMesh init_device_mesh(const comm::ProcessGroup& world, std::vector<MeshAxis> axes,
                                     const DeviceMeshOptions& options, CallSite site);
  friend DeviceMesh data_axes(const DeviceMesh& mesh);
  friend DeviceMesh model_axes(const DeviceMesh& mesh);
  DeviceMesh(std::shared_ptr<Impl> impl, std::vector<size_t> axes);
  Impl& impl() const;                          // c10::ValueError of an empty handle
  size_t find(const std::string& axis) const;  // its place in impl_->axes

  std::shared_ptr<Impl> impl_;
  std::vector<size_t> axes_;  // places in impl_->axes, ascending
};

/// Makes a mesh of all ranks of `world`, with a process group for each axis: row by row, as
/// torch.distributed's init_device_mesh. Collective over `world`, with the same arguments; blocks.
/// Errors: ConfigError that names axes and sizes unless these multiply to the number of ranks; with
///         `within_host` also for hosts with a number of ranks that does not fit, by name.
DeviceMesh init_device_mesh(const comm::ProcessGroup& world, std::vector<MeshAxis> axes,
                            const DeviceMeshOptions& options = {},
                            CallSite site = CallSite::here());

/// The axes along which ranks compute different batches, by their names: "dp", "dp_replicate" and
/// "dp_shard"; all but "tp". Local.
/// Errors: c10::ValueError for an axis of another name, and if there is none of these.
DeviceMesh data_axes(const DeviceMesh& mesh);
/// The axes of the ranks that train one model: the data axes of `mesh`, and "tp" if there is one in
/// `mesh` or in the mesh that this is a part of. Local.
/// Errors: as data_axes.
DeviceMesh model_axes(const DeviceMesh& mesh);

/// What a sharded model makes of a mesh.
struct ShardingGroups {
  comm::ProcessGroup shard;      ///< Its ranks share the model out.
  comm::ProcessGroup replicate;  ///< Its ranks hold the same shards; empty: nobody does.
};
/// One data axis: its ranks shard. Two: the ranks along "dp_shard" shard, those along "dp_replicate"
/// replicate (hybrid sharding, HSDP).
/// Errors: c10::ValueError for others, and as data_axes.
ShardingGroups sharding_groups(const DeviceMesh& mesh);

}  // namespace cohort::parallel

namespace cohort {
using parallel::DeviceMesh;
using parallel::init_device_mesh;
}  // namespace cohort
