// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/options.h"

#include <algorithm>
#include <iterator>

#include "cohort/base/error.h"

namespace cohort::nmt {
namespace {

constexpr const char* kActivationNames[] = {"relu", "gelu", "swish"};  // in the enum's order

}  // namespace

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
  // The limits are far above what is trained: a wrong number ends here, not in want of memory.
  const auto in_range = [](const char* name, int64_t value, int64_t most) {
    if (value < 1 || value > most) {
      throw ConfigError(std::string(name) + " " + std::to_string(value) + ": expected 1 to " +
                        std::to_string(most));
    }
  };
  in_range("--dim-vocabs (source)", options.dim_vocab_source, 10'000'000);
  in_range("--dim-vocabs (target)", options.dim_vocab_target, 10'000'000);
  in_range("--dim-emb", options.dim_emb, 65'536);
  in_range("--transformer-heads", options.heads, 65'536);
  in_range("--enc-depth", options.enc_depth, 1000);
  in_range("--dec-depth", options.dec_depth, 1000);
  in_range("--transformer-dim-ffn", options.dim_ffn, 1'000'000);
  in_range("model.max_positions", options.max_positions, 100'000);
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
  if (options.tied_embeddings_all && options.dim_vocab_source != options.dim_vocab_target) {
    throw ConfigError("--tied-embeddings-all with --dim-vocabs " +
                      std::to_string(options.dim_vocab_source) + " " +
                      std::to_string(options.dim_vocab_target) +
                      ": expected the same number twice, for one shared vocabulary");
  }
}

Norm parse_norm(const std::string& text) {
  if (text == "da") return Norm::kPre;
  if (text == "dan") return Norm::kPost;
  throw ConfigError("--transformer-postprocess " + text +
                    ": expected da (pre-norm) or dan (post-norm)");
}

std::string to_string(Norm norm) {
  return norm == Norm::kPre ? "da" : "dan";
}

Activation parse_activation(const std::string& text) {
  const auto found = std::ranges::find(kActivationNames, text);
  if (found != std::end(kActivationNames))
    return static_cast<Activation>(found - std::begin(kActivationNames));
  throw ConfigError("--transformer-ffn-activation " + text + ": expected relu, gelu or swish");
}

std::string to_string(Activation activation) {
  return kActivationNames[static_cast<size_t>(activation)];
}

bool multiplies_bfloat16() {
  return __builtin_cpu_supports("avx512bf16");
}

Precision faster_precision(double float32_flop_per_s, double bfloat16_flop_per_s) {
  return bfloat16_flop_per_s >= kWorthwhileGain * float32_flop_per_s ? Precision::kBFloat16
                                                                     : Precision::kFloat32;
}

Precision best_precision(bool on_cpu) {
  return on_cpu ? precision_choice().precision : Precision::kBFloat16;
}

Precision parse_precision(const std::string& text) {
  if (text == "auto") return best_precision(/*on_cpu=*/true);
  if (text == "float32") return Precision::kFloat32;
  if (text == "bfloat16") return Precision::kBFloat16;
  if (text == "int8") return Precision::kInt8;
  throw ConfigError("--precision " + text + ": expected auto, bfloat16, float32 or int8");
}

void check_precision(Precision precision, bool on_cpu) {
  if (on_cpu && precision == Precision::kBFloat16 && !multiplies_bfloat16())
    throw ConfigError("--precision bfloat16: this CPU does not multiply it; expected float32 here");
  if (!on_cpu && precision == Precision::kInt8)
    throw ConfigError("--precision int8: expected --device cpu");
}

std::string to_string(Precision precision) {
  switch (precision) {
    case Precision::kFloat32:
      return "float32";
    case Precision::kBFloat16:
      return "bfloat16";
    case Precision::kInt8:
      return "int8";
  }
  return {};
}

}  // namespace cohort::nmt
