#include "cohort/launch/options.h"

#include "cohort/base/error.h"

namespace cohort::launch {
namespace {

void require(bool holds, const std::string& flag, const std::string& expected,
             const std::string& got) {
  if (!holds) throw ConfigError(flag + ": expected " + expected + ", got " + got);
}

}  // namespace

void validate(const RunOptions& options) {
  require(options.nproc_per_node >= 1 && options.nproc_per_node <= 4096, "--nproc-per-node",
          "1 to 4096", std::to_string(options.nproc_per_node));
  require(options.nnodes >= 1 && options.nnodes <= 65536, "--nnodes", "1 to 65536",
          std::to_string(options.nnodes));
  require(options.node_rank >= 0 && options.node_rank < options.nnodes, "--node-rank",
          "0 to nnodes - 1 = " + std::to_string(options.nnodes - 1),
          std::to_string(options.node_rank));
  require(options.master_port >= 0 && options.master_port <= 65535, "--master-port",
          "0 (a free port) or 1 to 65535", std::to_string(options.master_port));
  require(options.grace.count() >= 0, "--grace", "seconds >= 0",
          std::to_string(options.grace.count()) + " ms");
  if (options.nnodes > 1) {
    require(options.master_port != 0, "--master-port", "a port when --nnodes > 1", "none");
    require(!options.master_addr.empty(), "--master-addr", "node 0's address when --nnodes > 1",
            "none");
  }
  require(!options.command.empty(), "PROGRAM", "a program to start after --", "nothing");
}

}  // namespace cohort::launch
