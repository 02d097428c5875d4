#include "cohort/launch/environment.h"

#include <algorithm>
#include <gtest/gtest.h>

#include "cohort/base/error.h"

namespace cohort::launch {
namespace {

bool holds(const std::vector<std::string>& entries, const std::string& entry) {
  return std::find(entries.begin(), entries.end(), entry) != entries.end();
}

RunOptions two_nodes() {
  RunOptions options;
  options.command = {"program"};
  options.nproc_per_node = 4;
  options.nnodes = 2;
  options.node_rank = 1;
  options.master_addr = "10.0.0.1";
  options.master_port = 29500;
  return options;
}

TEST(WorkerEnvironmentTest, RanksOfTheSecondNodeFollowThoseOfTheFirst) {
  const auto entries = worker_environment(
      {}, two_nodes(), {.local_rank = 2, .master_port = 29500, .log_dir = "/l", .num_cores = 8});
  for (const char* entry :
       {"RANK=6", "LOCAL_RANK=2", "WORLD_SIZE=8", "LOCAL_WORLD_SIZE=4", "GROUP_RANK=1",
        "GROUP_WORLD_SIZE=2", "MASTER_ADDR=10.0.0.1", "MASTER_PORT=29500", "OMP_NUM_THREADS=2",
        "COHORT_LOG_DIR=/l", "COHORT_ERROR_FILE=/l/rank6.error.json"}) {
    EXPECT_TRUE(holds(entries, entry)) << entry;
  }
}

TEST(WorkerEnvironmentTest, InheritedValuesAreKeptOrReplacedAsPromised) {
  const auto entries =
      worker_environment({"RANK=9", "COHORT_STORE_FD=7", "OMP_NUM_THREADS=3", "OTHER=a=b"},
                         two_nodes(), {.local_rank = 0, .log_dir = "/l", .num_cores = 8});
  EXPECT_TRUE(holds(entries, "RANK=4"));
  EXPECT_TRUE(holds(entries, "OMP_NUM_THREADS=3"));
  EXPECT_TRUE(holds(entries, "OTHER=a=b"));
  EXPECT_FALSE(holds(entries, "RANK=9"));
  EXPECT_FALSE(holds(entries, "COHORT_STORE_FD=7"));
}

TEST(WorkerEnvironmentTest, MoreWorkersThanCoresGetOneThreadEach) {
  const auto entries =
      worker_environment({}, two_nodes(), {.local_rank = 0, .log_dir = "/l", .num_cores = 2});
  EXPECT_TRUE(holds(entries, "OMP_NUM_THREADS=1"));
}

TEST(RunOptionsTest, EveryBadValueNamesItsFlag) {
  const auto message_of = [](auto change) -> std::string {
    RunOptions options = two_nodes();
    change(options);
    try {
      validate(options);
    } catch (const ConfigError& error) {
      return one_line(error);
    }
    return "accepted";
  };
  EXPECT_EQ(message_of([](RunOptions&) {}), "accepted");
  const auto starts = [&](auto change, const std::string& flag) {
    const std::string message = message_of(change);
    EXPECT_TRUE(message.starts_with(flag)) << message;
  };
  starts([](RunOptions& o) { o.nproc_per_node = 0; }, "--nproc-per-node");
  starts([](RunOptions& o) { o.nnodes = 0; }, "--nnodes");
  starts([](RunOptions& o) { o.node_rank = 2; }, "--node-rank");
  starts([](RunOptions& o) { o.master_port = 65536; }, "--master-port");
  starts([](RunOptions& o) { o.master_port = 0; }, "--master-port");
  starts([](RunOptions& o) { o.master_addr = ""; }, "--master-addr");
  starts([](RunOptions& o) { o.grace = std::chrono::milliseconds(-1); }, "--grace");
  starts([](RunOptions& o) { o.command.clear(); }, "PROGRAM");
}

}  // namespace
}  // namespace cohort::launch
