// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/role.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "cohort/base/endpoint_list.h"
#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/ps/endpoints.h"

namespace cohort::ps {
namespace {

constexpr int kMaxTrainers = 1 << 20;
const char* const kServerList = "PADDLE_PSERVERS_IP_PORT_LIST";
const char* const kServerHosts = "PADDLE_PSERVER_IPS";
const char* const kServerPort = "PADDLE_PSERVER_PORT";
const char* const kTrainerId = "PADDLE_TRAINER_ID";

// The first of `names` that is set.
const char* first_set(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (env_string(name)) return name;
  }
  return nullptr;
}

// What the contract needs and the environment lacks; `found` is a variable that is set.
class Needs {
 public:
  explicit Needs(const char* found) : found_(found) {}

  // The first of `names` that is set; null, and noted as missing, if none is.
  const char* any_of(std::initializer_list<const char*> names) {
    const char* name = first_set(names);
    if (!name) miss(*names.begin());
    return name;
  }
  void miss(const std::string& what) { missing_ += (missing_.empty() ? "" : ", ") + what; }
  void check() const {
    if (missing_.empty()) return;
    throw ConfigError(std::string(found_) + " is set but " + missing_ +
                      " is not: set all of them, or none");
  }

 private:
  const char* found_;
  std::string missing_;
};

Role read_role(const char* name) {
  const std::string text = *env_string(name);
  if (text == "PSERVER") return Role::kServer;
  if (text == "TRAINER") return Role::kTrainer;
  throw ConfigError(std::string(name) + "=" + text + ": expected PSERVER or TRAINER");
}

// "a,b" and "80" are "a:80,b:80".
std::string with_port(std::string hosts, const std::string& port) {
  for (size_t comma = hosts.find(','); comma != std::string::npos;
       comma = hosts.find(',', comma + port.size() + 2)) {
    hosts.insert(comma, ":" + port);
  }
  return hosts + ":" + port;
}

std::vector<std::string> read_servers(Needs& needs) {
  if (const auto list = env_string(kServerList)) return parse_server_endpoints(kServerList, *list);
  const auto hosts = env_string(kServerHosts);
  const auto port = env_string(kServerPort);
  if (!hosts) needs.miss(kServerList);
  if (hosts && !port) needs.miss(kServerPort);
  if (!hosts || !port) return {};
  return parse_endpoints(std::string(kServerHosts) + " with " + kServerPort,
                         with_port(*hosts, *port));
}

// A server's own endpoint, after the name of the variables that gave it.
std::pair<std::string, std::string> own_endpoint(Needs& needs) {
  const auto current = env_string("PADDLE_CURRENT_ENDPOINT");
  if (current) return {"PADDLE_CURRENT_ENDPOINT", *current};
  for (const auto& [host, port] :
       {std::pair("POD_IP", "PADDLE_PORT"), std::pair("PADDLE_CURRENT_IP", kServerPort)}) {
    const auto host_value = env_string(host);
    const auto port_value = env_string(port);
    if (host_value && port_value) {
      return {std::string(host) + " with " + port, *host_value + ":" + *port_value};
    }
  }
  needs.miss("PADDLE_CURRENT_ENDPOINT");
  return {};
}

}  // namespace

std::optional<RoleInfo> role_from_environment() {
  const char* found = first_set({"PADDLE_TRAINING_ROLE", kServerList, kServerHosts});
  if (!found) return std::nullopt;
  Needs needs(found);
  RoleInfo info;
  const char* role = needs.any_of({"PADDLE_TRAINING_ROLE", "TRAINING_ROLE"});
  if (role) info.role = read_role(role);
  info.servers = read_servers(needs);
  const char* trainers = needs.any_of({"PADDLE_TRAINERS_NUM", "PADDLE_TRAINERS"});
  const bool serves = role && info.role == Role::kServer;
  const bool trains = role && info.role == Role::kTrainer;
  const auto own = serves ? own_endpoint(needs) : std::pair<std::string, std::string>();
  if (trains) needs.any_of({kTrainerId});
  needs.check();
  info.trainers = static_cast<int>(*env_int(trainers, 1, kMaxTrainers));
  if (trains) info.trainer_id = static_cast<int>(*env_int(kTrainerId, 0, info.trainers - 1));
  if (serves) info.server_id = index_of_endpoint(own.first, own.second, info.servers);
  return info;
}

std::vector<std::string> servers_from_environment() {
  const char* found = first_set({kServerList, kServerHosts});
  if (!found) return {};
  Needs needs(found);
  std::vector<std::string> servers = read_servers(needs);
  needs.check();
  return servers;
}

}  // namespace cohort::ps
