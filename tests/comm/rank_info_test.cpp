// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/rank_info.h"

#include <cstdlib>
#include <gtest/gtest.h>
#include <map>

#include "cohort/base/error.h"
#include "cohort/comm/rendezvous.h"
#include "cohort/comm/slurm.h"

#include "tests/support/message_of.h"

namespace cohort::comm {
namespace rank_info_test {

// Sets exactly these variables of all launchers, and clears them again.
class Environment {
 public:
  explicit Environment(const std::map<std::string, std::string>& variables) {
    for (const char* name : kNames) unsetenv(name);
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  }
  ~Environment() {
    for (const char* name : kNames) unsetenv(name);
  }

 private:
  static constexpr const char* kNames[] = {"RANK",
                                           "WORLD_SIZE",
                                           "LOCAL_RANK",
                                           "LOCAL_WORLD_SIZE",
                                           "MASTER_ADDR",
                                           "MASTER_PORT",
                                           "COHORT_STORE_FD",
                                           "TORCHELASTIC_USE_AGENT_STORE",
                                           "TORCHELASTIC_RUN_ID",
                                           "COHORT_ROUND",
                                           "PMIX_NAMESPACE",
                                           "OMPI_COMM_WORLD_RANK",
                                           "OMPI_COMM_WORLD_SIZE",
                                           "OMPI_COMM_WORLD_LOCAL_RANK",
                                           "OMPI_COMM_WORLD_LOCAL_SIZE",
                                           "SLURM_PROCID",
                                           "SLURM_NTASKS",
                                           "SLURM_LOCALID",
                                           "SLURM_NODELIST",
                                           "SLURM_STEP_NODELIST",
                                           "SLURM_JOB_NODELIST",
                                           "SLURM_NNODES",
                                           "SLURM_NODEID",
                                           "SLURM_TASKS_PER_NODE",
                                           "SLURM_STEP_TASKS_PER_NODE",
                                           "SLURM_JOB_ID",
                                           "SLURM_STEP_ID",
                                           "PADDLE_TRAINER_ID",
                                           "PADDLE_TRAINERS_NUM",
                                           "PADDLE_NUM_TRAINERS",
                                           "PADDLE_TRAINER_ENDPOINTS"};
};

std::string error_of(const std::map<std::string, std::string>& variables,
                     const RankInfoOptions& options = {}) {
  const Environment environment(variables);
  try {
    rank_info_from_environment(options);
  } catch (const ConfigError& error) {
    return one_line(error);
  }
  return "no error";
}

TEST(RankInfoTest, NothingSetIsOneProcessAndSaysSo) {
  const Environment environment({});
  const RankInfo info = rank_info_from_environment();
  EXPECT_EQ(info.world_size, 1);
  EXPECT_EQ(info.source, "no launcher: one process");
}

TEST(RankInfoTest, ReadsTorchrun) {
  const Environment environment({{"RANK", "3"},
                                 {"WORLD_SIZE", "4"},
                                 {"LOCAL_RANK", "1"},
                                 {"LOCAL_WORLD_SIZE", "2"},
                                 {"MASTER_ADDR", "h"},
                                 {"MASTER_PORT", "5"}});
  const RankInfo info = rank_info_from_environment();
  EXPECT_EQ(info.rank, 3);
  EXPECT_EQ(info.world_size, 4);
  EXPECT_EQ(info.local_rank, 1);
  EXPECT_EQ(info.local_world_size, 2);
  EXPECT_EQ(info.master_addr, "h");
  EXPECT_EQ(info.master_port, 5);
}

TEST(RankInfoTest, LaunchersNameTheJob) {
  const std::map<std::string, std::string> store = {{"MASTER_ADDR", "h"}, {"MASTER_PORT", "5"}};
  const auto job_of = [&](std::map<std::string, std::string> variables) {
    variables.insert(store.begin(), store.end());
    const Environment environment(variables);
    return rank_info_from_environment().job;
  };
  EXPECT_EQ(job_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), "");
  EXPECT_EQ(job_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"TORCHELASTIC_RUN_ID", "a"}}), "a");
  EXPECT_EQ(job_of({{"RANK", "0"},
                    {"WORLD_SIZE", "2"},
                    {"TORCHELASTIC_RUN_ID", "a"},
                    {"COHORT_ROUND", "3"}}),
            "a.3");
  EXPECT_EQ(job_of({{"OMPI_COMM_WORLD_RANK", "0"},
                    {"OMPI_COMM_WORLD_SIZE", "2"},
                    {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                    {"PMIX_NAMESPACE", "n"}}),
            "n");
  EXPECT_EQ(job_of({{"SLURM_PROCID", "0"},
                    {"SLURM_NTASKS", "2"},
                    {"SLURM_LOCALID", "0"},
                    {"SLURM_NODELIST", "x"},
                    {"SLURM_JOB_ID", "7"},
                    {"SLURM_STEP_ID", "1"}}),
            "7.1");
}

