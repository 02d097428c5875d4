// SPDX-License-Identifier: Apache-2.0
// Where a server's dense parameters live.
#pragma once
#include <string>

#include "cohort/ps/server/block_store.h"

namespace cohort::cli {

/// Of "host", or of libtorch's "cpu", "cuda" (the first card) or "cuda:N". The program that links
/// no libtorch becomes the one beside it that does (cohort_ps_tensors), with the same command line.
/// Errors: ConfigError: that program is not there; as comm::init_accelerator.
ps::BlockMaker blocks_on(const std::string& device);

}  // namespace cohort::cli
