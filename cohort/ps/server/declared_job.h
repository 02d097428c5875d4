// SPDX-License-Identifier: Apache-2.0
// A job as one server was told it: what its messages must look like.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cohort/ps/job.h"
#include "cohort/ps/wire/message.h"

namespace cohort::ps {

/// Threads: any; it never changes.
class DeclaredJob {
 public:
  DeclaredJob(JobOptions options, int server);

  const JobOptions& options() const { return options_; }
  uint64_t fingerprint() const { return fingerprint_; }

  /// Errors: c10::ValueError: `fingerprint` is of another job; how it differs, if `text` is its JSON.
  void check_same(uint64_t fingerprint, const std::string& text) const;

  /// Checks a push, initial values or a pull: the job, sections, widths, ids of this server, finite
  /// values if the job wants them, the size of the answer.
  /// Errors: c10::ValueError that says what does not fit.
  /// Cost:   a pass over all ids and values.
  void check(const Message& message) const;

  /// What the sections of the answer to a pull, which was checked, look like.
  std::vector<SectionShape> answer_to(const Message& pull) const;
  /// Bytes of the values in that answer.
  int64_t answer_bytes(const Message& pull) const;

 private:
  void check_sections(const Message& message) const;
  WireDtype dtype_of(const Section& section) const;
  void check_dtype(const Section& section, bool is_initial) const;
  /// The first id of another server.
  std::optional<uint64_t> find_foreign(std::span<const uint64_t> ids) const;
  void check_finite(const Message& push) const;

  JobOptions options_;
  uint64_t fingerprint_;
  int server_;
  size_t num_blocks_;  // Of the server.
};

}  // namespace cohort::ps