TEST(RankInfoTest, RankAndWorldSizeAloneLeaveTheHostToTheRendezvous) {
  const Environment environment(
      {{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "5"}});
  RankInfo info = rank_info_from_environment();
  EXPECT_TRUE(info.finds_host);
  EXPECT_TRUE(rank_info_from_environment({.rank = 1, .world_size = 2}).finds_host);
  EXPECT_FALSE(rank_info_from_environment({.rank = 0, .world_size = 1}).finds_host);
  EXPECT_THROW(device_index(info, 2), ConfigError) << "not known yet";
  EXPECT_EQ(device_index(info, 1), 0);
  find_host(info, {"a", "b", "a", "b"});
  EXPECT_EQ(info.local_rank, 1);
  EXPECT_EQ(info.local_world_size, 2);
  EXPECT_EQ(device_index(info, 2), 1);
  find_host(info, {"a", "b", "a", "c"});
  EXPECT_EQ(info.local_rank, 0);
  EXPECT_EQ(info.local_world_size, 1);
}

TEST(RankInfoTest, ReadsOpenMpi) {
  const Environment environment({{"OMPI_COMM_WORLD_RANK", "1"},
                                 {"OMPI_COMM_WORLD_SIZE", "2"},
                                 {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                 {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                                 {"MASTER_ADDR", "h"},
                                 {"MASTER_PORT", "5"}});
  EXPECT_EQ(rank_info_from_environment().rank, 1);
}

TEST(RankInfoTest, ReadsSlurmAndItsNodeList) {
  const Environment environment({{"SLURM_PROCID", "3"},
                                 {"SLURM_NTASKS", "4"},
                                 {"SLURM_LOCALID", "1"},
                                 {"SLURM_NNODES", "2"},
                                 {"SLURM_NODELIST", "gpu[07-09,12],x"},
                                 {"MASTER_PORT", "5"}});
  const RankInfo info = rank_info_from_environment();
  EXPECT_EQ(info.master_addr, "gpu07");
  EXPECT_EQ(info.local_world_size, 2);
}

TEST(RankInfoTest, ReadsPaddleAndCountsTheHostsOwnTrainers) {
  const Environment environment({{"PADDLE_TRAINER_ID", "2"},
                                 {"PADDLE_TRAINERS_NUM", "3"},
                                 {"PADDLE_TRAINER_ENDPOINTS", "a:6170,b:6170,b:6171"}});
  const RankInfo info = rank_info_from_environment();
  EXPECT_EQ(info.master_addr, "a");
  EXPECT_EQ(info.master_port, 6170);
  EXPECT_EQ(info.local_rank, 1);
  EXPECT_EQ(info.local_world_size, 2);
}

TEST(RankInfoTest, PaddlesOnlyTrainerNeedsNoEndpoints) {
  const std::map<std::string, std::string> alone{{"PADDLE_TRAINER_ID", "0"},
                                                 {"PADDLE_TRAINERS_NUM", "1"}};
  {
    const Environment environment(alone);
    EXPECT_EQ(rank_info_from_environment().world_size, 1);
    EXPECT_EQ(rank_info_from_environment().source, "Paddle's environment");
  }
  auto variables = alone;
  variables["PADDLE_TRAINER_ID"] = "1";
  EXPECT_NE(error_of(variables).find("rank 1 of world size 1"), std::string::npos);
  variables["PADDLE_TRAINERS_NUM"] = "2";
  EXPECT_EQ(error_of(variables),
            "PADDLE_TRAINER_ID is set but PADDLE_TRAINER_ENDPOINTS is not: set all of them, or "
            "none");
  for (const char* bad : {"0", "x", "-1", "1x"}) {
    variables["PADDLE_TRAINERS_NUM"] = bad;
    EXPECT_EQ(error_of(variables).find("PADDLE_TRAINERS_NUM=" + std::string(bad) + ": expected"),
              0U)
        << error_of(variables);
  }
}

TEST(RankInfoTest, AmongEndpointsTheFirstIsTheStores) {
  const RankInfo info = rank_info_from_endpoints({"a:6170", "b:1", "b:x"}, 2);
  EXPECT_EQ(info.master_addr, "a");
  EXPECT_EQ(info.master_port, 6170);
  EXPECT_EQ(info.rank, 2);
  EXPECT_EQ(info.world_size, 3);
  EXPECT_EQ(info.local_rank, 1);
  EXPECT_EQ(rank_info_from_endpoints({"[::1]:7000", "[::1]:7001"}, 1).master_addr, "::1");
  EXPECT_EQ(rank_info_from_endpoints({"[::1]:7000", "[::1]:7001"}, 1).local_rank, 1);
  const auto refusal = [](const std::vector<std::string>& endpoints, int rank) {
    return test::message_of<ConfigError>([&] { rank_info_from_endpoints(endpoints, rank); });
  };
  EXPECT_EQ(refusal({"a:1", "b:2"}, 2), "endpoints=a:1,b:2: there is no rank 2");
  EXPECT_EQ(refusal({"a:0", "b:2"}, 0), "endpoints=a:0,b:2: expected a port, got '0'");
  EXPECT_EQ(refusal({"a:1", "b"}, 0), "endpoints=a:1,b: expected host:port,host:port");
}

TEST(RankInfoTest, NodeNumbersAndALocalRankGiveTheRank) {
  const Environment environment(std::map<std::string, std::string>{{"LOCAL_RANK", "2"}});
  const RankInfo info = rank_info_from_environment(
      {.rank = 1, .world_size = 3, .nproc_per_node = 4, .master_addr = "h", .master_port = 5});
  EXPECT_EQ(info.rank, 6);
  EXPECT_EQ(info.world_size, 12);
}

TEST(RankInfoTest, AnIncompleteEnvironmentNamesWhatIsMissing) {
  EXPECT_EQ(error_of({{"RANK", "0"}}),
            "RANK is set but WORLD_SIZE is not: set all of them, or none");
  EXPECT_EQ(error_of({{"WORLD_SIZE", "2"}}),
            "WORLD_SIZE is set but RANK is not: set all of them, or none");
  EXPECT_EQ(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "5"}}),
            "torchrun's environment is set but MASTER_ADDR is not: set all of them, or none");
  EXPECT_EQ(error_of({{"RANK", "2"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "0"}}),
            "LOCAL_RANK is set but LOCAL_WORLD_SIZE is not: set all of them, or none");
  EXPECT_EQ(error_of({{"RANK", "2"}, {"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "2"}}),
            "LOCAL_WORLD_SIZE is set but LOCAL_RANK is not: set all of them, or none");
  EXPECT_NE(error_of({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}})
                .find("SLURM_LOCALID, SLURM_NODELIST"),
            std::string::npos);
}

TEST(RankInfoTest, ALoneVariableIsNoSingleProcess) {
  EXPECT_EQ(error_of({{"LOCAL_RANK", "0"}}),
            "LOCAL_RANK is set but RANK is not: set all of them, or none");
  EXPECT_EQ(error_of({}, {.nproc_per_node = 4}),
            "--nproc-per-node is set but --rank is not: set all of them, or none");
  EXPECT_EQ(error_of({}, {.master_addr = "h"}),
            "--addr or --port is set but --rank is not: set all of them, or none");
}

TEST(RankInfoTest, BadNumbersAreNamed) {
  EXPECT_NE(error_of({}, {.rank = -1, .world_size = 2}).find("rank -1 of world size 2"),
            std::string::npos);
  EXPECT_EQ(error_of({}, {.rank = 1, .world_size = 2, .master_addr = "h", .master_port = 70000}),
            "port 70000 (options): expected 1 to 65535");
  EXPECT_EQ(error_of({{"RANK", "x"}, {"WORLD_SIZE", "2"}}),
            "RANK=x: expected an integer in [0, 1048576]");
  EXPECT_NE(error_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}}).find("rank 2 of world size 2"),
            std::string::npos);
}

