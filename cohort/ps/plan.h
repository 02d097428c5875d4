// SPDX-License-Identifier: Apache-2.0
// The partition of a model's dense parameters over servers: which block of which parameter lives
// where. A value; nothing is opened or sent here.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace cohort::ps {

/// A dense parameter, as the model names it. An empty shape is a scalar's.
struct ParameterShape {
  std::string name;
  std::vector<int64_t> shape;

  int64_t numel() const;
};

/// A contiguous part of one parameter's elements, in row-major order: [begin, end).
struct Block {
  int parameter = 0;  ///< Index in Plan::parameters.
  int index = 0;      ///< Number within its parameter, from 0.
  int64_t begin = 0;
  int64_t end = 0;
  int server = 0;    ///< Index in Plan::servers.
  std::string name;  ///< "fc.weight.block0", unique in the plan; "fc.weight" if it is not cut.

  int64_t size() const { return end - begin; }
};

/// Which server gets a block.
struct SplitMethod {
  std::string name;  ///< As logs show it.
  /// Returns a server in [0, num_servers) for `block`, the `number`th of all (block.server is not
  /// set yet). Called once for each block, in order; the same on every process of the job.
  std::function<int(const Block& block, int64_t number, int num_servers)> server;
};

/// Block `number` goes to server number % num_servers.
SplitMethod round_robin();
/// By a hash of the block's name that is the same on every machine: a block stays where it is
/// whatever other parameters the model has.
SplitMethod hash_name();
/// "RoundRobin" or "HashName".
/// Errors: ConfigError that names both.
SplitMethod split_method_named(const std::string& name);

/// What a plan is made from: the arguments of Fluid's DistributeTranspiler, by their names.
struct PlanOptions {
  enum class Mode {
    kPserver,     ///< Servers hold the parameters.
    kCollective,  ///< The trainers form a process group, and there are no servers.
  };
  int trainer_id = 0;             ///< This trainer, in [0, trainers). Servers: unused.
  int trainers = 1;               ///< Collective: the number of trainer_endpoints, or 1 (unset).
  std::string pservers;           ///< "host:port,unix:PATH".
  std::string trainer_endpoints;  ///< "host:port,host:port"; collective only.
  std::string current_endpoint;   ///< A server's own, one of pservers; empty for a trainer.
                                  ///< Collective: trainer_id's own, or empty.
  Mode mode = Mode::kPserver;
  bool sync_mode =
      true;  ///< A step closes when every trainer has pushed; else pushes apply as they come.
  bool slice_var_up = true;  ///< Cut large parameters; else each lives on one server.
  SplitMethod split_method = round_robin();
  int64_t min_block_size = 8192;  ///< Elements of a block, at least; the last one may have fewer.
};

/// Reads "pserver" or "collective".
/// Errors: ConfigError that names both.
PlanOptions::Mode plan_mode_named(const std::string& name);

/// This trainer's rank in the group that mode collective uses instead of servers.
struct GroupInfo {
  std::vector<std::string>
      endpoints;  ///< Of the trainers; the first one's host and port is the store's.
  int rank = 0;
  int world_size = 1;
};

/// The partition. Equal on all processes that are given equal names, shapes and options but for
/// trainer_id and current_endpoint.
struct Plan {
  PlanOptions options;
  std::vector<ParameterShape> parameters;
  std::vector<std::string> servers;  ///< Endpoints; empty in mode collective.
  std::vector<Block>
      blocks;  ///< By parameter, then element; they cover each parameter. Collective: none.
  std::optional<GroupInfo> group;  ///< In mode collective only.

  /// Whether all trainers begin with this process's parameters: trainer 0. The others pull.
  bool initialises() const;
  /// This server's number.
  /// Errors: ConfigError if options.current_endpoint is empty.
  int server_id() const;
  /// The blocks that live on `server`, in the plan's order.
  std::vector<Block> blocks_of(int server) const;
  /// Elements of the blocks on `server`.
  int64_t elements_of(int server) const;

  /// Whole lines for people: the options, each block with its place, each server's share.
  std::string text() const;
};

/// Cuts and places `parameters`, given in the model's order.
///
/// Slices: a parameter of n elements is cut into at most min(servers, max(1, n / min_block_size))
/// blocks of equal size, the last one with what is left; with two dimensions or more a block is
/// whole rows of the first. Without slice_var_up each parameter is one block, and blocks are dealt
/// out in a shuffled order that depends on their number alone: weights and biases alternate in
/// models, and taking turns would give one server all the weights. Local.
/// Errors: ConfigError that names the option or parameter: no servers, a trainer_id out of range, a
///         name given twice, a dimension that is not positive, more than 2^60 elements, a
///         split_method that names no server.
/// Source: Paddle Fluid 1.8, distribute_transpiler.py, slice_variable.
Plan plan(std::vector<ParameterShape> parameters, const PlanOptions& options);

}  // namespace cohort::ps
