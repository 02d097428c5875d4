// SPDX-License-Identifier: Apache-2.0
#include "apps/nmt/model_flags.h"

#include "cohort/cli/parse.h"

namespace cohort::cli {

void add_dim_vocabs(CLI::App& app, std::vector<int64_t>& sizes, const std::string& group) {
  app.add_option("--dim-vocabs", sizes,
                 "Sizes of the source and the target vocabulary; not needed for files that exist")
      ->expected(2)
      ->default_str("[32000,32000]")
      ->group(group);
}

void ModelFlags::add_to(CLI::App& app) {
  const std::string group = "Model";
  const std::string of_preset = " (default: the preset's)";
  app.add_option("--preset", preset, "Sizes to start from")
      ->check(one_of({"tiny", "small", "base", "big"}))
      ->capture_default_str()
      ->group(group);
  add_dim_vocabs(app, dim_vocabs, group);
  app.add_option("--dim-emb", dim_emb, "Model width" + of_preset)->group(group);
  app.add_option("--transformer-heads", heads, "Attention heads" + of_preset)->group(group);
  app.add_option("--enc-depth", enc_depth, "Encoder layers" + of_preset)->group(group);
  app.add_option("--dec-depth", dec_depth, "Decoder layers" + of_preset)->group(group);
  app.add_option("--transformer-dim-ffn", dim_ffn,
                 "Inner width of the feed-forward blocks" + of_preset)
      ->group(group);
  app.add_option("--transformer-dropout", dropout, "Dropout probability, in [0, 1)" + of_preset)
      ->group(group);
  app.add_option("--label-smoothing", label_smoothing,
                 "Probability that is spread over all words, in [0, 1)" + of_preset)
      ->group(group);
  app.add_flag("--tied-embeddings", tied_embeddings,
               "The output projection is the target embedding's table")
      ->group(group);
  app.add_flag("--tied-embeddings-all", tied_embeddings_all,
               "The same, for the source embedding, too; needs one vocabulary for both sides")
      ->group(group);
  app.add_option("--transformer-postprocess", postprocess,
                 "da: pre-norm, a block's input is normalised; dan: post-norm, its output with "
                 "the input added")
      ->check(one_of({"da", "dan"}))
      ->capture_default_str()
      ->group(group);
  app.add_option("--transformer-ffn-activation", ffn_activation,
                 "Activation of the feed-forward blocks")
      ->check(one_of({"relu", "gelu", "swish"}))
      ->capture_default_str()
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
  model.tied_embeddings = tied_embeddings || tied_embeddings_all;
  model.tied_embeddings_all = tied_embeddings_all;
  model.norm = nmt::parse_norm(postprocess);
  model.ffn_activation = nmt::parse_activation(ffn_activation);
  nmt::validate(model);
  return model;
}

}  // namespace cohort::cli