const std::map<std::string, std::string> kTorchrun{{"RANK", "1"},        {"WORLD_SIZE", "2"},
                                                   {"LOCAL_RANK", "1"},  {"LOCAL_WORLD_SIZE", "2"},
                                                   {"MASTER_ADDR", "h"}, {"MASTER_PORT", "5"}};

TEST(RankInfoTest, DistUrlSaysWhereAndTheEnvironmentWho) {
  const Environment environment(kTorchrun);
  RankInfo info = rank_info_from_environment({.dist_url = "tcp://[fe00::1]:77"});
  EXPECT_EQ(info.rank, 1);
  EXPECT_EQ(info.master_addr, "fe00::1");
  EXPECT_EQ(info.master_port, 77);
  info = rank_info_from_environment({.dist_url = "env://"});
  EXPECT_EQ(info.master_addr, "h");
  info = rank_info_from_environment(
      {.rank = 2, .world_size = 3, .dist_url = "file:///shared/rendezvous"});
  EXPECT_EQ(info.rank, 2);
  EXPECT_EQ(info.store_file, "/shared/rendezvous");
  EXPECT_EQ(info.master_addr, "");
}

TEST(RankInfoTest, BadDistUrlsAreNamed) {
  for (const char* url :
       {"tcp://h", "tcp://:5", "tcp://h:0", "tcp://h:x", "file://", "file:///", "http://h:5", ""}) {
    EXPECT_EQ(
        error_of(kTorchrun, {.dist_url = url}),
        std::string("--dist-url ") + url + ": expected tcp://host:port, file:///path or env://");
  }
  EXPECT_EQ(error_of(kTorchrun, {.master_port = 5, .dist_url = "env://"}),
            "--dist-url and --addr or --port: give one of them");
  EXPECT_EQ(error_of({}, {.dist_url = "tcp://h:5"}),
            "--dist-url tcp://h:5 is set but --rank, or RANK, is not: set all of them, or none");
}

