// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/report.h"

#include <algorithm>
#include <deque>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string.h>

#include "cohort/base/program.h"
#include "cohort/launch/environment.h"

namespace cohort::launch {
namespace {

constexpr std::streamoff kTailBytes = 64 * 1024;
constexpr int kStackFrames = 12;
constexpr size_t kMessageBytes = 4096;

nlohmann::json read_error_file(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
}

// The text field `name` of the process's error file; empty if there is none.
std::string error_field(const Outcome& outcome, const std::string& log_dir, const char* name) {
  const auto record = read_error_file(outcome.is_server ? server_error_file(log_dir, outcome.rank)
                                                        : error_file(log_dir, outcome.rank));
  if (!record.is_object() || !record.contains(name) || !record[name].is_string()) return "";
  return record[name].get<std::string>();
}

// Not in the middle of a character of UTF-8.
std::string cut(std::string text, size_t most_bytes) {
  if (text.size() <= most_bytes) return text;
  while (most_bytes > 0 && (text[most_bytes] & 0xC0) == 0x80) --most_bytes;
  return text.substr(0, most_bytes) + " ...";
}

// A shell turns the signal that ended its child into an exit code.
bool ended_by_passed_signal(const Outcome& outcome) {
  if (outcome.passed_signal == 0) return false;
  return outcome.stopped || outcome.status.exit_code == 128 + outcome.passed_signal;
}

// The first failure in `outcomes` that `counts`, one that is no lost peer before one that is.
template <typename Counts>
std::optional<Outcome> first_failure(std::span<const Outcome> outcomes, Counts counts) {
  std::optional<Outcome> first;
  for (const Outcome& outcome : outcomes) {
    if (!outcome.failed() || outcome.stopped || !counts(outcome)) continue;
    if (outcome.meaning() != kExitLostPeer) return outcome;
    if (!first) first = outcome;
  }
  return first;
}

}  // namespace

ExitCode Outcome::meaning() const {
  if (status.exit_code == kExitOk) return kExitOk;
  const bool known = status.exit_code >= kExitUsage && status.exit_code <= kExitStopped;
  return explained && known ? static_cast<ExitCode>(status.exit_code) : kExitFailure;
}

bool Outcome::failed() const {
  return meaning() != kExitOk && meaning() != kExitStopped;
}

bool explains(const std::string& path, int exit_code) {
  const auto record = read_error_file(path);
  return record.is_object() && record.contains("exit_code") && record["exit_code"] == exit_code;
}

JobOutcome job_outcome(std::span<const Outcome> outcomes) {
  const auto before =
      first_failure(outcomes, [](const Outcome& o) { return o.passed_signal == 0; });
  if (before) return {before->status.exit_code, before->meaning(), before};
  for (const Outcome& outcome : outcomes) {
    if (outcome.failed() && ended_by_passed_signal(outcome)) {
      return {128 + outcome.passed_signal, kExitFailure, std::nullopt};
    }
  }
  const auto after = first_failure(outcomes, [](const Outcome&) { return true; });
  if (after) return {after->status.exit_code, after->meaning(), after};
  const bool saved = std::any_of(outcomes.begin(), outcomes.end(), [](const Outcome& outcome) {
    return outcome.meaning() == kExitStopped;
  });
  const ExitCode code = saved ? kExitStopped : kExitOk;
  return {code, code, std::nullopt};
}

std::string signal_name(int signal) {
  const char* name = ::strsignal(signal);
  return std::to_string(signal) + " (" + (name ? name : "unknown") + ")";
}

std::string describe(const Outcome& outcome, const std::string& log_dir) {
  const std::string subject = (outcome.is_server ? "server " : "rank ") +
                              std::to_string(outcome.rank) + " (pid " +
                              std::to_string(outcome.pid) + ") ";
  if (!outcome.note.empty()) return subject + outcome.note;
  if (outcome.status.signal != 0) {
    return subject + "was killed by signal " + signal_name(outcome.status.signal);
  }
  const std::string message = cut(error_field(outcome, log_dir, "message"), kMessageBytes);
  return subject + "exited with code " + std::to_string(outcome.status.exit_code) +
         (message.empty() ? "" : ": ") + message;
}

std::string left_behind_line(const std::string& name, pid_t pid) {
  return "warning: " + name + " (pid " + std::to_string(pid) +
         ") does not end after SIGKILL and is left behind: a driver or a file system blocks it "
         "(state D)";
}

std::string indented_stack(const Outcome& outcome, const std::string& log_dir) {
  if (outcome.meaning() != kExitFailure) return "";
  std::istringstream frames(error_field(outcome, log_dir, "stack"));
  std::string text, frame;
  for (int i = 0; i < kStackFrames && std::getline(frames, frame); ++i) {
    text += "    " + frame + "\n";
  }
  return text;
}

std::string indented_tail(const std::string& path, int num_lines, int64_t begin) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return "";
  const std::streamoff size = file.tellg();
  if (begin > size) begin = 0;  // The disk did not take all that was written to the log.
  file.seekg(std::max<std::streamoff>(begin, size - kTailBytes));
  std::deque<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    while (!line.empty() && line.back() == '\r') line.pop_back();
    lines.push_back("    " + line.substr(line.rfind('\r') + 1) + "\n");
    if (lines.size() > static_cast<size_t>(num_lines)) lines.pop_front();
  }
  std::string text;
  for (const std::string& line : lines) text += line;
  return text;
}

}  // namespace cohort::launch
