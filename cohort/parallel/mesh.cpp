// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/mesh.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "cohort/base/error.h"

namespace cohort::parallel {
namespace {

std::string text_of(const std::vector<MeshAxis>& axes) {
  std::string text;
  for (const MeshAxis& axis : axes)
    text += (text.empty() ? "" : " x ") + axis.name + " " + std::to_string(axis.size);
  return text;
}

[[noreturn]] void refuse(const std::vector<MeshAxis>& axes, const std::string& expected) {
  throw ConfigError("device mesh " + text_of(axes) + ": expected " + expected);
}

void check(const std::vector<MeshAxis>& axes) {
  if (axes.empty()) refuse(axes, "at least one axis");
  std::set<std::string> names;
  for (const MeshAxis& axis : axes) {
    if (axis.name.empty() || !names.insert(axis.name).second)
      refuse(axes, "a name of its own for each axis");
    if (axis.size < 1 && axis.size != -1)
      refuse(axes, "sizes of at least 1, or -1 for what is left");
  }
}

struct Host {
  std::string name;
  std::vector<int> ranks;
};

// In the order of their first ranks.
std::vector<Host> hosts_of(const comm::ProcessGroup& world) {
  std::vector<Host> hosts;
  std::map<std::string, size_t> places;
  const auto by_rank = world.hosts();
  for (int rank = 0; rank < world.size(); ++rank) {
    const std::string& host = by_rank[static_cast<size_t>(rank)];
    const auto [place, is_new] = places.emplace(host, hosts.size());
    if (is_new) hosts.push_back({host.substr(0, host.find('/')), {}});
    hosts[place->second].ranks.push_back(rank);
  }
  return hosts;
}

// The product of the sizes that are given, from axis `first` on.
int product(const std::vector<MeshAxis>& axes, size_t first) {
  int64_t product = 1;
  for (size_t i = first; i < axes.size(); ++i) {
    if (axes[i].size > 0) product *= axes[i].size;
    if (product > INT32_MAX) refuse(axes, "sizes that multiply to the number of ranks");
  }
  return static_cast<int>(product);
}

// Gives the axis of size -1 in [first, end), if there is one, its size.
void fill_rest(std::vector<MeshAxis>& axes, size_t first, int num_ranks, const std::string& what) {
  const int given = product(axes, first);
  MeshAxis* rest = nullptr;
  for (size_t i = first; i < axes.size(); ++i) {
    if (axes[i].size > 0) continue;
    if (rest != nullptr) refuse(axes, "one axis of size -1 at most");
    rest = &axes[i];
  }
  if (rest == nullptr ? given != num_ranks : num_ranks % given != 0)
    refuse(axes, "sizes that multiply to " + what + ", " + std::to_string(num_ranks));
  if (rest != nullptr) rest->size = num_ranks / given;
}

// Returns the ranks by host, and fills in the sizes from axis `inner` on, which lie within one.
std::vector<int> order_by_host(const comm::ProcessGroup& world, std::vector<MeshAxis>& axes,
                               size_t inner) {
  const std::vector<Host> hosts = hosts_of(world);
  bool is_given = true;
  for (size_t i = inner; i < axes.size(); ++i) is_given = is_given && axes[i].size > 0;
  const int width = is_given ? product(axes, inner) : static_cast<int>(hosts.front().ranks.size());
  bool fits = true;
  std::string counts;
  std::vector<int> ranks;
  for (const Host& host : hosts) {
    const int count = static_cast<int>(host.ranks.size());
    fits = fits && (is_given ? count % width == 0 : count == width);
    counts += (counts.empty() ? "" : ", ") + std::to_string(count) + " on " + host.name;
    ranks.insert(ranks.end(), host.ranks.begin(), host.ranks.end());
  }
  if (!fits) {
    refuse(axes,
           (is_given ? "a multiple of " + std::to_string(width) + " ranks" : "as many ranks") +
               " on each host, because " + axes[inner].name + " lies within a host; got " + counts);
  }
  fill_rest(axes, inner, width, "the number of ranks of a host");
  return ranks;
}

// Fills in sizes and returns the ranks, row by row.
std::vector<int> lay_out(const comm::ProcessGroup& world, std::vector<MeshAxis>& axes,
                         const std::string& within_host) {
  std::vector<int> ranks(static_cast<size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  if (!within_host.empty()) {
    const auto inner = std::ranges::find(axes, within_host, &MeshAxis::name);
    if (inner == axes.end()) refuse(axes, "the axis \"" + within_host + "\", to lie within a host");
    ranks = order_by_host(world, axes, static_cast<size_t>(inner - axes.begin()));
  }
  fill_rest(axes, 0, world.size(), "the number of ranks");
  return ranks;
}

}  // namespace

struct DeviceMesh::Impl {
  comm::ProcessGroup world;
  std::vector<MeshAxis> axes;
  std::vector<int> ranks;                                    // of the world, row by row
  std::map<std::vector<size_t>, comm::ProcessGroup> groups;  // by axes