TEST(RankInfoTest, TheLaunchersSocketServesItsOwnPortOnly) {
  auto variables = kTorchrun;
  variables["RANK"] = "0";
  variables["LOCAL_RANK"] = "0";
  variables["COHORT_STORE_FD"] = "9";
  const Environment environment(variables);
  EXPECT_EQ(rank_info_from_environment().store_fd, 9);
  EXPECT_FALSE(rank_info_from_environment({.dist_url = "tcp://h:6"}).store_fd.has_value());
}

TEST(RankInfoTest, TorchrunsAgentsServeTheStore) {
  auto variables = kTorchrun;
  EXPECT_FALSE((Environment(variables), rank_info_from_environment().agent_store));
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  const Environment environment(variables);
  EXPECT_TRUE(rank_info_from_environment().agent_store);
}

TEST(RankInfoTest, SlurmsStepGoesBeforeItsJobAndThePortComesFromItsNumber) {
  std::map<std::string, std::string> variables{{"SLURM_PROCID", "4"},
                                               {"SLURM_NTASKS", "5"},
                                               {"SLURM_LOCALID", "0"},
                                               {"SLURM_NODEID", "2"},
                                               {"SLURM_TASKS_PER_NODE", "2(x2),1"},
                                               {"SLURM_NODELIST", "job[1-9]"},
                                               {"SLURM_STEP_NODELIST", "step[2-4]"},
                                               {"SLURM_JOB_ID", "123456"}};
  {
    const Environment environment(variables);
    const RankInfo info = rank_info_from_environment();
    EXPECT_EQ(info.master_addr, "step2");
    EXPECT_EQ(info.local_world_size, 1);
    EXPECT_EQ(info.master_port, 12'000 + (123456 * 16) % 20'000);
  }
  variables["MASTER_PORT"] = "77";
  variables["SLURM_NODEID"] = "1";
  const Environment environment(variables);
  EXPECT_EQ(rank_info_from_environment().master_port, 77);
  EXPECT_EQ(rank_info_from_environment().local_world_size, 2);
}

