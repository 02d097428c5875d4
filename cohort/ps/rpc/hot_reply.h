// SPDX-License-Identifier: Apache-2.0
// The answer to a push or pull as bytes: code u32, bytes of text u32, steps u64, progress u64, bytes
// of a message in shared memory u64 (shared_area.h; 0: none), text padded to 8, message.
#pragma once
#include <cstdint>

namespace cohort::ps {

/// Of the bytes of pushes, pulls and their answers: a join says it on both sides, which must be the
/// same. 0: of version 0.3 and earlier, which do not say it.
inline constexpr uint32_t kFormat = 2;

/// The metadata of a call that holds the job's secret.
inline constexpr const char* kJobSecret = "cohort-job-secret";

struct HotReply {
  uint32_t code = 0;
  uint32_t text_bytes = 0;
  uint64_t steps = 0;
  uint64_t progress = 0;
  uint64_t shared_bytes = 0;
};
static_assert(sizeof(HotReply) == 32);

}  // namespace cohort::ps
