// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/endpoint_list.h"
#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/cli/counted.h"
#include "cohort/cli/milliseconds.h"
#include "cohort/cli/parse.h"
#include "cohort/cli/security_flags.h"
#include "cohort/ps/client/server_link.h"
#include "cohort/ps/client/timer_thread.h"
#include "cohort/ps/role.h"
#include "cohort/ps/rpc/rpc_channel.h"
#include "cohort/ps/rpc/security.h"

#include "apps/ps/commands.h"

namespace cohort::cli {

namespace {

using nlohmann::json;

struct AskFlags {
  std::string servers;
  double timeout_s = 5;
  bool as_json = false;
  ps::SecurityOptions security;
};

void add_ask_flags(CLI::App& app, AskFlags& flags) {
  app.add_option("--pservers", flags.servers,
                 "Endpoints of the servers, \"host:port,unix:PATH\" (default: from "
                 "PADDLE_PSERVERS_IP_PORT_LIST)");
  app.add_option("--timeout", flags.timeout_s, "Time to wait for a reply")
      ->type_name(kSeconds)
      ->capture_default_str()
      ->check(time_limit());
  add_client_security_flags(app, flags.security);
}

std::vector<std::string> endpoints_of(const AskFlags& flags) {
  if (!flags.servers.empty()) return parse_server_endpoints("--pservers", flags.servers);
  std::vector<std::string> servers = ps::servers_from_environment();
  if (servers.empty())
    throw ConfigError(
        "--pservers: expected the servers' endpoints, HOST:PORT,HOST:PORT, here or in "
        "PADDLE_PSERVERS_IP_PORT_LIST");
  return servers;
}

ps::Reply ask(const AskFlags& flags, const std::string& endpoint, int server, ps::Call call) {
  const std::chrono::milliseconds timeout = to_milliseconds(flags.timeout_s);
  ps::TimerThread timer;
  ps::ServerLink link(ps::make_rpc_channel({.endpoint = endpoint, .security = flags.security}),
                      {.server = server,
                       .endpoint = endpoint,
                       .attempt_timeout = timeout,
                       .server_timeout = timeout},
                      timer);
  return link.call({.call = call});
}

// The server's number and endpoint, and its reply; nothing of a server that is silent.
using TakeReply = std::function<void(int, const std::string&, const std::optional<ps::Reply>&)>;

// One that is gone is no reason to leave out the others. Returns which were silent and why, or an
// empty text.
std::string ask_all(const AskFlags& flags, ps::Call call, const TakeReply& take) {
  const auto endpoints = endpoints_of(flags);
  size_t silent = 0;
  std::string reasons;
  for (size_t i = 0; i < endpoints.size(); ++i) {
    const int server = static_cast<int>(i);
    std::optional<ps::Reply> reply;
    try {
      reply = ask(flags, endpoints[i], server, call);
    } catch (const c10::DistError& error) {
      ++silent;
      reasons += (reasons.empty() ? "" : "; ") + one_line(error);
    }
    take(server, endpoints[i], reply);
  }
  if (silent == 0) return "";
  return std::to_string(silent) + " of " + counted(endpoints.size(), "server") + " did not reply" +
         (call == ps::Call::kStop ? " and may still be running: " : ": ") + reasons;
}

void print_server(const json& status, const std::string& endpoint) {
  std::printf("server %d at %s, start %lld, up %.0f s, %s, %s%s\n", status.at("server").get<int>(),
              endpoint.c_str(), status.at("incarnation").get<long long>(),
              status.at("up_s").get<double>(), status.value("mode", "no job yet").c_str(),
              counted(status.at("steps").get<int64_t>(), "step").c_str(),
              status.at("initialised").get<bool>() ? "" : ", without values");
  const std::string failure = status.at("failure");
  if (!failure.empty()) std::printf("  failed: %s\n", failure.c_str());
  const std::string log_failure = status.at("log_failure");
  if (!log_failure.empty()) std::printf("  cannot log: %s\n", log_failure.c_str());
  std::printf(
      "  pushes %lld (%lld repeated), pulls %lld, refused %lld, %.1f MiB in, %.1f MiB out\n",
      status.at("pushes").get<long long>(), status.at("duplicates").get<long long>(),
      status.at("pulls").get<long long>(), status.at("refused").get<long long>(),
      status.at("bytes_in").get<double>() / (1 << 20),
      status.at("bytes_out").get<double>() / (1 << 20));
  const json& rates = status.at("per_s");
  std::printf(
      "  a second: %.0f pushes, %.0f pulls, %.0f rows pushed, %.0f pulled, %.1f MiB in, %.1f out\n",
      rates.at("pushes").get<double>(), rates.at("pulls").get<double>(),
      rates.at("rows_pushed").get<double>(), rates.at("rows_pulled").get<double>(),
      rates.at("bytes_in").get<double>() / (1 << 20),
      rates.at("bytes_out").get<double>() / (1 << 20));
  for (const json& table : status.at("tables")) {
    std::printf("  table %-16s %12lld rows %12lld spilled %10.1f MiB %6.1f bytes a row\n",
                table.at("name").get<std::string>().c_str(), table.at("rows").get<long long>(),
                table.at("cold_rows").get<long long>(), table.at("bytes").get<double>() / (1 << 20),
                table.at("bytes_per_row").get<double>());
  }
  for (const json& trainer : status.at("trainers")) {
    const bool lost = trainer.at("lost");
    std::printf("  trainer %-4lld %s, push %lld, ahead by %lld",
                trainer.at("trainer").get<long long>(),
                lost                               ? "lost"
                : trainer.at("member").get<bool>() ? "trains"
                                                   : "gone",
                trainer.at("last_push").get<long long>(), trainer.at("lead").get<long long>());
    if (trainer.contains("silent_s"))
      std::printf(", silent for %.1f s", trainer.at("silent_s").get<double>());
    std::printf("\n");
  }
}

int show_status(const AskFlags& flags) {
  json all = json::array();
  const std::string silence = ask_all(
      flags, ps::Call::kStatus,
      [&](int server, const std::string& endpoint, const std::optional<ps::Reply>& reply) {
        if (flags.as_json) {
          all.push_back(reply
                            ? json::parse(reply->text)
                            : json{{"server", server}, {"endpoint", endpoint}, {"no_reply", true}});
        } else if (reply) {
          print_server(json::parse(reply->text), endpoint);
        } else {
          std::printf("server %d at %s: no reply\n", server, endpoint.c_str());
        }
      });
  if (flags.as_json) std::printf("%s\n", all.dump(2).c_str());
  if (!silence.empty()) C10_THROW_ERROR(DistError, silence);
  return kExitOk;
}

int stop(const AskFlags& flags) {
  const std::string silence = ask_all(flags, ps::Call::kStop, [](auto&&...) {});
  if (!silence.empty()) C10_THROW_ERROR(DistError, silence);
  return kExitOk;
}

}  // namespace

void add_status_command(CLI::App& app, PsCommand& command) {
  auto flags = std::make_shared<AskFlags>();
  CLI::App* const status =
      app.add_subcommand("status", "Shows tables, rates and trainers of running servers");
  add_ask_flags(*status, *flags);
  status->add_flag("--json", flags->as_json, "Print JSON");
  status->callback([flags, &command] { command.run = [flags] { return show_status(*flags); }; });
}

void add_stop_command(CLI::App& app, PsCommand& command) {
  auto flags = std::make_shared<AskFlags>();
  CLI::App* const subcommand = app.add_subcommand("stop", "Ends running servers");
  add_ask_flags(*subcommand, *flags);
  subcommand->callback([flags, &command] { command.run = [flags] { return stop(*flags); }; });
}

}  // namespace cohort::cli
