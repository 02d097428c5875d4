// Flags that several commands share: the model's sizes, the group, the precision.
#pragma once
#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/nmt/options.h"

namespace cohort::apps {

/// Sizes as flags; those not given keep the preset's.
struct ModelFlags {
  std::string preset = "base";
  std::vector<int64_t> dim_vocabs;
  std::optional<int64_t> dim_emb, heads, enc_depth, dec_depth, dim_ffn;
  std::optional<double> dropout, label_smoothing;

  void add_to(CLI::App& app);
  /// Errors: ConfigError that names the flag.
  nmt::TransformerOptions resolve() const;
};

/// The rank's place and waits as flags.
struct GroupFlags {
  comm::PlaceOptions place;
  comm::GroupOptions group;
  double rendezvous_timeout_s = 300;
  double timeout_s = 600;
  int cpu_threads = 0;

  void add_to(CLI::App& app);
  /// Finds the place, sets the threads and meets the other ranks. Collective; blocks.
  std::unique_ptr<comm::ProcessGroup> connect();
};

}  // namespace cohort::apps
