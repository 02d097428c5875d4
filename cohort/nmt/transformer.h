// SPDX-License-Identifier: Apache-2.0
// The encoder-decoder Transformer as a pure function of tensors; it knows nothing of ranks.
// With gradients it computes on packed rows [N, D] where attention takes them (takes_packed_rows), which alone knows the sentences;
// elsewhere, and without gradients, on [B, S, D] and [B, T, D]. Dropout takes the same elements of both.
// Legend: B sentences, S source tokens, T target tokens, D width, H heads, V vocabulary, N rows: of a batch's source or target as its
// tensors say, in a search translations.
// Source: Vaswani et al. 2017, arXiv:1706.03762; pre-norm: Xiong et al. 2020, arXiv:2002.04745.
#pragma once
#include <ATen/core/Tensor.h>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <tuple>
#include <utility>
#include <vector>

#include "cohort/nmt/fused.h"
#include "cohort/nmt/int8_matrix.h"
#include "cohort/nmt/options.h"
#include "cohort/nmt/parameters.h"
#include "cohort/nmt/prepacked.h"
#include "cohort/nmt/tensor_parallel_context.h"

namespace cohort::nmt {

/// Padded token ids of one batch. Ids: 0 pad, 2 begin, 3 end (text/tokenizer.h).
struct Batch {
  at::Tensor source_BS;         ///< int64, each row ends with the end id, then padding.
  at::Tensor source_lengths_B;  ///< int64 in [1, S].
  at::Tensor input_BT;          ///< int64, each row begins with the begin id.
  at::Tensor
      labels_BT;  ///< int64, input moved by one, ends with the end id, then padding; none within.
  at::Tensor target_lengths_B;    ///< int64 in [1, T]; counts labels.
  int64_t num_target_tokens = 0;  ///< Labels that are no padding.
  /// int64 [num_target_tokens], which of labels_BT's elements those are: each row's first, as many as
  /// its length says. If it is undefined, they are looked for when they are needed, for which the
  /// host waits for the labels' device.
  at::Tensor label_rows_N{};

  /// Returns label_rows_N, looked for if it is undefined.
  at::Tensor label_rows() const;
  /// Returns the batch on another device, with label_rows_N. From pinned memory the copies do not
  /// wait for the device.
  Batch to(c10::Device device) const;
};

/// Returns the encodings of positions that embeddings are added to, [positions, width] float32:
/// sines in even columns, cosines of the same angles beside them.
at::Tensor sinusoids(int64_t positions, int64_t width);

/// What all layers of one model share: how to compute, and which elements dropout takes.
struct LayerContext {
  Precision precision = Precision::kFloat32;
  Norm norm = Norm::kPre;
  Activation ffn_activation = Activation::kRelu;
  double dropout = 0;
  DropoutStream stream;
  c10::Device device = c10::kCPU;  ///< Where parameters are made.
  int64_t gradients =
      0;  ///< Counts forwards with gradients: after one, an optimizer may have changed the weights.
  std::shared_ptr<const TensorParallelContext> tensor_parallel =
      std::make_shared<TensorParallelContext>();
};

/// Sizes of a projection; of the shard in a tensor-parallel model.
struct ProjectionShape {
  int64_t in = 0;
  int64_t out = 0;
  bool bias = false;
  bool row_parallel = false;  ///< `in` is one shard's inputs; outputs are summed over shards.
};

/// Some rows of a projection's W, for the products of a search.
///
/// Numerics: an element of a product is the same bits whatever other rows x has and whatever other rows of W were chosen.
/// Threads:  any number may multiply.
class ChosenRows {
 public:
  /// x [N, in]; returns [N, how many rows]; both in the compute type, which is float32 in an int8 model.
  at::Tensor multiply(const at::Tensor& x) const;
  /// The same in blocks of columns, all of as many: the last may have some more, which mean nothing.
  std::vector<at::Tensor> multiply_blocks(const at::Tensor& x) const;

