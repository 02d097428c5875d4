// SPDX-License-Identifier: Apache-2.0
// The handshake of a launcher and the rendezvous server: each proves that it has the job's secret
// and sends the number of the last message received.
//
//   server       {"kind": "challenge", "version": 6, "nonce": "..."}
//   node         {"kind": "hello", "version": 6, "node": "...", "session": 1, "nonce": "...",
//                 "proof": "...", "received": 0, "id": "job", "nnodes": "1:3", "max_restarts": 0,
//                 "keep_alive_ms": 5000}
//   server       {"kind": "welcome", "proof": "...", "received": 0, "known": false}
//            or  {"kind": "end", "code": 2, "why": "..."}
//
// A proof is HMAC-SHA256 under the secret over the prover's role, both nonces and the node's name.
// Without --rdzv-secret-file the secret is empty: every launcher with the same --rdzv-id is
// accepted and receives the secret of the job's store.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace cohort::launch {

inline constexpr int kProtocolVersion = 6;

/// A node's first message.
struct Hello {
  int version = kProtocolVersion;
  std::string node;      ///< The launcher's name: 32 random digits.
  int64_t session = 0;   ///< The node's sequence of messages that resumes.
  std::string nonce;     ///< Random.
  std::string proof;     ///< proof_of_node.
  int64_t received = 0;  ///< The last message of the session that the node has.
  std::string id;        ///< Settings of the job, which all nodes have in common.
  std::string nnodes;
  int max_restarts = 0;
  std::chrono::milliseconds keep_alive{0};  ///< KeepAlive::interval.
};

/// The rendezvous server's reply.
struct Welcome {
  std::string proof;     ///< proof_of_server.
  int64_t received = 0;  ///< The last message of the session that the rendezvous server has.
  bool known = false;    ///< Whether the session resumes; else it begins.
};

std::string challenge_line(const std::string& nonce);
std::string line_of(const Hello& hello);
std::string line_of(const Welcome& welcome);
/// Rejects a connection, before or after the proof.
std::string rejection_line(const std::string& why);

/// Errors: nlohmann::json::exception: `line` is no hello. One of another version has only that.
Hello parse_hello(const std::string& line);

std::string proof_of_node(const std::string& secret, const std::string& challenge,
                          const Hello& hello);
std::string proof_of_server(const std::string& secret, const std::string& challenge,
                            const Hello& hello);

}  // namespace cohort::launch
