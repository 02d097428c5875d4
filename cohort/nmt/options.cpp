#include "cohort/nmt/options.h"

#include "cohort/base/error.h"

namespace cohort::nmt {

TransformerOptions preset(const std::string& name) {
  if (name == "base") return {};
  if (name == "tiny") {
    return {.dim_emb = 128, .heads = 4, .enc_depth = 2, .dec_depth = 2, .dim_ffn = 512};
  }
  if (name == "small") {
    return {.dim_emb = 256, .heads = 4, .enc_depth = 3, .dec_depth = 3, .dim_ffn = 1024};
  }
  if (name == "big") {
    return {.dim_emb = 1024,
            .heads = 16,
            .enc_depth = 6,
            .dec_depth = 6,
            .dim_ffn = 4096,
            .dropout = 0.3};
  }
  throw ConfigError("--preset " + name + ": expected tiny, small, base or big");
}

void validate(const TransformerOptions& options) {
  const auto positive = [](const char* name, int64_t value) {
    if (value < 1) {
      throw ConfigError(std::string(name) + " " + std::to_string(value) + ": expected at least 1");
    }
  };
  positive("--dim-vocabs (source)", options.dim_vocab_source);
  positive("--dim-vocabs (target)", options.dim_vocab_target);
  positive("--dim-emb", options.dim_emb);
  positive("--transformer-heads", options.heads);
  positive("--enc-depth", options.enc_depth);
  positive("--dec-depth", options.dec_depth);
  positive("--transformer-dim-ffn", options.dim_ffn);
  if (options.dim_emb % options.heads != 0 || options.dim_emb % 2 != 0) {
    throw ConfigError("--dim-emb " + std::to_string(options.dim_emb) +
                      ": expected an even multiple of --transformer-heads " +
                      std::to_string(options.heads));
  }
  const auto share = [](const char* name, double value) {
    if (!(value >= 0 && value < 1)) {
      throw ConfigError(std::string(name) + " " + std::to_string(value) + ": expected [0, 1)");
    }
  };
  share("--transformer-dropout", options.dropout);
  share("--label-smoothing", options.label_smoothing);
}

Precision best_precision() {
  return __builtin_cpu_supports("avx512bf16") ? Precision::kBFloat16 : Precision::kFloat32;
}

Precision parse_precision(const std::string& text) {
  if (text == "auto") return best_precision();
  if (text == "float32") return Precision::kFloat32;
  if (text == "bfloat16") {
    if (best_precision() != Precision::kBFloat16) {
      throw ConfigError(
          "--precision bfloat16: this CPU does not multiply it; expected float32 here");
    }
    return Precision::kBFloat16;
  }
  throw ConfigError("--precision " + text + ": expected auto, bfloat16 or float32");
}

std::string to_string(Precision precision) {
  return precision == Precision::kBFloat16 ? "bfloat16" : "float32";
}

}  // namespace cohort::nmt
