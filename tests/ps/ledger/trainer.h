// SPDX-License-Identifier: Apache-2.0
// What a trainer of the ledger does, and what it writes down for the auditor.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "cohort/ps/job.h"

namespace cohort::ps {

inline constexpr uint64_t kLedgerRows = 512;
inline constexpr int kLedgerTrainers = 4;  // At most.

/// A file that all processes have in their memory; who is killed leaves what it had written.
struct Page {
  std::atomic<bool> stop;
  struct Trainer {
    std::atomic<uint64_t> begun;          ///< Steps whose pushes may have left.
    std::atomic<uint64_t> steps;          ///< Steps whose pushes are acknowledged.
    std::atomic<uint64_t> greatest_lead;  ///< By which it was ahead of the slowest when it pulled.
    /// In sync mode a trainer that is started again repeats the step that has not closed: what its
    /// predecessor had counted of that step is not counted again.
    std::atomic<uint64_t> sent_steps, acknowledged_steps;
    std::atomic<bool> done;
    /// How often 1 was added to each row: about to be pushed, and acknowledged.
    std::array<std::atomic<uint32_t>, kLedgerRows> sent, acknowledged;
  };
  std::array<Trainer, kLedgerTrainers> trainers;
};

/// Maps `path`, made if it is not there.
Page* map_page(const std::string& path);

/// "sync", "async", "half-async", "geo", "ssp": integers are added up. "model": Adam and Adagrad
/// in sync mode, whose bits are compared.
const std::vector<std::string>& ledger_modes();
JobOptions ledger_job_of(const std::string& mode, int trainers, int servers);

struct TrainerOptions {
  std::string mode;
  uint32_t trainer = 0;
  int trainers = 2;
  uint64_t steps = 0;  ///< Of "model": how many.
  std::vector<std::string> endpoints;
  std::string page;
  uint64_t seed = 1;
};

/// Trains until the page says stop (of "model": its steps), and ends the process.
[[noreturn]] void run_trainer(const TrainerOptions& options);

/// All rows and parameters, as a reader sees them.
std::vector<float> weights_of(const std::string& mode, int trainers,
                              const std::vector<std::string>& endpoints);

}  // namespace cohort::ps
