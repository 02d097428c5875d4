// SPDX-License-Identifier: Apache-2.0
// The type in which values travel between trainers and servers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace cohort::ps {

/// Servers keep weights and the optimizer's state in float32, whatever travels.
///
/// kBfloat16 halves the bytes of values in pulls, in pushes and in the log, which has what
/// travelled. Ids stay as they are. Weights are rounded to the nearest (ties to even) by the server.
/// Gradients are rounded by the trainer, up or down at random, so that their mean is the gradient:
/// the random numbers are a function of (table and its seed, id; or the dense parameter; trainer,
/// number of the push, element), so a push that is made again has the same bits, whatever the
/// number of servers. NaN and infinities stay what they are; a finite gradient stays finite.
/// Initial values travel as float32.
enum class WireDtype : uint32_t { kFloat32, kBfloat16 };

/// Of a value.
constexpr size_t bytes_of(WireDtype dtype) {
  return dtype == WireDtype::kBfloat16 ? sizeof(uint16_t) : sizeof(float);
}

/// "float32", "bfloat16".
std::string to_string(WireDtype dtype);
/// Errors: ConfigError that lists the names.
WireDtype wire_dtype_named(const std::string& name);

}  // namespace cohort::ps
