// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/error.h"

#include <sstream>

namespace cohort {
namespace {

std::string flatten(std::string text) {
  // Gloo's and c10d's texts end in sentences about other logs; keep the first line's worth.
  for (char& c : text) {
    if (c == '\n' || c == '\r' || c == '\t') c = ' ';
  }
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}

std::string describe(const PeerError::Facts& facts) {
  std::ostringstream out;
  if (facts.disagreement) {
    out << "the ranks disagree";
  } else if (facts.lost_ranks.empty()) {
    out << "lost a peer";
  } else {
    out << (facts.lost_ranks.size() == 1 ? "lost rank" : "lost ranks");
    for (int rank : facts.lost_ranks) out << ' ' << rank;
  }
  out << " in " << facts.operation;
  if (facts.sequence >= 0) out << " #" << facts.sequence;
  out << " after " << facts.elapsed.count() << " ms on rank " << facts.rank;
  if (!facts.cause.empty()) out << ": " << flatten(facts.cause);
  return out.str();
}

}  // namespace

ConfigError::ConfigError(const std::string& message)
    : c10::ValueError(flatten(message), c10::Backtrace()) {}

PeerError::PeerError(Facts facts)
    : c10::DistError(describe(facts), c10::Backtrace()), facts_(std::move(facts)) {}

void throw_without_stack(const std::string& message) {
  throw c10::Error(message, c10::Backtrace());
}

std::string one_line(const std::exception& error) {
  if (const auto* c10_error = dynamic_cast<const c10::Error*>(&error)) {
    return flatten(c10_error->what_without_backtrace());
  }
  return flatten(error.what());
}

}  // namespace cohort
