// SPDX-License-Identifier: Apache-2.0
// The plug-in libcohort_mpi.so: how a group finds its ranks within MPI.
#include <string>
#include <vector>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/comm/backend.h"
#include "cohort/comm/backends/mpi/mpi_backend.h"

namespace cohort::comm {
namespace {

std::string describe(int rank, int world_size) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(world_size);
}

// Whether a launcher of MPI started this process: mpirun, or one that speaks PMIx or PMI, as
// Slurm's does. To be asked before MPI begins, which may set such variables itself.
bool is_launched() {
  static const bool result =
      env_string("OMPI_COMM_WORLD_SIZE") || env_string("PMIX_RANK") || env_string("PMI_RANK");
  return result;
}

// A group as large as MPI's world is that world, rank by rank. A smaller one may be any part of it.
void check_mpi_rank(const BackendRequest& request, const MpiThread& mpi) {
  if (request.world_size < mpi.world_size()) return;
  if (request.world_size == mpi.world_size() && request.rank == mpi.rank()) return;
  throw ConfigError("backend mpi: this process is " + describe(request.rank, request.world_size) +
                    ", but MPI says " + describe(mpi.rank(), mpi.world_size()) +
                    ": start the program with mpirun -n " + std::to_string(request.world_size) +
                    ", and let it find its rank there");
}

// The numbers of this group's ranks in MPI_COMM_WORLD, through the store.
std::vector<int> exchange_world_ranks(const BackendRequest& request, int own) {
  const auto key = [](int rank) { return "mpi_world_rank/" + std::to_string(rank); };
  request.store->set(key(request.rank), std::to_string(own));
  std::vector<int> ranks;
  for (int rank = 0; rank < request.world_size; ++rank)
    ranks.push_back(std::stoi(request.store->get_to_str(key(rank))));
  return ranks;
}

c10::intrusive_ptr<c10d::Backend> make_mpi_backend(const BackendRequest& request) {
  const bool launched = is_launched();
  MpiThread& mpi = MpiThread::of_process();
  check_mpi_rank(request, mpi);
  if (!launched) {
    throw ConfigError(
        "backend mpi: no mpirun started this process: start the program with mpirun -n " +
        std::to_string(request.world_size));
  }
  return c10::make_intrusive<MpiBackend>(
      mpi, request.rank, exchange_world_ranks(request, mpi.rank()), request.timeout);
}

}  // namespace
}  // namespace cohort::comm

extern "C" const cohort::comm::BackendAbi* cohort_backend() {
  static const cohort::comm::BackendAbi abi{.make = cohort::comm::make_mpi_backend};
  return &abi;
}
