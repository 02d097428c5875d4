// The encoder-decoder Transformer as a pure function of tensors; it knows nothing of ranks.
// Legend: B sentences, S source tokens, T target tokens, D width, H heads, V vocabulary, N rows.
// Source: Vaswani et al. 2017, arXiv:1706.03762; pre-norm: Xiong et al. 2020, arXiv:2002.04745.
#pragma once
#include <ATen/core/Tensor.h>
#include <memory>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <tuple>
#include <vector>

#include "cohort/nmt/fused.h"
#include "cohort/nmt/options.h"

namespace cohort::nmt {

/// Padded token ids of one batch. Ids: 0 pad, 2 begin, 3 end (text/tokenizer.h).
struct Batch {
  at::Tensor source_BS;         ///< int64, each row ends with the end id, then padding.
  at::Tensor source_lengths_B;  ///< int64 in [1, S].
  at::Tensor input_BT;          ///< int64, each row begins with the begin id.
  at::Tensor labels_BT;         ///< int64, input moved by one, ends with the end id, then padding.
  at::Tensor target_lengths_B;  ///< int64 in [1, T]; counts labels.
  int64_t num_target_tokens = 0;  ///< Labels that are no padding.
};

/// What all layers of one model share: how to compute, and which elements dropout takes.
struct LayerContext {
  Precision precision = Precision::kFloat32;
  double dropout = 0;
  DropoutStream stream;
};

/// y = x W^T (+ b) in the context's compute type; W and b stay in their own.
class ProjectionImpl : public torch::nn::Module {
 public:
  ProjectionImpl(int64_t in, int64_t out, bool bias, std::shared_ptr<LayerContext> context);
  at::Tensor forward(const at::Tensor& x);
  /// The weight in the compute type; kept between calls without gradients while it does not change.
  at::Tensor computed_weight();

  at::Tensor weight;
  at::Tensor bias;  ///< Undefined without bias.

 private:
  std::shared_ptr<LayerContext> context_;
  at::Tensor cast_weight_;
  int64_t cast_version_ = -1;
};
TORCH_MODULE(Projection);

/// Keys and values that decoding keeps per layer, [N, H, T, D/H] each; undefined before the first
/// step.
struct KeyValues {
  at::Tensor keys;
  at::Tensor values;
};

class AttentionImpl : public torch::nn::Module {
 public:
  AttentionImpl(int64_t width, int64_t heads, std::shared_ptr<LayerContext> context);
  /// Queries, keys and values from x itself.
  at::Tensor self(const at::Tensor& x_BTD, const at::Tensor& lengths_B, bool causal);
  /// The same for one next token of each of N sentences: its key and value are appended to `cache`.
  at::Tensor self_step(const at::Tensor& x_N1D, KeyValues& cache);
  /// Keys and values of `memory`, for `cross`.
  KeyValues project_memory(const at::Tensor& memory_BSD);
  at::Tensor cross(const at::Tensor& x_BTD, const KeyValues& memory, const at::Tensor& lengths_B);

  Projection in_proj{nullptr};  ///< Rows: queries, keys, values.
  Projection out_proj{nullptr};

 private:
  at::Tensor attend(const at::Tensor& q_BHTD, const KeyValues& kv, const at::Tensor& lengths_B,
                    bool causal);
  int64_t heads_;
  std::shared_ptr<LayerContext> context_;
};
TORCH_MODULE(Attention);

class LayerNormImpl : public torch::nn::Module {
 public:
  LayerNormImpl(int64_t width, std::shared_ptr<LayerContext> context);
  at::Tensor forward(const at::Tensor& x);  ///< Result in the compute type.

  at::Tensor weight;
  at::Tensor bias;

 private:
  std::shared_ptr<LayerContext> context_;
};
TORCH_MODULE(LayerNorm);

class EncoderLayerImpl : public torch::nn::Module {
 public:
  EncoderLayerImpl(const TransformerOptions& options, std::shared_ptr<LayerContext> context);
  at::Tensor forward(const at::Tensor& x_BSD, const at::Tensor& lengths_B);

