// SPDX-License-Identifier: Apache-2.0
// Sizes of a Transformer. A plain value: flags write it, checkpoints store it.
#pragma once
#include <cstdint>
#include <string>

namespace cohort::nmt {

/// Where a block of a layer normalises; x is the block's input.
enum class Norm {
  kPre,   ///< x + block(norm(x)), and once more after the last layer.
  kPost,  ///< norm(x + block(x)), and nothing after the last layer.
};

/// Between the two products of a feed-forward block.
enum class Activation {
  kRelu,   ///< max(x, 0)
  kGelu,   ///< x times the normal distribution's share below x, exactly (PyTorch's gelu).
  kSwish,  ///< x times the logistic function of x (PyTorch's silu).
};

struct TransformerOptions {
  int64_t dim_vocab_source = 32000;  ///< Source vocabulary.
  int64_t dim_vocab_target = 32000;  ///< Target vocabulary.
  int64_t dim_emb = 512;             ///< Model width; a multiple of `heads`.
  int64_t heads = 8;                 ///< Attention heads.
  int64_t enc_depth = 6;             ///< Encoder layers.
  int64_t dec_depth = 6;             ///< Decoder layers.
  int64_t dim_ffn = 2048;            ///< Inner width of the feed-forward blocks.
  int64_t max_positions = 5000;      ///< Longest sentence in tokens.
  double dropout = 0.1;              ///< On embeddings, attention weights, inner and block outputs.
  double label_smoothing = 0.1;      ///< Share of the target distribution spread over all words.
  bool tied_embeddings = false;      ///< The output projection is the target embedding's table.
  bool tied_embeddings_all = false;  ///< ... and the source embedding's: one shared vocabulary.
  Norm norm = Norm::kPre;
  Activation ffn_activation = Activation::kRelu;

  bool operator==(const TransformerOptions&) const = default;
};

/// Returns the sizes named "tiny", "small", "base" or "big"; vocabularies keep their defaults.
/// Errors: ConfigError for another name.
TransformerOptions preset(const std::string& name);

/// Parses Marian's --transformer-postprocess: "da" is kPre, "dan" kPost.
/// Errors: ConfigError.
Norm parse_norm(const std::string& text);
std::string to_string(Norm norm);  ///< As parse_norm reads it.
/// Parses "relu", "gelu" or "swish".
/// Errors: ConfigError.
Activation parse_activation(const std::string& text);
std::string to_string(Activation activation);

/// Throws ConfigError that names the field if a size is out of range.
void validate(const TransformerOptions& options);

/// The type in which matrices are multiplied; parameters and their gradients are float32 always
/// (float64 after module->to(kDouble), for tests). kInt8 is for inference on the CPU alone: its
/// models have 8-bit weights (quantize in transformer.h), and compute in float32 between products.
enum class Precision { kFloat32, kBFloat16, kInt8 };

/// The precision that suits this CPU, and why.
struct PrecisionChoice {
  Precision precision = Precision::kFloat32;
  /// Of one thread, as measured: 0 where the processor has no products of bfloat16 to compare.
  double float32_flop_per_s = 0, bfloat16_flop_per_s = 0;
};

/// Whether the processor has instructions for products of bfloat16.
bool multiplies_bfloat16();
/// bfloat16 where its products are kWorthwhileGain times as fast as float32's or more, else float32.
Precision faster_precision(double float32_flop_per_s, double bfloat16_flop_per_s);
/// faster_precision() of this CPU.
///
/// Measured once per process, by the first call, in some 10 ms of CPU time of the calling thread, in which libtorch's number of
/// threads is 1. Draws no random numbers. Processes of one job may run on different processors: translate::agreed_precision.
const PrecisionChoice& precision_choice();
/// Far from what is found: 2 and more where bfloat16 is worth it, 0.6 where it is slower than float32. So noise does not change
/// what is chosen.
inline constexpr double kWorthwhileGain = 1.2;
/// precision_choice().precision, or elsewhere than on a CPU bfloat16: nothing is measured then.
Precision best_precision(bool on_cpu);
/// Parses "float32", "bfloat16", "int8" or "auto", which is best_precision() of the CPU.
/// Errors: ConfigError for another text.
Precision parse_precision(const std::string& text);
/// Errors: ConfigError for bfloat16 on a CPU that does not multiply it, and for int8 elsewhere than on a CPU.
void check_precision(Precision precision, bool on_cpu);
std::string to_string(Precision precision);

}  // namespace cohort::nmt
