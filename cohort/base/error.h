// SPDX-License-Identifier: Apache-2.0
// The two error types that Cohort adds to c10's tree, and one-line texts of any exception.
//
// c10::Error            what TORCH_CHECK throws
//   c10::ValueError     the caller's fault
//     ConfigError       a flag, file or environment variable
//   c10::DistError      the network's or a peer's fault; c10d throws its children
//     PeerError         a rank was lost, or did not answer in time
#pragma once
#include <c10/util/Exception.h>
#include <chrono>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace cohort {

/// Bad input from outside: a flag, an environment variable, a file's content.
///
/// The message is one line: what was expected, then the values, the thing named first.
/// Example: "RANK is set but WORLD_SIZE is not: set both, or neither".
class ConfigError : public c10::ValueError {
 public:
  explicit ConfigError(const std::string& message);
};

/// A peer was lost or did not answer. The process group is dead after it: rebuild it or exit.
class PeerError : public c10::DistError {
 public:
  struct Facts {
    int rank = -1;                ///< The rank that reports.
    std::vector<int> lost_ranks;  ///< The lost ranks, as far as known.
    std::string operation;        ///< "all_reduce", "barrier", "rendezvous" ...
    int64_t sequence = -1;        ///< How many collectives this rank began before; -1 unknown.
    std::chrono::milliseconds elapsed{0};  ///< How long the operation ran.
    std::string cause;                     ///< The backend's message; newlines become spaces.
    bool disagreement = false;             ///< No rank is lost: the ranks called different things.
  };
  explicit PeerError(Facts facts);
  const Facts& facts() const { return facts_; }

 private:
  Facts facts_;
};

/// Throws a c10::Error that carries no stack, so that none is shown: what the system refused (a
/// full disk), or what another rank reports. The message says all; the place in the program
/// explains nothing.
[[noreturn]] void throw_without_stack(const std::string& message);

/// Returns the text of `error` on one line, without c10's back trace.
std::string one_line(const std::exception& error);

}  // namespace cohort