 private:
  friend class ProjectionImpl;
  int64_t count_ = 0;
  std::vector<Prepacked> blocks_;  // each of as many rows, the last ones of 0
  Int8Matrix whole_;               // instead of them in an int8 model
};

/// y = x W^T (+ b) in the context's compute type; W and b stay in their own. Inference (evaluation
/// mode without gradients) keeps W prepacked until it changes, or the module is trained or computes
/// with gradients. A change through data() alone is not seen.
///
/// In an int8 model W is a buffer of 8-bit rows, "weight", with the buffer "weight_scale" (Int8Rows), and
/// there is only inference: c10::ValueError from everything else.
class ProjectionImpl : public torch::nn::Module {
 public:
  ProjectionImpl(const ProjectionShape& shape, std::shared_ptr<LayerContext> context);
  at::Tensor forward(const at::Tensor& x);
  /// dropout(relu(forward(x))), of the context's stream. Has a bias and is not row-parallel.
  at::Tensor forward_relu(const at::Tensor& x, double p, const DropoutPart& part);
  /// The outputs [first, first + count) alone.
  at::Tensor part(const at::Tensor& x, int64_t first, int64_t count);
  /// The outputs of an int8 model's inference in blocks.
  Int8Scores scores(const at::Tensor& x, bool with_sums);
  /// W's rows `rows`, in that order, for inference on the CPU. There is no bias.
  /// Precondition: 0 <= each < out.
  ChosenRows choose(std::span<const int32_t> rows);
  void train(bool on = true) override;

  at::Tensor weight;
  at::Tensor weight_scale;  ///< Undefined but in an int8 model.
  at::Tensor bias;          ///< Undefined without bias.

 private:
  // Which rows, of which values of the weight.
  struct PartKey {
    int64_t first = 0, count = 0;
    const void* data = nullptr;
    int64_t version = 0, gradients = 0;
    bool operator==(const PartKey&) const = default;
  };
  // Rows of the weight as inference multiplies by them.
  struct Part {
    PartKey key;
    Prepacked rows;
    Int8Matrix whole;  // instead of them in an int8 model, whatever rows are asked for
  };
  // Valid until the weight changes or the module is trained.
  const Part& packed(int64_t first, int64_t count);
  at::Tensor product(const at::Tensor& x, int64_t first, int64_t count, const at::Tensor& bias);

  bool row_parallel_;
  std::shared_ptr<LayerContext> context_;
  std::mutex mutex_;  // of parts_
  std::list<Part> parts_;
};
TORCH_MODULE(Projection);

/// Where the past of one translation lies that is being decoded.
struct Path {
  int64_t sentence = 0;       ///< Row of the source batch.
  std::vector<int64_t> rows;  ///< By position: the row of that step's keys and values.
};

/// What decoding B sentences keeps between steps. On the CPU keys and values stay where the step that
/// made them has put them, and translations with a common beginning share them: when translations
/// end, multiply or change places, nothing but their paths is copied. On other devices each step
/// gathers those of its translations.
struct DecoderState {
  std::vector<Path> paths;  ///< One per translation; of each sentence one at first.
  /// By layer: on the CPU by position [N of that step, 2 D], elsewhere [N of the last step,
  /// position, 2 D] alone.
  std::vector<std::vector<at::Tensor>> past;
  std::vector<at::Tensor> memory;  ///< By layer: [B, S, 2 D].
  at::Tensor source_lengths_B;
  int64_t position = 0;  ///< Tokens decoded so far.
  /// On other devices than the CPU, by translation of this step: its sentence, and the row of the
  /// last step that it continues.
  at::Tensor sentences_N, continued_N;

