#include "apps/nmt/model_flags.h"

#include <ATen/Parallel.h>

#include "cohort/base/error.h"

namespace cohort::apps {
namespace {

std::chrono::milliseconds milliseconds(const char* flag, double seconds) {
  if (!(seconds > 0 && seconds < 1e7)) {
    throw ConfigError(std::string(flag) + " " + std::to_string(seconds) +
                      ": expected more than 0 seconds");
  }
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

}  // namespace

void ModelFlags::add_to(CLI::App& app) {
  const std::string group = "Model";
  app.add_option("--preset", preset, "Sizes to start from: tiny, small, base or big")
      ->capture_default_str()
      ->group(group);
  app.add_option("--dim-vocabs", dim_vocabs, "Pieces of source and target vocabulary")
      ->expected(2)
      ->default_str("32000 32000")
      ->group(group);
  app.add_option("--dim-emb", dim_emb, "Model width")->group(group);
  app.add_option("--transformer-heads", heads, "Attention heads")->group(group);
  app.add_option("--enc-depth", enc_depth, "Encoder layers")->group(group);
  app.add_option("--dec-depth", dec_depth, "Decoder layers")->group(group);
  app.add_option("--transformer-dim-ffn", dim_ffn, "Inner width of the feed-forward blocks")
      ->group(group);
  app.add_option("--transformer-dropout", dropout, "Dropout probability, in [0, 1)")->group(group);
  app.add_option("--label-smoothing", label_smoothing, "Share spread over all words, in [0, 1)")
      ->group(group);
}

nmt::TransformerOptions ModelFlags::resolve() const {
  nmt::TransformerOptions model = nmt::preset(preset);
  if (!dim_vocabs.empty()) {
    model.dim_vocab_source = dim_vocabs[0];
    model.dim_vocab_target = dim_vocabs[1];
  }
  model.dim_emb = dim_emb.value_or(model.dim_emb);
  model.heads = heads.value_or(model.heads);
  model.enc_depth = enc_depth.value_or(model.enc_depth);
  model.dec_depth = dec_depth.value_or(model.dec_depth);
  model.dim_ffn = dim_ffn.value_or(model.dim_ffn);
  model.dropout = dropout.value_or(model.dropout);
  model.label_smoothing = label_smoothing.value_or(model.label_smoothing);
  nmt::validate(model);
  return model;
}

void GroupFlags::add_to(CLI::App& app) {
  const std::string section = "Ranks";
  app.add_option("--rank", place.rank, "This process's rank (with --nproc-per-node: this node's)")
      ->group(section);
  app.add_option("--world-size", place.world_size, "Processes (with --nproc-per-node: nodes)")
      ->group(section);
  app.add_option("--nproc-per-node", place.nproc_per_node,
                 "Processes of each node; LOCAL_RANK must be set")
      ->group(section);
  app.add_option("--addr", place.master_addr, "Host of rank 0")->group(section);
  app.add_option("--port", place.master_port, "Port of rank 0's store")->group(section);
  app.add_option("--dist-backend", group.backend, "Engine of the collectives")
      ->capture_default_str()
      ->group(section);
  app.add_option("--rendezvous-timeout", rendezvous_timeout_s, "Seconds until every rank has come")
      ->capture_default_str()
      ->group(section);
  app.add_option("--timeout", timeout_s, "Seconds that one collective may take")
      ->capture_default_str()
      ->group(section);
  app.add_option("--cpu-threads", cpu_threads,
                 "Threads of this rank (0: OMP_NUM_THREADS, else all cores)")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->group(section);
}

std::unique_ptr<comm::ProcessGroup> GroupFlags::connect() {
  group.rendezvous_timeout = milliseconds("--rendezvous-timeout", rendezvous_timeout_s);
  group.timeout = milliseconds("--timeout", timeout_s);
  if (cpu_threads > 0) at::set_num_threads(cpu_threads);
  return std::make_unique<comm::ProcessGroup>(comm::discover_place(place), group);
}

}  // namespace cohort::apps
