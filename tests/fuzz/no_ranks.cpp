// SPDX-License-Identifier: Apache-2.0
// Stands for what the collective half of token_cache.cpp and the device's half of corpus.cpp call,
// and a fuzz target never does: so libtorch's half of the project need not be built for it.
#include "cohort/comm/process_group.h"
#include "cohort/nmt/transformer.h"
#include "cohort/translate/run_on_ranks.h"

namespace cohort {

const comm::RankInfo& comm::ProcessGroup::rank_info() const {
  TORCH_CHECK(false, "a fuzz target has no ranks");
}

std::vector<std::string> comm::ProcessGroup::all_gather_object(const std::string&, CallSite) const {
  TORCH_CHECK(false, "a fuzz target has no ranks");
}

void translate::run_on_ranks(const comm::ProcessGroup&, const std::string&, bool,
                             std::chrono::milliseconds, const std::function<void()>&) {
  TORCH_CHECK(false, "a fuzz target has no ranks");
}

at::Tensor nmt::Batch::label_rows() const {
  TORCH_CHECK(false, "a fuzz target has no device");
}

}  // namespace cohort
