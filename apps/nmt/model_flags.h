// SPDX-License-Identifier: Apache-2.0
// Flags that several commands share: the model's sizes.
#pragma once
#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cohort/nmt/options.h"

namespace cohort::cli {

/// Adds --dim-vocabs, whose default is no value.
void add_dim_vocabs(CLI::App& app, std::vector<int64_t>& sizes, const std::string& group);

/// Sizes as flags; those not given keep the preset's.
struct ModelFlags {
  std::string preset = "base";
  std::vector<int64_t> dim_vocabs;
  std::optional<int64_t> dim_emb, heads, enc_depth, dec_depth, dim_ffn;
  std::optional<double> dropout, label_smoothing;
  bool tied_embeddings = false;
  bool tied_embeddings_all = false;
  std::string postprocess = nmt::to_string(nmt::Norm::kPre);
  std::string ffn_activation = nmt::to_string(nmt::Activation::kRelu);

  void add_to(CLI::App& app);
  /// Errors: ConfigError that names the flag.
  nmt::TransformerOptions resolve() const;
};

}  // namespace cohort::cli
