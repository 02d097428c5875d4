// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/module/host_ranks.h"

#include <cstring>
#include <numeric>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/ps/role.h"

namespace cohort::ps {
namespace {

std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<std::byte> bytes_of(const std::string& text) {
  std::vector<std::byte> bytes(text.size());
  if (!text.empty()) std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

}  // namespace

std::optional<Training> server_training(const std::string& strategy) {
  if (strategy == "ps-sync") return Training::kSync;
  if (strategy == "ps-async") return Training::kAsync;
  return std::nullopt;
}

void refuse_servers(const std::string& strategy) {
  const auto role = role_from_environment();
  if (!role || role->servers.empty()) return;
  throw ConfigError("--strategy " + strategy + " uses no parameter servers, and " +
                    std::to_string(role->servers.size()) +
                    " are there (PADDLE_PSERVERS_IP_PORT_LIST, cohort run --servers): expected "
                    "--strategy ps-sync or ps-async, or no servers");
}

HostRanks host_ranks(const comm::ProcessGroup& group) {
  return {.rank = group.rank(),
          .size = group.size(),
          .gather =
              [group](const std::vector<std::byte>& own) {
                std::vector<std::vector<std::byte>> all;
                for (const std::string& text : group.gather_object(text_of(own)))
                  all.push_back(bytes_of(text));
                return all;
              },
          .broadcast =
              [group](std::vector<std::byte>& bytes) {
                const std::string own = group.rank() == 0 ? text_of(bytes) : std::string();
                bytes = bytes_of(group.broadcast_object(own));
              }};
}

TrainerInfo trainer_info_from_environment(const comm::ProcessGroup& group, Training training,
                                          const SecurityOptions& security, int ranks_per_trainer,
                                          CallSite site) {
  TrainerInfo info;
  info.session = with_environment({.training = training});
  info.session.client.security = security;
  if (info.session.trainers != group.size() || info.session.trainer != group.rank()) {
    throw ConfigError("PADDLE_TRAINER_ID, PADDLE_TRAINERS_NUM: expected this process's rank " +
                      std::to_string(group.rank()) + " of " + std::to_string(group.size()) +
                      ", got " + std::to_string(info.session.trainer) + " of " +
                      std::to_string(info.session.trainers));
  }
  if (ranks_per_trainer == 1) return info;
  if (ranks_per_trainer < 1 || group.size() % ranks_per_trainer != 0) {
    throw ConfigError("--ps-host-ranks " + std::to_string(ranks_per_trainer) +
                      ": expected a divisor of the number of ranks, " +
                      std::to_string(group.size()));
  }
  for (int first = 0; first < group.size(); first += ranks_per_trainer) {
    std::vector<int> ranks(static_cast<size_t>(ranks_per_trainer));
    std::iota(ranks.begin(), ranks.end(), first);
    auto members = group.subgroup(ranks, "trainer", {}, site);
    if (members) info.host = std::move(members);
  }
  info.session.trainer /= ranks_per_trainer;
  info.session.trainers /= ranks_per_trainer;
  info.session.host = host_ranks(info.host);
  return info;
}

}  // namespace cohort::ps