  /// Keeps the translations `kept` (indices into `paths`, may repeat), in that order.
  void keep(std::span<const int64_t> kept);
};

class AttentionImpl : public torch::nn::Module {
 public:
  AttentionImpl(int64_t width, int64_t heads, std::shared_ptr<LayerContext> context);
  /// Queries, keys and values from x itself. Here and below x and memory are packed or padded, as their rows say.
  at::Tensor self(const at::Tensor& x, const SentenceRows& rows, bool causal);
  /// Keys beside values of `memory`, [B, S, 2 D] or [N, 2 D], for `cross`.
  at::Tensor project_memory(const at::Tensor& memory);
  at::Tensor cross(const at::Tensor& x, const SentenceRows& rows, const at::Tensor& memory,
                   const SentenceRows& memory_rows);

  /// `self` for the next token of each of the state's N translations, in inference, in decoder layer
  /// `layer`: keys beside values of the tokens become part of its past.
  at::Tensor self_step(const at::Tensor& x_ND, DecoderState& state, size_t layer);
  /// `cross` for the same.
  at::Tensor cross_step(const at::Tensor& x_ND, const DecoderState& state, size_t layer);

  Projection in_proj{nullptr};  ///< Rows: queries, keys, values.
  Projection out_proj{nullptr};

 private:
  // Some of in_proj's outputs. An int8 model attends in bfloat16.
  at::Tensor project(const at::Tensor& x, int64_t first, int64_t count);
  AttentionOptions attention_options(int64_t queries, int64_t keys, bool causal) const;
  // For keys beside values.
  at::Tensor attend(const at::Tensor& q, const SentenceRows& queries, const at::Tensor& kv,
                    const SentenceRows& keys);
  // The same in inference, for queries [..., D].
  at::Tensor attend(const at::Tensor& queries, const SeenRows& seen);
  int64_t heads_;  // of this shard
  int64_t width_;  // of these heads together
  std::shared_ptr<LayerContext> context_;
};
TORCH_MODULE(Attention);

class LayerNormImpl : public torch::nn::Module {
 public:
  LayerNormImpl(int64_t width, std::shared_ptr<LayerContext> context);
  at::Tensor forward(const at::Tensor& x);  ///< Result in the compute type.
  /// The same beside x, for what x is added to later (nmt::layer_norm).
  NormedSum split(const at::Tensor& x);
  /// Of x + dropout(y), of the context's stream; the norm in `type`, if given, else in the compute type.
  NormedSum add(const at::Tensor& x, const at::Tensor& y, double p, const DropoutPart& part,
                std::optional<at::ScalarType> type = std::nullopt);

  at::Tensor weight;
  at::Tensor bias;

 private:
  NormParameters parameters_to(at::ScalarType type) const;
  std::shared_ptr<LayerContext> context_;
};
TORCH_MODULE(LayerNorm);

class EncoderLayerImpl : public torch::nn::Module {
 public:
  EncoderLayerImpl(const TransformerOptions& options, std::shared_ptr<LayerContext> context);
  at::Tensor forward(const at::Tensor& x, const SentenceRows& rows);

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
  at::Tensor forward(const at::Tensor& x, const SentenceRows& rows, const at::Tensor& memory,
                     const SentenceRows& memory_rows);
  /// The next token of each of the state's N translations; this is decoder layer `layer`.
  at::Tensor step(const at::Tensor& x_ND, DecoderState& state, size_t layer);
  at::Tensor project_memory(const at::Tensor& memory);

 private:
  using Attending = std::function<at::Tensor(const at::Tensor&)>;
  // With these attentions, of the layer's own position and of the source.
  at::Tensor blocks(const at::Tensor& x, const SentenceRows& rows, const Attending& self,
                    const Attending& cross);

