// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/role.h"

#include <cstdlib>
#include <gtest/gtest.h>
#include <map>

#include "cohort/base/endpoint_list.h"
#include "cohort/base/error.h"
#include "cohort/ps/endpoints.h"

namespace cohort::ps {
namespace role_test {

using Variables = std::map<std::string, std::string>;

// Sets exactly these variables of the contract, and clears them again.
class Environment {
 public:
  explicit Environment(const Variables& variables) {
    clear();
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  }
  ~Environment() { clear(); }

 private:
  static void clear() {
    for (const char* name :
         {"PADDLE_TRAINING_ROLE", "TRAINING_ROLE", "PADDLE_PSERVERS_IP_PORT_LIST",
          "PADDLE_PSERVER_IPS", "PADDLE_PSERVER_PORT", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINERS",
          "PADDLE_TRAINER_ID", "PADDLE_CURRENT_ENDPOINT", "POD_IP", "PADDLE_PORT",
          "PADDLE_CURRENT_IP"}) {
      unsetenv(name);
    }
  }
};

std::optional<RoleInfo> role_of(const Variables& variables) {
  const Environment environment(variables);
  return role_from_environment();
}

std::string error_of(const Variables& variables) {
  try {
    role_of(variables);
  } catch (const ConfigError& error) {
    return one_line(error);
  }
  return "no error";
}

const Variables kTrainer{{"PADDLE_TRAINING_ROLE", "TRAINER"},
                         {"PADDLE_PSERVERS_IP_PORT_LIST", "10.0.0.1:6174,10.0.0.2:6175"},
                         {"PADDLE_TRAINERS_NUM", "3"},
                         {"PADDLE_TRAINER_ID", "2"}};

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

TEST(RoleTest, AbsentContractIsNoRole) {
  EXPECT_FALSE(role_of({}));
  // These alone are the contract of collectives.
  EXPECT_FALSE(role_of({{"PADDLE_TRAINER_ID", "0"}, {"PADDLE_TRAINERS_NUM", "2"}}));
}

TEST(RoleTest, TrainerIsReadWhole) {
  const auto place = role_of(kTrainer);
  ASSERT_TRUE(place);
  EXPECT_EQ(place->role, Role::kTrainer);
  EXPECT_EQ(place->trainers, 3);
  EXPECT_EQ(place->trainer_id, 2);
  EXPECT_EQ(place->servers, (std::vector<std::string>{"10.0.0.1:6174", "10.0.0.2:6175"}));
}

TEST(RoleTest, ServersAreReadWithoutARole) {
  const auto servers_of = [](const Variables& variables) {
    const Environment environment(variables);
    return servers_from_environment();
  };
  EXPECT_TRUE(servers_of({}).empty());
  EXPECT_TRUE(servers_of({{"PADDLE_TRAINING_ROLE", "TRAINER"}}).empty());
  EXPECT_EQ(servers_of({{"PADDLE_PSERVERS_IP_PORT_LIST", "h:1,unix:a"}}),
            (std::vector<std::string>{"h:1", "unix:a"}));
  EXPECT_EQ(servers_of({{"PADDLE_PSERVER_IPS", "g,h"}, {"PADDLE_PSERVER_PORT", "7"}}),
            (std::vector<std::string>{"g:7", "h:7"}));
  try {
    servers_of({{"PADDLE_PSERVER_IPS", "g"}});
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_EQ(one_line(error),
              "PADDLE_PSERVER_IPS is set but PADDLE_PSERVER_PORT is not: set all of them, or none");
  }
}

TEST(RoleTest, ServerFindsItselfByEachSpellingOfItsEndpoint) {
  const Variables server =
      with(without(kTrainer, "PADDLE_TRAINER_ID"), {{"PADDLE_TRAINING_ROLE", "PSERVER"}});
  for (const Variables& own :
       {Variables{{"PADDLE_CURRENT_ENDPOINT", "10.0.0.2:6175"}},
        Variables{{"POD_IP", "10.0.0.2"}, {"PADDLE_PORT", "6175"}},
        Variables{{"PADDLE_CURRENT_IP", "10.0.0.2"}, {"PADDLE_PSERVER_PORT", "6175"}}}) {
    const auto place = role_of(with(server, own));
    ASSERT_TRUE(place);
    EXPECT_EQ(place->role, Role::kServer);
    EXPECT_EQ(place->server_id, 1);
    EXPECT_EQ(place->endpoint(), "10.0.0.2:6175");
  }
}

TEST(RoleTest, ServersMayBeUnixSockets) {
  const Variables job =
      with(kTrainer, {{"PADDLE_PSERVERS_IP_PORT_LIST", "unix:/run/a,unix:b/c,h:1"}});
  EXPECT_EQ(role_of(job)->servers, (std::vector<std::string>{"unix:/run/a", "unix:b/c", "h:1"}));
  EXPECT_EQ(role_of(with(job, {{"PADDLE_TRAINING_ROLE", "PSERVER"},
                               {"PADDLE_CURRENT_ENDPOINT", "unix:b/c"}}))
                ->server_id,
            1);
  EXPECT_EQ(error_of(with(job, {{"PADDLE_PSERVERS_IP_PORT_LIST", "unix:"}})),
            "PADDLE_PSERVERS_IP_PORT_LIST: expected host:port,host:port (or unix:PATH), got "
            "'unix:'");
  EXPECT_THROW(parse_endpoints("trainer_endpoints", "unix:/run/a"), ConfigError);
}

TEST(RoleTest, OlderSpellingsMeanTheSame) {
  const auto place = role_of({{"TRAINING_ROLE", "TRAINER"},
                              {"PADDLE_PSERVER_IPS", "10.0.0.1,10.0.0.2,h"},
                              {"PADDLE_PSERVER_PORT", "6174"},
                              {"PADDLE_TRAINERS", "1"},
                              {"PADDLE_TRAINER_ID", "0"}});
  ASSERT_TRUE(place);
  EXPECT_EQ(place->servers, (std::vector<std::string>{"10.0.0.1:6174", "10.0.0.2:6174", "h:6174"}));
  EXPECT_EQ(place->trainers, 1);
}

TEST(RoleTest, AnIncompleteEnvironmentNamesWhatIsMissing) {
  EXPECT_EQ(error_of({{"PADDLE_TRAINING_ROLE", "TRAINER"}}),
            "PADDLE_TRAINING_ROLE is set but PADDLE_PSERVERS_IP_PORT_LIST, PADDLE_TRAINERS_NUM, "
            "PADDLE_TRAINER_ID is not: set all of them, or none");
  EXPECT_EQ(error_of(without(kTrainer, "PADDLE_TRAINING_ROLE")),
            "PADDLE_PSERVERS_IP_PORT_LIST is set but PADDLE_TRAINING_ROLE is not: set all of them, "
            "or none");
  EXPECT_EQ(error_of(with(kTrainer, {{"PADDLE_TRAINING_ROLE", "PSERVER"}})),
            "PADDLE_TRAINING_ROLE is set but PADDLE_CURRENT_ENDPOINT is not: set all of them, or "
            "none");
  EXPECT_EQ(error_of(with(without(kTrainer, "PADDLE_PSERVERS_IP_PORT_LIST"),
                          {{"PADDLE_PSERVER_IPS", "10.0.0.1"}})),
            "PADDLE_TRAINING_ROLE is set but PADDLE_PSERVER_PORT is not: set all of them, or none");
}

TEST(RoleTest, BadValuesAreNamed) {
  EXPECT_EQ(error_of(with(kTrainer, {{"PADDLE_TRAINING_ROLE", "SERVER"}})),
            "PADDLE_TRAINING_ROLE=SERVER: expected PSERVER or TRAINER");
  EXPECT_EQ(error_of(with(kTrainer, {{"PADDLE_TRAINER_ID", "3"}})),
            "PADDLE_TRAINER_ID=3: expected an integer in [0, 2]");
  EXPECT_EQ(error_of(with(kTrainer, {{"PADDLE_PSERVERS_IP_PORT_LIST", "a:1,b"}})),
            "PADDLE_PSERVERS_IP_PORT_LIST: expected host:port,host:port (or unix:PATH), got 'b' in "
            "'a:1,b'");
  EXPECT_EQ(error_of(with(kTrainer, {{"PADDLE_PSERVERS_IP_PORT_LIST", "a:1,a:1"}})),
            "PADDLE_PSERVERS_IP_PORT_LIST: expected each endpoint once, got a:1 twice");
  EXPECT_EQ(error_of(with(kTrainer, {{"PADDLE_TRAINING_ROLE", "PSERVER"},
                                     {"PADDLE_CURRENT_ENDPOINT", "10.0.0.3:1"}})),
            "PADDLE_CURRENT_ENDPOINT: expected one of 10.0.0.1:6174,10.0.0.2:6175, got "
            "'10.0.0.3:1'");
}

TEST(EndpointsTest, LoopbackIsThisHostByNumber) {
  for (const char* here : {"127.0.0.1:80", "127.9.9.9", "[::1]:80", "[::1]"})
    EXPECT_TRUE(is_loopback(here)) << here;
  for (const char* elsewhere : {"10.0.0.1:80", "[::2]:80", "[::1", "127.example:80", "localhost"})
    EXPECT_FALSE(is_loopback(elsewhere)) << elsewhere;
}

TEST(EndpointsTest, WhereAServerListensIsAPortOrAPath) {
  for (const char* good : {"127.0.0.1:0", "[::1]:65535", "host:1", "unix:/tmp/server"}) {
    EXPECT_NO_THROW(check_listening_endpoint("--endpoint", good)) << good;
  }
  for (const char* bad : {"127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", ":1", "unix:", "a:b"}) {
    try {
      check_listening_endpoint("--endpoint", bad);
      ADD_FAILURE() << bad;
    } catch (const ConfigError& error) {
      EXPECT_EQ(one_line(error), std::string("--endpoint ") + bad +
                                     ": expected host:port (port 0: any) or unix:PATH");
    }
  }
}

}  // namespace role_test
}  // namespace cohort::ps
