// SPDX-License-Identifier: Apache-2.0
// What a plan looks like to people.
#include <cstdio>

#include "cohort/base/columns.h"
#include "cohort/ps/plan.h"

namespace cohort::ps {
namespace {

std::string count_of(int64_t count, const std::string& thing) {
  return std::to_string(count) + " " + thing + (count == 1 ? "" : "s");
}

std::string shape_text(const ParameterShape& parameter) {
  std::string text;
  for (const int64_t size : parameter.shape)
    text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

std::string range_text(const Block& block) {
  return "[" + std::to_string(block.begin) + ", " + std::to_string(block.end) + ")";
}

std::string server_text(const Plan& plan, int server) {
  return "server " + std::to_string(server) + " " + plan.servers[static_cast<size_t>(server)];
}

// "2 blocks, 80400 elements, 50.0 %".
std::string share_text(const Plan& plan, int server) {
  int64_t all = 0;
  for (const Block& block : plan.blocks) all += block.size();
  const int64_t own = plan.elements_of(server);
  char percent[32];
  std::snprintf(percent, sizeof(percent), "%.1f %%",
                all == 0 ? 0.0 : 100.0 * static_cast<double>(own) / static_cast<double>(all));
  return count_of(static_cast<int64_t>(plan.blocks_of(server).size()), "block") + ", " +
         count_of(own, "element") + ", " + percent;
}

std::string group_text(const GroupInfo& group) {
  std::string text =
      "mode collective: a process group of " + count_of(group.world_size, "trainer") + "\n";
  for (size_t rank = 0; rank < group.endpoints.size(); ++rank) {
    text += "  rank " + std::to_string(rank) + " " + group.endpoints[rank] +
            (rank == 0 ? ", where the ranks meet\n" : "\n");
  }
  return text;
}

}  // namespace

std::string Plan::text() const {
  if (group) return group_text(*group);
  std::string text = std::string("mode pserver, ") + (options.sync_mode ? "sync" : "async") + ": " +
                     count_of(options.trainers, "trainer") + ", " +
                     count_of(static_cast<int64_t>(servers.size()), "server") + ", " +
                     options.split_method.name + ", " +
                     (options.slice_var_up ? "blocks of " + std::to_string(options.min_block_size) +
                                                 " elements or more"
                                           : "whole parameters") +
                     "\n";
  std::vector<Row> rows{{"block", "shape", "elements", "count", "server"}};
  for (const Block& block : blocks) {
    rows.push_back({block.name, shape_text(parameters[static_cast<size_t>(block.parameter)]),
                    range_text(block), std::to_string(block.size()),
                    server_text(*this, block.server).substr(7)});
  }
  text += align_columns(rows, "  ");
  for (int server = 0; server < static_cast<int>(servers.size()); ++server) {
    text += server_text(*this, server) + ": " + share_text(*this, server) + "\n";
  }
  return text + "trainer 0 initialises\n";
}

}  // namespace cohort::ps