 private:
  std::shared_ptr<LayerContext> context_;
  LayerNorm norm1_{nullptr}, norm2_{nullptr};
  Attention self_attn_{nullptr};
  Projection linear1_{nullptr}, linear2_{nullptr};
};
TORCH_MODULE(EncoderLayer);

class DecoderLayerImpl : public torch::nn::Module {
 public:
  DecoderLayerImpl(const TransformerOptions& options, std::shared_ptr<LayerContext> context);
  at::Tensor forward(const at::Tensor& x_BTD, const at::Tensor& target_lengths_B,
                     const KeyValues& memory, const at::Tensor& source_lengths_B);
  /// One next token of each of K translations of each of B sentences; `cache` has B * K rows.
  at::Tensor step(const at::Tensor& x_BKD, const KeyValues& memory,
                  const at::Tensor& source_lengths_B, KeyValues& cache);
  KeyValues project_memory(const at::Tensor& memory_BSD);

 private:
  at::Tensor after_self(const at::Tensor& x, const KeyValues& memory,
                        const at::Tensor& source_lengths_B);

  std::shared_ptr<LayerContext> context_;
  LayerNorm norm1_{nullptr}, norm2_{nullptr}, norm3_{nullptr};
  Attention self_attn_{nullptr}, multihead_attn_{nullptr};
  Projection linear1_{nullptr}, linear2_{nullptr};
};
TORCH_MODULE(DecoderLayer);

/// What decoding B sentences with K translations each keeps between steps.
struct DecoderState {
  std::vector<KeyValues> self;    ///< By layer; translation k of sentence b is row b * K + k.
  std::vector<KeyValues> memory;  ///< By layer; by sentence.
  at::Tensor source_lengths_B;
  int64_t position = 0;  ///< Tokens decoded so far.

  /// Keeps the sentences `rows` (int64 indices into B), in that order.
  void keep_sentences(const at::Tensor& rows);
  /// Keeps the translations `rows` (int64 indices into B * K, may repeat), in that order.
  void keep_hypotheses(const at::Tensor& rows);
};

/// Pre-norm encoder and decoder, sinusoidal positions, embeddings scaled by sqrt(D), no bias in
/// attention and output projection; nothing tied unless asked for: 93,255,680 parameters at the
/// default sizes. With tied embeddings there is no parameter "generator.weight".
///
/// Parameters carry the names of torch.nn.Transformer's where it has them.
/// Threads: one. Local. Errors: c10::ValueError for ids or lengths out of range.
class TransformerImpl : public torch::nn::Module {
 public:
  explicit TransformerImpl(const TransformerOptions& options,
                           Precision precision = Precision::kFloat32);

  /// Sums of the losses over the batch's target tokens: {smoothed, plain}. See
  /// smoothed_cross_entropy.
  std::tuple<at::Tensor, at::Tensor> forward(const Batch& batch);

  at::Tensor encode(const at::Tensor& source_BS, const at::Tensor& lengths_B);
  DecoderState begin_decoding(const at::Tensor& memory_BSD, const at::Tensor& lengths_B);
  /// Scores [B, K, V] (before softmax) of the token after `last_BK`; advances `state`. Every call
  /// for the same state has the same K.
  at::Tensor decode_step(const at::Tensor& last_BK, DecoderState& state);

  /// Draws all parameters anew from `seed`; the same seed gives the same model.
  void initialise(uint64_t seed);
  /// The dropout's position: set it per step and rank, and the step can be repeated.
  void set_dropout_stream(DropoutStream stream) { context_->stream = stream; }

  const TransformerOptions& options() const { return options_; }
  Precision precision() const { return context_->precision; }

 private:
  at::Tensor embed(const at::Tensor& table, const at::Tensor& ids, int64_t first_position);

  TransformerOptions options_;
  std::shared_ptr<LayerContext> context_;
  at::Tensor positions_;  // [max_positions, D], a constant: neither parameter nor buffer
  at::Tensor source_embedding_;
  at::Tensor target_embedding_;
  std::vector<EncoderLayer> encoder_;
  std::vector<DecoderLayer> decoder_;
  LayerNorm encoder_norm_{nullptr}, decoder_norm_{nullptr};
  Projection generator_{nullptr};
};
TORCH_MODULE(Transformer);

/// Returns the number of elements of all parameters.
int64_t count_parameters(const torch::nn::Module& module);

}  // namespace cohort::nmt
