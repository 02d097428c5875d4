// SPDX-License-Identifier: Apache-2.0
// How well scores tell clicks from the rest: exact, whatever trainers computed them.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ctr {

/// Figures over examples; NaN where they are not defined.
struct Metrics {
  int64_t count = 0;
  int64_t clicks = 0;
  double auc = 0;  ///< Share of pairs (click, other) in which the click scores higher; ties half.
  double log_loss = 0;         ///< Mean of -log p(label), natural logarithm.
  double mean_prediction = 0;  ///< Mean of p(click); clicks / count if calibrated.
};

/// The AUC with five digits, or why there is none.
std::string auc_text(const Metrics& metrics);

/// Scores of examples with their labels: 4 bytes each.
///
/// The metrics are functions of the set alone: not of the order of adding, nor of how the examples
/// were divided, to the last bit. A score is a logit: p(click) = 1 / (1 + exp(-score)).
class ScoreSet {
 public:
  /// Adds scores with labels 0 or 1, equally many.
  /// Errors: c10::ValueError for a score that is NaN.
  void add(std::span<const float> scores, std::span<const float> labels);
  /// Adds all of `other`.
  void merge(const ScoreSet& other);

  /// Cost: sorts the scores, in place of each label's order.
  /// Source: the AUC is the Wilcoxon-Mann-Whitney statistic, Hanley and McNeil 1982.
  Metrics metrics();

  /// The set as bytes, and back.
  /// Errors: c10::ValueError for other bytes.
  std::string to_bytes() const;
  static ScoreSet from_bytes(const std::string& bytes);

 private:
  std::vector<float> clicks_;
  std::vector<float> others_;
};

}  // namespace ctr
