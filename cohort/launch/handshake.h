// How a launcher and the coordinator begin a connection: each proves that it has the job's secret,
// and says what it has received.
//
//   coordinator  {"say": "challenge", "version": 4, "nonce": "..."}
//   node         {"say": "hello", "version": 4, "node": "...", "session": 1, "nonce": "...",
//                 "proof": "...", "received": 0, "id": "job", "nnodes": "1:3", "max_restarts": 0}
//   coordinator  {"say": "welcome", "proof": "...", "received": 0, "known": false}
//            or  {"say": "end", "code": 2, "why": "..."}
//
// A proof is HMAC-SHA256 under the secret over who proves, both nonces and the node's name. Without
// --rdzv-secret-file the secret is empty, and whoever knows --rdzv-id takes part, and is told the
// secret of the job's store.
#pragma once
#include <cstdint>
#include <string>

namespace cohort::launch {

inline constexpr int kProtocolVersion = 4;

/// What a node says first.
struct Hello {
  int version = kProtocolVersion;
  std::string node;      ///< The launcher's name: 32 random digits.
  int64_t session = 0;   ///< Which of the node's sequences of messages goes on.
  std::string nonce;     ///< Random.
  std::string proof;     ///< proof_of_node.
  int64_t received = 0;  ///< The last message of the session that the node has.
  std::string id;        ///< Settings of the job, which all nodes have in common.
  std::string nnodes;
  int max_restarts = 0;
};

/// What the coordinator answers.
struct Welcome {
  std::string proof;     ///< proof_of_coordinator.
  int64_t received = 0;  ///< The last message of the session that the coordinator has.
  bool known = false;    ///< Whether the session goes on; else it begins.
};

std::string challenge_line(const std::string& nonce);
std::string line_of(const Hello& hello);
std::string line_of(const Welcome& welcome);
/// How a connection is refused, before or after the proof.
std::string refusal_line(const std::string& why);

/// Errors: nlohmann::json::exception: `line` is no hello. One of another version has only that.
Hello parse_hello(const std::string& line);

std::string proof_of_node(const std::string& secret, const std::string& challenge,
                          const Hello& hello);
std::string proof_of_coordinator(const std::string& secret, const std::string& challenge,
                                 const Hello& hello);

}  // namespace cohort::launch