  // By how much places in `ranks` of neighbours along an axis differ.
  int stride(size_t axis) const { return product(axes, axis + 1); }
  int coordinate(int place, size_t axis) const { return place / stride(axis) % axes[axis].size; }
  int own_place() const {
    return static_cast<int>(std::ranges::find(ranks, world.rank()) - ranks.begin());
  }

  // Every rank makes every group, and is in one.
  comm::ProcessGroup make_group(const std::vector<size_t>& along) const {
    std::vector<int> offsets{0};
    std::string name;
    for (const size_t axis : along) {
      name += (name.empty() ? "" : "_") + axes[axis].name;
      std::vector<int> finer;
      for (const int offset : offsets)
        for (int i = 0; i < axes[axis].size; ++i) finer.push_back(offset + i * stride(axis));
      offsets = std::move(finer);
    }
    if (offsets.size() == ranks.size() && std::ranges::is_sorted(ranks)) return world;
    comm::ProcessGroup own;
    for (int place = 0; place < world.size(); ++place) {
      const auto is_first = [&](size_t axis) { return coordinate(place, axis) == 0; };
      if (!std::ranges::all_of(along, is_first)) continue;
      std::vector<int> line;
      for (const int offset : offsets) line.push_back(ranks[static_cast<size_t>(place + offset)]);
      if (auto made = world.subgroup(line, name, {.keep_order = true})) own = std::move(made);
    }
    return own;
  }
};

DeviceMesh::DeviceMesh(std::shared_ptr<Impl> impl, std::vector<size_t> axes)
    : impl_(std::move(impl)), axes_(std::move(axes)) {}

DeviceMesh init_device_mesh(const comm::ProcessGroup& world, std::vector<MeshAxis> axes,
                            const DeviceMeshOptions& options, CallSite site) {
  const CallSiteScope scope(site);
  check(axes);
  std::vector<int> ranks = lay_out(world, axes, options.within_host);
  auto impl = std::make_shared<DeviceMesh::Impl>(
      DeviceMesh::Impl{.world = world, .axes = std::move(axes), .ranks = std::move(ranks)});
  std::vector<size_t> all(impl->axes.size());
  std::iota(all.begin(), all.end(), size_t{0});
  for (const size_t axis : all) impl->groups[{axis}] = impl->make_group({axis});
  return {std::move(impl), std::move(all)};
}

DeviceMesh::Impl& DeviceMesh::impl() const {
  TORCH_CHECK_VALUE(impl_, "expected a device mesh, got an empty handle");
  return *impl_;
}

size_t DeviceMesh::find(const std::string& axis) const {
  const auto name = [&axes = impl().axes](size_t each) { return axes[each].name; };
  const auto found = std::ranges::find(axes_, axis, name);
  TORCH_CHECK_VALUE(found != axes_.end(), "device mesh ", describe(), " has no axis \"", axis,
                    "\"");
  return *found;
}

std::string DeviceMesh::describe() const {
  std::vector<MeshAxis> own;
  for (const size_t axis : axes_) own.push_back(impl().axes[axis]);
  return text_of(own);
}

std::vector<std::string> DeviceMesh::axis_names() const {
  const Impl& my = impl();
  std::vector<std::string> names;
  for (const size_t axis : axes_) names.push_back(my.axes[axis].name);
  return names;
}

bool DeviceMesh::has(const std::string& axis) const {
  const auto names = axis_names();
  return std::ranges::find(names, axis) != names.end();
}

int DeviceMesh::size() const {
  const Impl& my = impl();
  int size = 1;
  for (const size_t axis : axes_) size *= my.axes[axis].size;
  return size;
}

int DeviceMesh::size(const std::string& axis) const {
  const size_t found = find(axis);
  return impl_->axes[found].size;
}

int DeviceMesh::coordinate(const std::string& axis) const {
  const size_t found = find(axis);
  return impl_->coordinate(impl_->own_place(), found);
}

DeviceMesh DeviceMesh::operator[](const std::string& axis) const {
  return {impl_, {find(axis)}};
}

DeviceMesh DeviceMesh::operator[](std::initializer_list<const char*> axes) const {
  std::vector<size_t> found;
  for (const char* axis : axes) found.push_back(find(axis));
  TORCH_CHECK_VALUE(!found.empty() && std::ranges::is_sorted(found, std::ranges::less_equal{}),
                    "device mesh ", describe(), ": expected axes in the mesh's order, each once");
  return {impl_, std::move(found)};
}

comm::ProcessGroup DeviceMesh::group(CallSite site) const {
  const CallSiteScope scope(site);
  const auto known = impl().groups.find(axes_);
  if (known != impl_->groups.end()) return known->second;
  return impl_->groups[axes_] = impl_->make_group(axes_);
}

const comm::ProcessGroup& DeviceMesh::world() const {
  return impl().world;
}

DeviceMesh data_axes(const DeviceMesh& mesh) {
  std::vector<size_t> found;
  for (const std::string& name : mesh.axis_names()) {
    const bool is_data = name == "dp" || name == "dp_replicate" || name == "dp_shard";
    if (is_data) found.push_back(mesh.find(name));
    TORCH_CHECK_VALUE(is_data || name == "tp", "device mesh ", mesh.describe(),
                      ": expected \"dp\", or \"dp_replicate\" and \"dp_shard\", as data axes, and "
                      "\"tp\" for tensor parallelism, got \"",
                      name, "\": pass the data axes alone, as mesh[\"dp\"]");
  }
  TORCH_CHECK_VALUE(!found.empty(), "device mesh ", mesh.describe(),
                    ": expected a data axis, \"dp\", or \"dp_replicate\" and \"dp_shard\"; it may "
                    "have size 1");
  return {mesh.impl_, std::move(found)};
}

DeviceMesh model_axes(const DeviceMesh& mesh) {
  const DeviceMesh data = data_axes(mesh);
  std::vector<size_t> found;
  for (size_t axis = 0; axis < mesh.impl_->axes.size(); ++axis) {
    const std::string& name = mesh.impl_->axes[axis].name;
    if (name == "tp" || data.has(name)) found.push_back(axis);
  }
  return {mesh.impl_, std::move(found)};
}

ShardingGroups sharding_groups(const DeviceMesh& mesh) {
  const DeviceMesh data = data_axes(mesh);
  const size_t count = data.axis_names().size();
  if (count == 1) return {data.group(), {}};
  TORCH_CHECK_VALUE(
      count == 2 && !data.has("dp"),
      "sharding: expected the data axis \"dp\", or \"dp_replicate\" and \"dp_shard\", got ",
      data.describe());
  return {data.group("dp_shard"), data.group("dp_replicate")};
}

}  // namespace cohort::parallel