TEST(RankInfoTest, PaddlesOtherNameForTheNumberOfTrainers) {
  const Environment environment({{"PADDLE_TRAINER_ID", "1"},
                                 {"PADDLE_NUM_TRAINERS", "2"},
                                 {"PADDLE_TRAINER_ENDPOINTS", "a:1,b:2"}});
  EXPECT_EQ(rank_info_from_environment().world_size, 2);
}

TEST(SlurmTest, NodeListsExpandInOrder) {
  const auto hosts = [](const std::string& list) {
    return expand_node_list(list, "SLURM_NODELIST");
  };
  EXPECT_EQ(hosts("one"), (std::vector<std::string>{"one"}));
  EXPECT_EQ(hosts("a[1-3,7]b,c[01-02]"),
            (std::vector<std::string>{"a1b", "a2b", "a3b", "a7b", "c01", "c02"}));
  EXPECT_EQ(hosts("r[0-1]n[08-10]"),
            (std::vector<std::string>{"r0n08", "r0n09", "r0n10", "r1n08", "r1n09", "r1n10"}));
  EXPECT_EQ(hosts("x[1,[3-4]]"), (std::vector<std::string>{"x1", "x3", "x4"}));
  for (const char* bad : {"a[1-2", "a1]", "a[2-1]", "a[x]", "a,,b", "a[1-99999999]"}) {
    try {
      hosts(bad);
      ADD_FAILURE() << bad;
    } catch (const ConfigError& error) {
      EXPECT_EQ(one_line(error).find(std::string("SLURM_NODELIST=") + bad + ": expected "), 0u)
          << one_line(error);
    }
  }
}

TEST(SlurmTest, TaskCountsExpand) {
  EXPECT_EQ(expand_task_counts("2(x3),1", "S"), (std::vector<int>{2, 2, 2, 1}));
  EXPECT_THROW(expand_task_counts("2(x3", "S"), ConfigError);
  EXPECT_THROW(expand_task_counts("two", "S"), ConfigError);
}

TEST(RankInfoTest, DevicesGoByLocalRank) {
  RankInfo info;
  info.local_rank = 2;
  info.local_world_size = 3;
  EXPECT_EQ(device_index(info, 4), 2);
  EXPECT_EQ(device_index(info, 1), 0);
  EXPECT_THROW(device_index(info, 2), ConfigError);
  EXPECT_THROW(device_index(info, 0), ConfigError);
}

}  // namespace rank_info_test
}  // namespace cohort::comm
