// SPDX-License-Identifier: Apache-2.0
// Saves a checkpoint and is killed meanwhile; `killed_save_test` starts it many times.
// Usage: killed_save FOLDER UPDATE RANKS FIRST KILL_AT. Prints the calls that kill_at.h counts.
#include <cstdio>
#include <filesystem>

#include "cohort/base/program.h"

#include "tests/base/saving.h"
#include "tests/support/kill_at.h"

int main(int argc, char** argv) {
  return cohort::run_program("killed_save", [&] {
    if (argc != 6) return 2;
    const std::string folder = argv[1];
    const auto parent = std::filesystem::path(folder).parent_path();  // is synced, too
    cohort::test::kill_at(parent, std::stoi(argv[5]));
    cohort::Saving(std::stoll(argv[2]), std::stoi(argv[3]), std::stoi(argv[4])).save(folder);
    std::fputs(cohort::test::counted_calls().c_str(), stdout);
    return 0;
  });
}