  std::shared_ptr<LayerContext> context_;
  LayerNorm norm1_{nullptr}, norm2_{nullptr}, norm3_{nullptr};
  Attention self_attn_{nullptr}, multihead_attn_{nullptr};
  Projection linear1_{nullptr}, linear2_{nullptr};
};
TORCH_MODULE(DecoderLayer);

/// Encoder and decoder, sinusoidal positions, embeddings scaled by sqrt(D), no bias in attention
/// and output projection; pre-norm, ReLU and nothing tied unless asked for: 93,255,680 parameters
/// at the default sizes.
///
/// Parameters carry the names of torch.nn.Transformer's where it has them. With tied embeddings
/// there is no "generator.weight"; with tied_embeddings_all the one table is "embedding". A
/// post-norm model has no "encoder.norm" and "decoder.norm". An int8 model has buffers in the place of its
/// projections' weights, and always a "generator"; its embeddings are float32.
/// Threads: one; on the CPU, in evaluation mode and without gradients, any number infer at a time. Local.
/// Devices: runs where parameters and batch are. Ids and lengths are checked on the CPU; elsewhere
///          they are not read back.
/// Errors:  c10::ValueError for ids or lengths out of range.
class TransformerImpl : public torch::nn::Module {
 public:
  /// On the meta device parameters have no memory and no values: see Initialiser.
  /// With a `tensor_parallel` context this is one shard of the model, whose results are the
  /// unsharded model's; `part_of` tells which elements of its parameters the shard has.
  /// An int8 model's values are not drawn: fill them from a checkpoint, or by `quantize`.
  /// Errors: ConfigError if heads or dim_ffn are no multiples of the number of shards, or the
  ///         vocabulary has fewer words; and for an int8 model in shards or elsewhere than on the CPU.
  explicit TransformerImpl(const TransformerOptions& options,
                           Precision precision = Precision::kFloat32,
                           c10::Device device = c10::kCPU,
                           std::shared_ptr<const TensorParallelContext> tensor_parallel =
                               std::make_shared<TensorParallelContext>());

  /// Sums of the losses over the batch's target tokens: {smoothed, plain}; in evaluation mode both
  /// are the plain one. See smoothed_cross_entropy.
  std::tuple<at::Tensor, at::Tensor> forward(const Batch& batch);
  /// Log p (natural) of each of the batch's labels that is no padding, row by row: float64, without
  /// gradients; their sum is the negative of forward's plain loss.
  /// Errors: c10::Error if one is not finite.
  at::Tensor log_probabilities(const Batch& batch);

  at::Tensor encode(const at::Tensor& source_BS, const at::Tensor& lengths_B);
  /// Decoding is inference: evaluation mode, no gradients. Both tensors are on the model's device.
  DecoderState begin_decoding(const at::Tensor& memory_BSD, const at::Tensor& lengths_B);
  /// Scores [N, V] (before softmax) of the token after `last_N` of each of the state's N
  /// translations; advances `state`.
  ///
  /// Devices:  `last_N`, int64, is on the CPU, the scores on the model's device. To another device
  ///           there is one copy a step.
  /// Numerics: on the CPU a translation's scores do not depend on the others; elsewhere they do as
  ///           far as the device's products round otherwise when they have other rows.
  /// Errors:   c10::ValueError for tokens elsewhere, or not one for each translation.
  at::Tensor decode_step(const at::Tensor& last_N, DecoderState& state);
  /// The logarithms of the probabilities that those scores give. On the CPU their sums may be left out: then LogProbs has the
  /// scores themselves.
  LogProbs decode_log_probs(const at::Tensor& last_N, DecoderState& state,
                            const std::optional<Questions>& questions = std::nullopt,
                            bool with_sums = true);

  /// The output projection to some target pieces; and the scores [N, pieces] of these, as decode_step's, in multiply_blocks(). On the CPU, of a whole
  /// model.
  ChosenRows choose_pieces(std::span<const int32_t> pieces) { return generator_->choose(pieces); }
  std::vector<at::Tensor> decode_step(const at::Tensor& last_N, DecoderState& state,
                                      const ChosenRows& pieces);

  void train(bool on = true) override;

  /// Draws all parameters from `seed`; the same seed gives the same model, however sharded.
  void initialise(uint64_t seed);
  /// The dropout's position: set it per step and rank, and the step can be repeated.
  void set_dropout_stream(DropoutStream stream) { context_->stream = stream; }
  DropoutStream& dropout_stream() { return context_->stream; }

