#include "cohort/comm/place.h"

#include <cstdlib>
#include <gtest/gtest.h>
#include <map>

#include "cohort/base/error.h"

namespace cohort::comm {
namespace {

// Sets exactly these variables of all contracts, and clears them again.
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
                                           "OMPI_COMM_WORLD_RANK",
                                           "OMPI_COMM_WORLD_SIZE",
                                           "OMPI_COMM_WORLD_LOCAL_RANK",
                                           "OMPI_COMM_WORLD_LOCAL_SIZE",
                                           "SLURM_PROCID",
                                           "SLURM_NTASKS",
                                           "SLURM_LOCALID",
                                           "SLURM_NODELIST",
                                           "SLURM_NNODES",
                                           "PADDLE_TRAINER_ID",
                                           "PADDLE_TRAINERS_NUM",
                                           "PADDLE_TRAINER_ENDPOINTS"};
};

std::string error_of(const std::map<std::string, std::string>& variables,
                     const PlaceOptions& options = {}) {
  const Environment environment(variables);
  try {
    discover_place(options);
  } catch (const ConfigError& error) {
    return one_line(error);
  }
  return "no error";
}

TEST(PlaceTest, NothingSetIsOneProcessAndSaysSo) {
  const Environment environment({});
  const Place place = discover_place();
  EXPECT_EQ(place.world_size, 1);
  EXPECT_EQ(place.source, "no launcher: one process");
}

TEST(PlaceTest, ReadsTorchrun) {
  const Environment environment({{"RANK", "3"},
                                 {"WORLD_SIZE", "4"},
                                 {"LOCAL_RANK", "1"},
                                 {"LOCAL_WORLD_SIZE", "2"},
                                 {"MASTER_ADDR", "h"},
                                 {"MASTER_PORT", "5"}});
  const Place place = discover_place();
  EXPECT_EQ(place.rank, 3);
  EXPECT_EQ(place.world_size, 4);
  EXPECT_EQ(place.local_rank, 1);
  EXPECT_EQ(place.local_world_size, 2);
  EXPECT_EQ(place.master_addr, "h");
  EXPECT_EQ(place.master_port, 5);
}

TEST(PlaceTest, ReadsOpenMpi) {
  const Environment environment({{"OMPI_COMM_WORLD_RANK", "1"},
                                 {"OMPI_COMM_WORLD_SIZE", "2"},
                                 {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                 {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                                 {"MASTER_ADDR", "h"},
                                 {"MASTER_PORT", "5"}});
  EXPECT_EQ(discover_place().rank, 1);
}

TEST(PlaceTest, ReadsSlurmAndItsNodeList) {
  const Environment environment({{"SLURM_PROCID", "3"},
                                 {"SLURM_NTASKS", "4"},
                                 {"SLURM_LOCALID", "1"},
                                 {"SLURM_NNODES", "2"},
                                 {"SLURM_NODELIST", "gpu[07-09,12],x"},
                                 {"MASTER_PORT", "5"}});
  const Place place = discover_place();
  EXPECT_EQ(place.master_addr, "gpu07");
  EXPECT_EQ(place.local_world_size, 2);
}

TEST(PlaceTest, ReadsPaddleAndCountsTheHostsOwnTrainers) {
  const Environment environment({{"PADDLE_TRAINER_ID", "2"},
                                 {"PADDLE_TRAINERS_NUM", "3"},
                                 {"PADDLE_TRAINER_ENDPOINTS", "a:6170,b:6170,b:6171"}});
  const Place place = discover_place();
  EXPECT_EQ(place.master_addr, "a");
  EXPECT_EQ(place.master_port, 6170);
  EXPECT_EQ(place.local_rank, 1);
  EXPECT_EQ(place.local_world_size, 2);
}

TEST(PlaceTest, NodeNumbersAndALocalRankGiveTheRank) {
  const Environment environment(std::map<std::string, std::string>{{"LOCAL_RANK", "2"}});
  const Place place = discover_place(
      {.rank = 1, .world_size = 3, .nproc_per_node = 4, .master_addr = "h", .master_port = 5});
  EXPECT_EQ(place.rank, 6);
  EXPECT_EQ(place.world_size, 12);
}

TEST(PlaceTest, HalfAContractNamesWhatIsMissing) {
  EXPECT_EQ(error_of({{"RANK", "0"}}),
            "RANK is set but WORLD_SIZE is not: set all of them, or none");
  EXPECT_EQ(error_of({{"WORLD_SIZE", "2"}}),
            "WORLD_SIZE is set but RANK is not: set all of them, or none");
  EXPECT_EQ(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "5"}}),
            "torchrun's environment is set but MASTER_ADDR is not: set all of them, or none");
  EXPECT_NE(error_of({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}})
                .find("SLURM_LOCALID, SLURM_NODELIST"),
            std::string::npos);
}

TEST(PlaceTest, ALonelyPieceOfAContractIsNoSingleProcess) {
  EXPECT_EQ(error_of({{"LOCAL_RANK", "0"}}), "LOCAL_RANK is set but RANK is not: set all of them, or none");
  EXPECT_EQ(error_of({}, {.nproc_per_node = 4}),
            "--nproc-per-node is set but --rank is not: set all of them, or none");
  EXPECT_EQ(error_of({}, {.master_addr = "h"}),
            "--addr or --port is set but --rank is not: set all of them, or none");
}

TEST(PlaceTest, BadNumbersAreNamed) {
  EXPECT_NE(error_of({}, {.rank = -1, .world_size = 2}).find("rank -1 of world size 2"), std::string::npos);
  EXPECT_EQ(error_of({}, {.rank = 1, .world_size = 2, .master_addr = "h", .master_port = 70000}),
            "port 70000 (options): expected 1 to 65535");
  EXPECT_EQ(error_of({{"RANK", "x"}, {"WORLD_SIZE", "2"}}),
            "RANK=x: expected an integer in [0, 1048576]");
  EXPECT_NE(error_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}}).find("rank 2 of world size 2"),
            std::string::npos);
}

}  // namespace
}  // namespace cohort::comm
