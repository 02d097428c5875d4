// SPDX-License-Identifier: Apache-2.0
// Communication hooks that send gradients in 16 bits, or in another type.
#pragma once
#include <c10/core/ScalarType.h>
#include <functional>

#include "cohort/parallel/comm_hook.h"

namespace cohort::parallel {

/// Returns the hook that sends float16: half the bytes of float32.
///
/// Collective: one all-reduce per bucket. Sparse buckets are refused.
/// Numerics:   each rank multiplies by 1 / world size in the gradient's dtype and rounds to
///             float16; ranks sum in float16, with W - 1 roundings at most (over shm in float32,
///             with one). With u = 2^-11 an
///             element's error is at most ((1 + u)^W - 1) * (|g_1| + ... + |g_W|) / W, and W *
///             2^-25 more where float16 is subnormal (below 6e-5). A mean above 65504 becomes
///             infinite, on every rank alike.
CommHook fp16_compress_hook();

/// Returns the hook that sends bfloat16: half the bytes of float32 with float32's range.
/// As fp16_compress_hook with u = 2^-8, without the subnormal term and without overflow.
CommHook bf16_compress_hook();

/// Returns the hook that sends `type`, as the two above. `divisor` is asked at each bucket what to
/// divide by; empty: the world size.
CommHook compress_hook(at::ScalarType type, std::function<int()> divisor = {});

/// Return the hook that rounds the bucket to 16 bits, lets `inner` reduce that, and widens its
/// result. `inner` gets a bucket of the low type, gradients included, and divides: gradients are
/// rounded before that, so that in float16 an element of one rank above 65504 becomes infinite.
/// Sparse buckets are refused.
CommHook fp16_compress_wrapper(CommHook inner);
CommHook bf16_compress_wrapper(CommHook inner);

}  // namespace cohort::parallel
