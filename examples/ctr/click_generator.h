// SPDX-License-Identifier: Apache-2.0
// Made-up clicks in Criteo's format, drawn from a logistic model that is known: so is the AUC that
// can be attained.
#pragma once
#include <cstdint>
#include <string>

#include "examples/ctr/scores.h"

namespace ctr {

struct GeneratorOptions {
  int64_t rows = 1'000'000;  ///< Training examples.
  int64_t test_rows = -1;    ///< Test examples; below 0: a tenth of rows.
  uint64_t seed = 1;
  bool overwrite = false;  ///< Replace what is there.
  /// Category k of a slot, from 1, comes up in proportion to the integral of x^-zipf over [k, k +
  /// 1].
  double zipf = 1.02;
};

/// One example before it is text. Missing numbers are below 0.
struct MadeExample {
  bool click = false;
  double logit = 0;  ///< Of the true probability of a click.
  int64_t numbers[13] = {};
  uint32_t categories[26] = {};
};

/// Draws examples: row i is a function of (seed, i) alone.
///
/// The model: a bias, a weight for each category among the 100 most frequent of its slot, a slope
/// for log(x + 1) of each number, and products of two slots' hidden factors for four pairs of
/// slots. Slots have as many categories as those of Criteo's Kaggle set.
/// Threads: immutable after construction.
class ClickModel {
 public:
  /// Errors: ConfigError for an exponent that is not above 0 and below 10.
  ClickModel(uint64_t seed, double zipf);
  MadeExample draw(int64_t row) const;

 private:
  uint64_t seed_;
  double zipf_;
};

/// How well the true logits themselves tell clicks from the rest.
struct Truth {
  Metrics train;
  Metrics test;  ///< What a model that learnt everything would score.
};

/// Writes `folder`/train.tsv, test.tsv and truth.json, each in one step; the folder is made if need
/// be. Test rows follow the training rows in the model's sequence. Blocks until the disk has them.
///
/// train.tsv comes last, and one to be replaced goes first: wherever it is, the others are its own.
/// An error leaves none of the files. A process that is killed may leave the other two.
/// Cost: about 5 microseconds and 280 bytes a row.
/// Errors: ConfigError for rows < 1, a folder that cannot be written, or one of the files there;
///         Interrupted (interruption.h) by SIGINT or SIGTERM.
Truth generate_clicks(const GeneratorOptions& options, const std::string& folder);

/// Whether `folder` has files of a generation that was killed, and no train.tsv.
bool is_unfinished(const std::string& folder);

/// The attainable AUC that generate_clicks noted in `folder`'s truth.json; below 0 if there is
/// none.
double attainable_auc(const std::string& folder);

}  // namespace ctr