  /// A layer's forward: of `inputs`, its parameters and dropout from `dropout_stream`. May be kept.
  using LayerBody = std::function<at::Tensor(const std::vector<at::Tensor>& inputs)>;
  /// What is around each layer's forward in `forward` and `encode`; it returns `body(inputs)`.
  /// Sharding gathers the layer's parameters there; activation checkpointing
  /// computes the body once more in backward.
  using LayerRunner =
      std::function<at::Tensor(const torch::nn::Module& layer,
                               const std::vector<at::Tensor>& inputs, const LayerBody& body)>;
  void set_layer_runner(LayerRunner runner) { layer_runner_ = std::move(runner); }
  /// Encoder layers, then decoder layers; not owned.
  std::vector<torch::nn::Module*> layers();

  int64_t num_parameters() const;  ///< Elements of the unsharded model's.
  const TransformerOptions& options() const { return options_; }
  c10::Device device() const { return target_embedding_.device(); }  ///< Of the parameters.
  const std::shared_ptr<const TensorParallelContext>& tensor_parallel() const {
    return context_->tensor_parallel;
  }
  Precision precision() const { return context_->precision; }

 private:
  // The decoder's last states at the batch's labels, and those labels, padding left out.
  std::pair<at::Tensor, at::Tensor> labelled_states(const Batch& batch);
  enum class Side { kSource, kTarget };
  // Of packed rows, [N, D], if `rows` has them.
  at::Tensor embed(Side side, const at::Tensor& ids_BT, int64_t first_position,
                   const SentenceRows& rows);
  at::Tensor encode_rows(const at::Tensor& source_BS, const SentenceRows& rows);
  at::Tensor run_layer(const torch::nn::Module& layer, const std::vector<at::Tensor>& inputs,
                       const LayerBody& body);
  // What the token after `last_N` of each translation is scored by; advances `state`.
  at::Tensor next_states(const at::Tensor& last_N, DecoderState& state);
  at::Tensor decoder_output(const at::Tensor& x);
  at::Tensor all_scores(const at::Tensor& hidden);  // over the whole vocabulary

  TransformerOptions options_;
  LayerRunner layer_runner_;
  std::shared_ptr<LayerContext> context_;
  at::Tensor positions_;  // [max_positions, D], a constant: neither parameter nor buffer
  at::Tensor source_embedding_;
  at::Tensor target_embedding_;
  std::vector<EncoderLayer> encoder_;
  std::vector<DecoderLayer> decoder_;
  LayerNorm encoder_norm_{nullptr}, decoder_norm_{nullptr};  // null in a post-norm model
  Projection generator_{nullptr};
};
TORCH_MODULE(Transformer);

/// A model is in evaluation mode as long as this lives, and then as it was.
class InEvaluation {
 public:
  // A model in evaluation mode is not written to: other threads may infer with it.
  explicit InEvaluation(torch::nn::Module& model)
      : model_(model), was_training_(model.is_training()) {
    if (was_training_) model_.eval();
  }
  ~InEvaluation() {
    if (was_training_) model_.train();
  }
  InEvaluation(const InEvaluation&) = delete;
  InEvaluation& operator=(const InEvaluation&) = delete;

 private:
  torch::nn::Module& model_;
  bool was_training_;
};

/// Returns the int8 model of a model in float32 or bfloat16 whose parameters are float32 on the CPU: each
/// projection's weight by `quantize_rows`, everything else a copy.
/// Errors: ConfigError that names the weight that is not finite.
Transformer quantize(const Transformer& model);
/// Errors: ConfigError that begins with `where` and names the scale that cannot be one, in an int8 model that was
///         read from a file.
void check_scales(const Transformer& model, const std::string& where);

/// Returns the number of elements of all parameters.
int64_t count_parameters(const torch::nn::Module& module);

}  // namespace cohort::nmt
