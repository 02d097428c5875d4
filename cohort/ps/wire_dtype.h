// SPDX-License-Identifier: Apache-2.0
// The type of the values in messages between trainers and servers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace cohort::ps {

/// Servers keep weights and the optimizer's state in float32, whatever the messages' type is.
///
/// kBfloat16 halves the bytes of values in pulls, in pushes and in the log of pushes, which stores
/// them as received. Ids stay as they are. The server rounds weights to nearest, ties to even.
/// Gradients are rounded by the trainer, up or down at random, so that their mean is the gradient:
/// the random numbers are a function of (table and its seed, id; or the dense parameter; trainer,
/// number of the push, element), so a push that is made again has the same bits, whatever the
/// number of servers. NaN and infinities stay what they are; a finite gradient stays finite.
/// Initial values are sent as float32.
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
