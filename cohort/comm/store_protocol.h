// SPDX-License-Identifier: Apache-2.0
// The protocol between Cohort's store and its clients.
//
//   client  kStoreGreeting, nonce          both at once
//   server  kStoreGreeting, nonce
//   client  proof                          HMAC-SHA256 under the job's secret, over the role of the
//                                          prover and both nonces
//   server  proof, or kStoreRefusal and the end
//
// Then the client asks, one request at a time, and the server answers each: frames of a 32-bit
// length, a kind and fields, each a 32-bit length and bytes, in the byte order of the hosts.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::comm {

inline constexpr std::string_view kStoreGreeting = "cohort store 1 ";
inline constexpr size_t kStoreNonceSize = 32;
inline constexpr size_t kStoreProofSize = 64;
inline constexpr std::string_view kStoreRefusal =
    "----------------------------------------------------------------";

inline constexpr size_t kLongestStoreKey = 4096;
/// Of one message, so of a value, too.
inline constexpr size_t kLongestStoreMessage = size_t{256} << 20;

enum class StoreWord : uint8_t {
  kSet,         ///< key, value, key, value ...
  kCompareSet,  ///< key, expected, desired; answered with the value that is there then.
  kAdd,         ///< key, number; answered with the sum.
  kAppend,      ///< key, value.
  kDelete,      ///< key; answered with "1" or "0".
  kCheck,       ///< keys; answered with "1" or "0".
  kCount,       ///< Answered with the number of keys.
  kGet,         ///< keys; answered with their values once all are there.
  kWait,        ///< keys; answered once all are there.
  kCancel,      ///< Ends a kGet or kWait; answered with kCancelled, whether or not one was open.
  kDone,        ///< An answer.
  kCancelled,   ///< The answer to kCancel.
  kRefused,     ///< An answer: why.
};

/// `kind` and `fields` point into the bytes that they were read from.
struct StoreMessage {
  StoreWord kind = StoreWord::kDone;
  std::vector<std::string_view> fields;
  size_t size = 0;  ///< Bytes of the frame.
};

/// Returns how the `role` ("client", "server") proves that it has `secret`.
std::string store_proof(const std::string& secret, const std::string& role,
                        std::string_view client_nonce, std::string_view server_nonce);

/// Returns a message's frame.
/// Errors: c10::ValueError if it is longer than kLongestStoreMessage.
std::string frame_of(StoreWord kind, const std::vector<std::string_view>& fields);

/// Returns the message at the front of `bytes`; nothing if it is not whole yet.
/// Errors: c10::DistNetworkError if it is none, or too long.
std::optional<StoreMessage> first_message(std::string_view bytes);

}  // namespace cohort::comm
