// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/plan.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "cohort/base/endpoint_list.h"
#include "cohort/base/error.h"
#include "cohort/ps/endpoints.h"
#include "cohort/ps/id_hash.h"

namespace cohort::ps {
namespace {

constexpr int64_t kMaxElements = int64_t{1} << 60;

[[noreturn]] void refuse(const std::string& what, const std::string& expected,
                         const std::string& got) {
  throw ConfigError(what + ": expected " + expected + ", got " + got);
}

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// FNV-1a: std::hash may differ from library to library.
uint64_t hash_text(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

void check_parameters(const std::vector<ParameterShape>& parameters) {
  std::set<std::string> names;
  for (const ParameterShape& parameter : parameters) {
    if (!names.insert(parameter.name).second) {
      refuse("parameter " + parameter.name, "each name once", "it twice");
    }
    int64_t elements = 1;
    for (const int64_t size : parameter.shape) {
      if (size <= 0) {
        refuse("parameter " + parameter.name, "positive dimensions", std::to_string(size));
      }
      if (size > kMaxElements / elements) {
        refuse("parameter " + parameter.name, "at most 2^60 elements", "more");
      }
      elements *= size;
    }
  }
}

void check_trainer_id(const PlanOptions& options, int trainers) {
  if (options.trainer_id < 0 || options.trainer_id >= trainers) {
    refuse("trainer_id", "0 to trainers - 1 = " + std::to_string(trainers - 1),
           std::to_string(options.trainer_id));
  }
}

void check_for_servers(const PlanOptions& options) {
  if (!options.trainer_endpoints.empty()) {
    refuse("trainer_endpoints", "none in mode pserver", options.trainer_endpoints);
  }
  if (options.trainers < 1) refuse("trainers", "1 or more", std::to_string(options.trainers));
  if (options.min_block_size < 1) {
    refuse("min_block_size", "1 or more elements", std::to_string(options.min_block_size));
  }
  if (!options.split_method.server) {
    refuse("split_method", "a function", "none under the name '" + options.split_method.name + "'");
  }
}

// How many elements each block has; the last one may have fewer.
int64_t block_size(const ParameterShape& parameter, int num_servers, const PlanOptions& options) {
  const int64_t numel = parameter.numel();
  if (!options.slice_var_up) return numel;
  const int64_t most = std::max<int64_t>(1, numel / options.min_block_size);
  const int64_t size = divide_up(numel, std::min<int64_t>(num_servers, most));
  if (parameter.shape.size() < 2) return size;
  const int64_t row = numel / parameter.shape.front();
  return divide_up(size, row) * row;
}

void cut(Plan& plan) {
  for (size_t p = 0; p < plan.parameters.size(); ++p) {
    const ParameterShape& parameter = plan.parameters[p];
    const int64_t numel = parameter.numel();
    const int64_t size = block_size(parameter, static_cast<int>(plan.servers.size()), plan.options);
    for (int64_t begin = 0, index = 0; begin < numel; begin += size, ++index) {
      Block block;
      block.parameter = static_cast<int>(p);
      block.index = static_cast<int>(index);
      block.begin = begin;
      block.end = std::min(begin + size, numel);
      block.name = parameter.name;
      if (size < numel) block.name += ".block" + std::to_string(index);
      plan.blocks.push_back(std::move(block));
    }
  }
}

// In which order blocks are handed to the split method.
std::vector<size_t> order_of_dealing(const Plan& plan) {
  std::vector<size_t> order(plan.blocks.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (plan.options.slice_var_up) return order;
  for (size_t i = order.size(); i > 1; --i) {
    // Fisher and Yates's shuffle, drawn from a counter.
    std::swap(order[i - 1], order[server_of(i, static_cast<uint32_t>(i))]);
  }
  return order;
}

void place(Plan& plan) {
  const int num_servers = static_cast<int>(plan.servers.size());
  int64_t number = 0;
  for (const size_t i : order_of_dealing(plan)) {
    Block& block = plan.blocks[i];
    const int server = plan.options.split_method.server(block, number++, num_servers);
    if (server < 0 || server >= num_servers) {
      refuse("split_method " + plan.options.split_method.name,
             "a server from 0 to " + std::to_string(num_servers - 1) + " for " + block.name,
             std::to_string(server));
    }
    block.server = server;
  }
}

GroupInfo group_of(const PlanOptions& options) {
  if (!options.pservers.empty()) refuse("pservers", "none in mode collective", options.pservers);
  if (options.trainer_endpoints.empty()) {
    refuse("trainer_endpoints", "host:port,host:port in mode collective", "none");
  }
  GroupInfo group;
  group.endpoints = parse_endpoints("trainer_endpoints", options.trainer_endpoints);
  group.world_size = static_cast<int>(group.endpoints.size());
  group.rank = options.trainer_id;
  if (options.trainers != 1 && options.trainers != group.world_size) {
    refuse("trainers", "as many as trainer_endpoints, " + std::to_string(group.world_size),
           std::to_string(options.trainers));
  }
  check_trainer_id(options, group.world_size);
  const std::string& own = group.endpoints[static_cast<size_t>(group.rank)];
  if (!options.current_endpoint.empty() && options.current_endpoint != own) {
    refuse("current_endpoint",
           "that of trainer " + std::to_string(group.rank) + " in trainer_endpoints, " + own,
           options.current_endpoint);
  }
  return group;
}

}  // namespace

int64_t ParameterShape::numel() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

SplitMethod round_robin() {
  return {"RoundRobin", [](const Block&, int64_t number, int num_servers) {
            return static_cast<int>(number % num_servers);
          }};
}

SplitMethod hash_name() {
  return {"HashName", [](const Block& block, int64_t, int num_servers) {
            return static_cast<int>(
                server_of(hash_text(block.name), static_cast<uint32_t>(num_servers)));
          }};
}

SplitMethod split_method_named(const std::string& name) {
  for (const SplitMethod& method : {round_robin(), hash_name()}) {
    if (method.name == name) return method;
  }
  refuse("split_method", "RoundRobin or HashName", name);
}

PlanOptions::Mode plan_mode_named(const std::string& name) {
  if (name == "pserver") return PlanOptions::Mode::kPserver;
  if (name == "collective") return PlanOptions::Mode::kCollective;
  refuse("mode", "pserver or collective", name);
}

bool Plan::initialises() const {
  return options.trainer_id == 0 && (group || options.current_endpoint.empty());
}

int Plan::server_id() const {
  if (options.current_endpoint.empty() || group) {
    refuse("current_endpoint", "a server's own endpoint", "a trainer's plan");
  }
  return index_of_endpoint("current_endpoint", options.current_endpoint, servers);
}

std::vector<Block> Plan::blocks_of(int server) const {
  std::vector<Block> own;
  for (const Block& block : blocks) {
    if (block.server == server) own.push_back(block);
  }
  return own;
}

int64_t Plan::elements_of(int server) const {
  int64_t count = 0;
  for (const Block& block : blocks) count += block.server == server ? block.size() : 0;
  return count;
}

Plan plan(std::vector<ParameterShape> parameters, const PlanOptions& options) {
  check_parameters(parameters);
  Plan plan;
  plan.options = options;
  plan.parameters = std::move(parameters);
  if (options.mode == PlanOptions::Mode::kCollective) {
    plan.group = group_of(options);
    return plan;
  }
  check_for_servers(options);
  plan.servers = parse_server_endpoints("pservers", options.pservers);
  if (options.current_endpoint.empty()) {
    check_trainer_id(options, options.trainers);
  } else {
    index_of_endpoint("current_endpoint", options.current_endpoint, plan.servers);
  }
  cut(plan);
  place(plan);
  return plan;
}

}  // namespace cohort::ps
