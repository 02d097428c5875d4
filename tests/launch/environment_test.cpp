// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/environment.h"

#include <algorithm>
#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "cohort/launch/cores.h"
#include "cohort/launch/endpoint.h"

#include "tests/support/message_of.h"

namespace cohort::launch {
namespace environment_test {

bool holds(const std::vector<std::string>& entries, const std::string& entry) {
  return std::find(entries.begin(), entries.end(), entry) != entries.end();
}

RunOptions two_nodes() {
  RunOptions options;
  options.command = {"program"};
  options.nproc_per_node = 4;
  options.nnodes = {2, 2};
  options.node_rank = 1;
  options.master_addr = "10.0.0.1";
  options.master_port = 29500;
  return options;
}

NodeInfo second_node() {
  return {.node_rank = 1,
          .num_nodes = 2,
          .base_rank = 3,
          .world_size = 7,
          .master_addr = "10.0.0.1",
          .master_port = 29500,
          .restart_count = 2};
}

TEST(WorkerEnvironmentTest, RanksOfTheSecondNodeFollowThoseOfTheFirst) {
  RunOptions options = two_nodes();
  options.max_restarts = 5;
  options.rdzv_id = "job";
  const auto entries = worker_environment({}, options, second_node(),
                                          {.local_rank = 2, .log_dir = "/l", .num_threads = 2});
  for (const char* entry :
       {"RANK=5", "LOCAL_RANK=2", "WORLD_SIZE=7", "LOCAL_WORLD_SIZE=4", "GROUP_RANK=1",
        "GROUP_WORLD_SIZE=2", "MASTER_ADDR=10.0.0.1", "MASTER_PORT=29500", "OMP_NUM_THREADS=2",
        "TORCHELASTIC_RESTART_COUNT=2", "TORCHELASTIC_MAX_RESTARTS=5", "TORCHELASTIC_RUN_ID=job",
        "COHORT_RESTART_COUNT=2", "COHORT_LOG_DIR=/l", "COHORT_ERROR_FILE=/l/rank5.error.json",
        "COHORT_TRACE_FILE=/l/rank5.trace"}) {
    EXPECT_TRUE(holds(entries, entry)) << entry;
  }
}

TEST(WorkerEnvironmentTest, InheritedValuesAreKeptOrReplacedAsPromised) {
  const auto entries = worker_environment(
      {"RANK=9", "COHORT_STORE_FD=7", "COHORT_ROUND=4", "OMP_NUM_THREADS=3", "OTHER=a=b",
       "GLOO_SOCKET_IFNAME=eth9", "TORCHELASTIC_USE_AGENT_STORE=True"},
      two_nodes(), second_node(), {.local_rank = 0, .log_dir = "/l", .num_threads = 2});
  EXPECT_TRUE(holds(entries, "RANK=3"));
  EXPECT_TRUE(holds(entries, "OMP_NUM_THREADS=3"));
  EXPECT_TRUE(holds(entries, "OTHER=a=b"));
  EXPECT_TRUE(holds(entries, "GLOO_SOCKET_IFNAME=eth9"));
  EXPECT_FALSE(holds(entries, "RANK=9"));
  EXPECT_FALSE(holds(entries, "COHORT_STORE_FD=7"));
  EXPECT_FALSE(holds(entries, "COHORT_ROUND=4"));
  EXPECT_FALSE(holds(entries, "TORCHELASTIC_USE_AGENT_STORE=True"));
}

TEST(WorkerEnvironmentTest, AnInheritedSecretStaysWhereThereIsNoOther) {
  const std::vector<std::string> base{"COHORT_JOB_SECRET=inherited"};
  WorkerInfo worker{.log_dir = "/l"};
  EXPECT_TRUE(holds(worker_environment(base, two_nodes(), second_node(), worker), base.front()));
  worker.job_secret = "drawn";
  EXPECT_TRUE(holds(worker_environment(base, two_nodes(), second_node(), worker),
                    "COHORT_JOB_SECRET=drawn"));
}

TEST(WorkerEnvironmentTest, ARoundThatAllNodesShareIsTold) {
  RunOptions options = two_nodes();
  NodeInfo node = second_node();
  node.round = 3;
  const WorkerInfo worker{.log_dir = "/l"};
  EXPECT_FALSE(holds(worker_environment({}, options, node, worker), "COHORT_ROUND=3"));
  options.rdzv_endpoint = "10.0.0.1:29400";
  EXPECT_TRUE(holds(worker_environment({}, options, node, worker), "COHORT_ROUND=3"));
  options = {};
  EXPECT_TRUE(holds(worker_environment({}, options, {.round = 2}, worker), "COHORT_ROUND=2"));
}

TEST(WorkerEnvironmentTest, TheInterfaceIsToldToBothBackends) {
  RunOptions options = two_nodes();
  options.interface = "eth1";
  const auto entries = worker_environment({}, options, second_node(), {.log_dir = "/l"});
  EXPECT_TRUE(holds(entries, "GLOO_SOCKET_IFNAME=eth1"));
  EXPECT_TRUE(holds(entries, "NCCL_SOCKET_IFNAME=eth1"));
}

TEST(WorkerEnvironmentTest, WorkersOfAllNodesAreTheTrainersOfServersStartedByHand) {
  RunOptions options = two_nodes();
  options.pservers = "host0:7000,host1:7000";
  const auto entries =
      worker_environment({"PADDLE_TRAINER_ID=0", "PADDLE_PSERVER_IPS=elsewhere"}, options,
                         second_node(), {.local_rank = 2, .log_dir = "/l"});
  for (const char* entry :
       {"PADDLE_TRAINING_ROLE=TRAINER", "PADDLE_PSERVERS_IP_PORT_LIST=host0:7000,host1:7000",
        "PADDLE_TRAINERS_NUM=7", "PADDLE_TRAINER_ID=5"}) {
    EXPECT_TRUE(holds(entries, entry)) << entry;
  }
  EXPECT_FALSE(holds(entries, "PADDLE_TRAINER_ID=0"));
  EXPECT_FALSE(holds(entries, "PADDLE_PSERVER_IPS=elsewhere"));
}

TEST(RunOptionsTest, EveryBadValueNamesItsFlag) {
  EXPECT_NO_THROW(validate(two_nodes()));
  const auto starts = [](auto change, const std::string& flag) {
    RunOptions options = two_nodes();
    change(options);
    const std::string message = test::message_of<ConfigError>([&] { validate(options); });
    EXPECT_TRUE(message.starts_with(flag)) << message;
  };
  starts([](RunOptions& o) { o.nproc_per_node = 0; }, "--nproc-per-node");
  starts([](RunOptions& o) { o.nnodes = {0, 0}; }, "--nnodes");
  starts([](RunOptions& o) { o.node_rank = 2; }, "--node-rank");
  starts([](RunOptions& o) { o.master_port = 65536; }, "--master-port");
  starts([](RunOptions& o) { o.master_port = 0; }, "--master-port");
  starts([](RunOptions& o) { o.master_addr = ""; }, "--master-addr");
  starts([](RunOptions& o) { o.grace = std::chrono::milliseconds(-1); }, "--grace");
  starts([](RunOptions& o) { o.keep_alive.interval = {}; }, "--rdzv-conf: expected keep_alive_int");
  starts([](RunOptions& o) { o.keep_alive.max_attempt = 0; }, "--rdzv-conf: expected keep_alive_m");
  starts([](RunOptions& o) { o.last_call_timeout = -std::chrono::milliseconds(1); }, "--rdzv-conf");
  starts([](RunOptions& o) { o.command.clear(); }, "PROGRAM");
  starts([](RunOptions& o) { o.nnodes = {3, 2}; }, "--nnodes");
  starts([](RunOptions& o) { o.nnodes = {1, 2}; }, "--rdzv-endpoint");
  starts([](RunOptions& o) { o.max_restarts = 1; }, "--rdzv-endpoint");
  starts([](RunOptions& o) { o.max_restarts = -1; }, "--max-restarts");
  starts([](RunOptions& o) { o.rdzv_endpoint = "10.0.0.1"; }, "--master-addr");
  starts([](RunOptions& o) { o.interface = "no-such"; }, "--interface: expected one of lo");
  starts([](RunOptions& o) { o.tee_streams.of_rank[4] = kStdout; },
         "--tee: expected local ranks 0 to nproc-per-node - 1 = 3, got 4");
  starts([](RunOptions& o) { o.redirects.of_rank[7] = kStderr; },
         "--redirects: expected local ranks 0 to nproc-per-node - 1 = 3, got 7");
  starts([](RunOptions& o) { o.stall_timeout = std::chrono::milliseconds(-1); }, "--stall-timeout");
  starts(
      [](RunOptions& o) {
        o.pservers = "a:1";
        o.servers.count = 1;
      },
      "--pservers: expected none with --servers, which starts its own, got a:1");
  starts(
      [](RunOptions& o) {
        o.pservers = "a:1";
        o.rdzv_endpoint = "a:2";
        o.master_addr = "";
        o.nnodes = {1, 2};
        o.node_rank = 0;
      },
      "--nnodes: expected one number with --pservers, whose number of trainers is fixed, got 1:2");
}

TEST(RunOptionsTest, ServersAreReadAsTheirTrainersDo) {
  const auto refusal = [](const std::string& pservers) {
    return test::message_of<ConfigError>([&] {
      RunOptions options;
      options.command = {"true"};
      options.pservers = pservers;
      validate(options);
    });
  };
  EXPECT_EQ(refusal("host0:7000,[::1]:7001,unix:/run/socket"), "nothing was thrown");
  EXPECT_EQ(refusal("host0:7000,host1"),
            "--pservers: expected host:port,host:port (or unix:PATH), got 'host1' in "
            "'host0:7000,host1'");
  EXPECT_EQ(refusal("host0:70000"),
            "--pservers: expected host:port,host:port (or unix:PATH), got 'host0:70000'");
  EXPECT_EQ(refusal("a:1,a:1"), "--pservers: expected each endpoint once, got a:1 twice");
}

TEST(RunOptionsTest, TorchrunsChoiceOfStreamsIsRead) {
  const StreamChoice all = parse_stream_choice("--tee", "3");
  EXPECT_EQ(all.of(0), 3);
  EXPECT_EQ(all.of(7), 3);
  const StreamChoice some = parse_stream_choice("--tee", "0:1,2:3");
  EXPECT_EQ(some.of(0), 1);
  EXPECT_EQ(some.of(1), 0);
  EXPECT_EQ(some.of(2), 3);
  for (const char* bad : {"", "4", "-1", "0:4", "a", "0:1,2", "0:1;1:2", "0:1,1:1,0:1"}) {
    EXPECT_THROW(parse_stream_choice("--tee", bad), ConfigError) << bad;
  }
  EXPECT_EQ(test::message_of<ConfigError>([] { parse_stream_choice("--tee", "0:1,0:2"); }),
            "--tee: expected each local rank once, got 0:1,0:2");
}

TEST(RunOptionsTest, TheRendezvousLimitsAreRead) {
  RunOptions options;
  parse_rdzv_conf(
      "keep_alive_interval=0.5,keep_alive_max_attempt=4,last_call_timeout=30,join_timeout=7",
      options);
  EXPECT_EQ(options.keep_alive.limit(), std::chrono::seconds(2));
  EXPECT_EQ(options.keep_alive.heartbeat_interval(), std::chrono::milliseconds(100));
  EXPECT_EQ(options.last_call_timeout, std::chrono::seconds(30));
  EXPECT_EQ(options.rdzv_timeout, std::chrono::seconds(7));
  for (const char* text :
       {"x=1", "keep_alive_interval", "keep_alive_interval=", "join_timeout=0", "join_timeout=nan",
        "join_timeout=1e9", "keep_alive_max_attempt=1.5", "keep_alive_max_attempt=0",
        "join_timeout=1,join_timeout=2", "join_timeout=1s"}) {
    RunOptions untouched;
    EXPECT_THROW(parse_rdzv_conf(text, untouched), ConfigError) << text;
  }
}

TEST(RunOptionsTest, ANumberOfNodesOrARangeIsRead) {
  EXPECT_EQ(parse_node_count("3").min, 3);
  EXPECT_EQ(parse_node_count("3").max, 3);
  EXPECT_EQ(parse_node_count("1:4").min, 1);
  EXPECT_EQ(parse_node_count("1:4").max, 4);
  for (const char* text : {"3", "1:4"}) EXPECT_EQ(parse_node_count(text).text(), text);
  for (const char* bad : {"", "1:", ":2", "a", "1:2:3", "2 "}) {
    EXPECT_THROW(parse_node_count(bad), ConfigError) << bad;
  }
}

TEST(EndpointTest, ThePortMayBeLeftOut) {
  EXPECT_EQ(parse_endpoint("node0").text(), "node0:29400");
  EXPECT_EQ(parse_endpoint("10.0.0.1:5000").text(), "10.0.0.1:5000");
  EXPECT_EQ(parse_endpoint("[::1]:5000").host, "::1");
  for (const char* bad :
       {"", ":1", "host:", "host:0", "host:65536", "host:1x", "[::1", "fd00::1"}) {
    EXPECT_THROW(parse_endpoint(bad), ConfigError) << bad;
  }
}

TEST(CoresTest, SharesAreContiguousAndEqual) {
  const auto shares = share_cores({0, 1, 2, 4, 6}, 2);
  EXPECT_EQ(shares, (std::vector<std::vector<int>>{{0, 1}, {2, 4}}));
  EXPECT_EQ(describe_cores(shares, "2"), "2 workers, 2 threads each, cores 0-1 | 2,4");
  EXPECT_EQ(describe_cores({{3}}, "1"), "1 worker, 1 thread each, cores 3");
  EXPECT_THROW(share_cores({0}, 2), ConfigError);
}

}  // namespace environment_test
}  // namespace cohort::launch
