// SPDX-License-Identifier: Apache-2.0
// Which role this process has in a job with parameter servers: read from Paddle's environment,
// which `cohort run --servers` sets. Pure: reads variables, opens nothing.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace cohort::ps {

enum class Role { kTrainer, kServer };

/// One process's role in a job with parameter servers.
struct RoleInfo {
  Role role = Role::kTrainer;
  int trainers = 1;    ///< Trainers of the job.
  int trainer_id = 0;  ///< A trainer's number, in [0, trainers).
  std::vector<std::string>
      servers;        ///< "host:port" or "unix:PATH" of each, in the order of their numbers.
  int server_id = 0;  ///< A server's number: where its endpoint stands in `servers`.

  /// A server's own endpoint.
  const std::string& endpoint() const { return servers[static_cast<size_t>(server_id)]; }
};

/// Reads this process's role; nothing unless PADDLE_TRAINING_ROLE or a list of servers is set.
///
/// Variables, of alternatives the first that is set:
/// - role: PADDLE_TRAINING_ROLE or TRAINING_ROLE, which say PSERVER or TRAINER;
/// - servers: PADDLE_PSERVERS_IP_PORT_LIST, "host:port,unix:PATH", or PADDLE_PSERVER_IPS,
///   "host,host", with PADDLE_PSERVER_PORT, one port for all;
/// - number of trainers: PADDLE_TRAINERS_NUM or PADDLE_TRAINERS;
/// - a trainer's number: PADDLE_TRAINER_ID;
/// - a server's endpoint: PADDLE_CURRENT_ENDPOINT, or POD_IP with PADDLE_PORT, or
///   PADDLE_CURRENT_IP with PADDLE_PSERVER_PORT.
///
/// A process has a role where PADDLE_TRAINING_ROLE or a list of servers is set: the other variables
/// have uses elsewhere (comm/rank_info.h). Local.
/// Errors: ConfigError that lists the missing variables of an incomplete environment, or the
///         variable whose value is none: a role of another name, a number out of range, a server
///         that is not in the list.
std::optional<RoleInfo> role_from_environment();

/// Reads the servers alone, of whatever role the process is and if it has none; empty if no
/// variable lists them. Local.
/// Errors: ConfigError that names the variable of a list that is none, or the missing port.
std::vector<std::string> servers_from_environment();

}  // namespace cohort::ps
