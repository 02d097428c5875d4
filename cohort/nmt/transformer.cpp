#include "cohort/nmt/transformer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <cmath>
#include <torch/types.h>

namespace cohort::nmt {
namespace {

at::ScalarType compute_type(const at::Tensor& parameter, Precision precision) {
  // A model turned to float64 computes in it, whatever the option says: tests rest on that.
  if (parameter.scalar_type() != at::kFloat) return parameter.scalar_type();
  return precision == Precision::kBFloat16 ? at::kBFloat16 : at::kFloat;
}

// [B, T, n*D] -> n views [B, H, T, D/H].
std::vector<at::Tensor> split_heads(const at::Tensor& x, int64_t parts, int64_t heads) {
  const int64_t width = x.size(2) / parts;
  return x.view({x.size(0), x.size(1), parts, heads, width / heads})
      .permute({2, 0, 3, 1, 4})
      .unbind(0);
}

at::Tensor sinusoids(int64_t positions, int64_t width) {
  const at::Tensor position = at::arange(positions, at::kDouble).unsqueeze(1);
  const at::Tensor frequency = at::exp(at::arange(0, width, 2, at::kDouble) *
                                       (-std::log(10000.0) / static_cast<double>(width)));
  const at::Tensor angle = position * frequency;
  return at::stack({at::sin(angle), at::cos(angle)}, 2).view({positions, width}).to(at::kFloat);
}

at::Tensor residual(const at::Tensor& x, const at::Tensor& branch, LayerContext& context,
                    bool training) {
  return x + dropout(branch, training ? context.dropout : 0, context.stream);
}

// The kernels walk raw memory by these numbers.
void check_range(const char* what, const at::Tensor& numbers, int64_t low, int64_t high) {
  const auto [least, most] = at::aminmax(numbers);
  TORCH_CHECK_VALUE(least.item<int64_t>() >= low && most.item<int64_t>() <= high, what,
                    ": expected ", low, " to ", high, ", got ", least.item<int64_t>(), " to ",
                    most.item<int64_t>());
}

}  // namespace

ProjectionImpl::ProjectionImpl(int64_t in, int64_t out, bool with_bias,
                               std::shared_ptr<LayerContext> context)
    : context_(std::move(context)) {
  weight = register_parameter("weight", at::zeros({out, in}));
  if (with_bias) bias = register_parameter("bias", at::zeros({out}));
}

at::Tensor ProjectionImpl::computed_weight() {
  const auto type = compute_type(weight, context_->precision);
  if (type == weight.scalar_type()) return weight;
  if (at::GradMode::is_enabled()) {
    cast_weight_.reset();
    return weight.to(type);
  }
  if (!cast_weight_.defined() || cast_version_ != static_cast<int64_t>(weight._version())) {
    cast_weight_ = weight.to(type);
    cast_version_ = static_cast<int64_t>(weight._version());
  }
  return cast_weight_;
}

at::Tensor ProjectionImpl::forward(const at::Tensor& x) {
  const at::Tensor w = computed_weight();
  return at::linear(
      x.to(w.scalar_type()), w,
      bias.defined() ? std::optional<at::Tensor>(bias.to(w.scalar_type())) : std::nullopt);
}

LayerNormImpl::LayerNormImpl(int64_t width, std::shared_ptr<LayerContext> context)
    : context_(std::move(context)) {
  weight = register_parameter("weight", at::ones({width}));
  bias = register_parameter("bias", at::zeros({width}));
}

at::Tensor LayerNormImpl::forward(const at::Tensor& x) {
  return at::layer_norm(x, {x.size(-1)}, weight, bias)
      .to(compute_type(weight, context_->precision));
}

AttentionImpl::AttentionImpl(int64_t width, int64_t heads, std::shared_ptr<LayerContext> context)
    : heads_(heads), context_(std::move(context)) {
  in_proj = register_module("in_proj", Projection(width, 3 * width, false, context_));
  out_proj = register_module("out_proj", Projection(width, width, false, context_));
}

at::Tensor AttentionImpl::attend(const at::Tensor& q_BHTD, const KeyValues& kv,
                                 const at::Tensor& lengths_B, bool causal) {
  const int64_t batch = q_BHTD.size(0);
  const int64_t queries = q_BHTD.size(2);
  const int64_t width = q_BHTD.size(3);
  const int64_t keys = kv.keys.size(2);
  const at::Tensor scores = at::matmul(q_BHTD, kv.keys.transpose(2, 3));
  const at::Tensor probs = masked_softmax(scores.contiguous(), lengths_B, causal,
                                          1 / std::sqrt(static_cast<double>(width)),
                                          is_training() ? context_->dropout : 0, context_->stream);
  TORCH_INTERNAL_ASSERT(probs.size(3) == keys);
  const at::Tensor mixed = at::matmul(probs, kv.values);
  return out_proj->forward(mixed.transpose(1, 2).reshape({batch, queries, heads_ * width}));
}

at::Tensor AttentionImpl::self(const at::Tensor& x_BTD, const at::Tensor& lengths_B, bool causal) {
  const auto qkv = split_heads(in_proj->forward(x_BTD), 3, heads_);
  return attend(qkv[0], {qkv[1], qkv[2]}, lengths_B, causal);
}

at::Tensor AttentionImpl::self_step(const at::Tensor& x_N1D, KeyValues& cache) {
  const auto qkv = split_heads(in_proj->forward(x_N1D), 3, heads_);
  cache.keys = cache.keys.defined() ? at::cat({cache.keys, qkv[1]}, 2) : qkv[1];
  cache.values = cache.values.defined() ? at::cat({cache.values, qkv[2]}, 2) : qkv[2];
  const at::Tensor lengths = at::full({x_N1D.size(0)}, cache.keys.size(2), at::kLong);
  return attend(qkv[0], cache, lengths, /*causal=*/false);
}

KeyValues AttentionImpl::project_memory(const at::Tensor& memory_BSD) {
  const at::Tensor weight = in_proj->computed_weight();
  const int64_t width = weight.size(1);
  const auto kv = split_heads(
      at::linear(memory_BSD.to(weight.scalar_type()), weight.narrow(0, width, 2 * width)), 2,
      heads_);
  return {kv[0], kv[1]};
}

at::Tensor AttentionImpl::cross(const at::Tensor& x_BTD, const KeyValues& memory,
                                const at::Tensor& lengths_B) {
  const at::Tensor weight = in_proj->computed_weight();
  const at::Tensor q =
      at::linear(x_BTD.to(weight.scalar_type()), weight.narrow(0, 0, weight.size(1)));
  return attend(split_heads(q, 1, heads_)[0], memory, lengths_B, /*causal=*/false);
}

EncoderLayerImpl::EncoderLayerImpl(const TransformerOptions& o,
                                   std::shared_ptr<LayerContext> context)
    : context_(std::move(context)) {
  self_attn_ = register_module("self_attn", Attention(o.dim_emb, o.heads, context_));
  linear1_ = register_module("linear1", Projection(o.dim_emb, o.dim_ffn, true, context_));
  linear2_ = register_module("linear2", Projection(o.dim_ffn, o.dim_emb, true, context_));
  norm1_ = register_module("norm1", LayerNorm(o.dim_emb, context_));
  norm2_ = register_module("norm2", LayerNorm(o.dim_emb, context_));
}

at::Tensor EncoderLayerImpl::forward(const at::Tensor& x_BSD, const at::Tensor& lengths_B) {
  const bool training = is_training();
  at::Tensor x = residual(x_BSD, self_attn_->self(norm1_->forward(x_BSD), lengths_B, false),
                          *context_, training);
  const at::Tensor inner = relu_dropout(linear1_->forward(norm2_->forward(x)),
                                        training ? context_->dropout : 0, context_->stream);
  return residual(x, linear2_->forward(inner), *context_, training);
}

DecoderLayerImpl::DecoderLayerImpl(const TransformerOptions& o,
                                   std::shared_ptr<LayerContext> context)
    : context_(std::move(context)) {
  self_attn_ = register_module("self_attn", Attention(o.dim_emb, o.heads, context_));
  multihead_attn_ = register_module("multihead_attn", Attention(o.dim_emb, o.heads, context_));
  linear1_ = register_module("linear1", Projection(o.dim_emb, o.dim_ffn, true, context_));
  linear2_ = register_module("linear2", Projection(o.dim_ffn, o.dim_emb, true, context_));
  norm1_ = register_module("norm1", LayerNorm(o.dim_emb, context_));
  norm2_ = register_module("norm2", LayerNorm(o.dim_emb, context_));
  norm3_ = register_module("norm3", LayerNorm(o.dim_emb, context_));
}

KeyValues DecoderLayerImpl::project_memory(const at::Tensor& memory_BSD) {
  return multihead_attn_->project_memory(memory_BSD);
}

at::Tensor DecoderLayerImpl::forward(const at::Tensor& x_BTD, const at::Tensor& target_lengths_B,
                                     const KeyValues& memory, const at::Tensor& source_lengths_B) {
  return after_self(
      residual(x_BTD, self_attn_->self(norm1_->forward(x_BTD), target_lengths_B, true), *context_,
               is_training()),
      memory, source_lengths_B);
}

at::Tensor DecoderLayerImpl::step(const at::Tensor& x_BKD, const KeyValues& memory,
                                  const at::Tensor& source_lengths_B, KeyValues& cache) {
  // Each translation has its own past; the K of a sentence share its memory, as K queries.
  const at::Tensor x_N1D = norm1_->forward(x_BKD).view({-1, 1, x_BKD.size(2)});
  return after_self(x_BKD + self_attn_->self_step(x_N1D, cache).view(x_BKD.sizes()), memory,
                    source_lengths_B);
}

at::Tensor DecoderLayerImpl::after_self(const at::Tensor& x, const KeyValues& memory,
                                        const at::Tensor& source_lengths_B) {
  const bool training = is_training();
  const at::Tensor crossed = residual(
      x, multihead_attn_->cross(norm2_->forward(x), memory, source_lengths_B), *context_, training);
  const at::Tensor inner = relu_dropout(linear1_->forward(norm3_->forward(crossed)),
                                        training ? context_->dropout : 0, context_->stream);
  return residual(crossed, linear2_->forward(inner), *context_, training);
}

namespace {

void keep_rows(std::vector<KeyValues>& layers, const at::Tensor& rows) {
  for (KeyValues& kv : layers) {
    kv.keys = kv.keys.index_select(0, rows);
    kv.values = kv.values.index_select(0, rows);
  }
}

}  // namespace

void DecoderState::keep_sentences(const at::Tensor& rows) {
  keep_rows(memory, rows);
  source_lengths_B = source_lengths_B.index_select(0, rows);
}

void DecoderState::keep_hypotheses(const at::Tensor& rows) {
  keep_rows(self, rows);
}

TransformerImpl::TransformerImpl(const TransformerOptions& options, Precision precision)
    : torch::nn::Module("Transformer"),
      options_(options),
      context_(std::make_shared<LayerContext>()) {
  validate(options);
  context_->precision = precision;
  context_->dropout = options.dropout;
  positions_ = sinusoids(options.max_positions, options.dim_emb);
  source_embedding_ = register_parameter("source_embedding",
                                         at::zeros({options.dim_vocab_source, options.dim_emb}));
  target_embedding_ = register_parameter("target_embedding",
                                         at::zeros({options.dim_vocab_target, options.dim_emb}));
  const auto stack = [&](const std::string& name, int64_t depth, auto& layers, LayerNorm& norm) {
    auto holder = register_module(name, std::make_shared<torch::nn::Module>(name));
    auto list = holder->register_module("layers", std::make_shared<torch::nn::Module>("layers"));
    for (int64_t i = 0; i < depth; ++i) {
      layers.emplace_back(options_, context_);
      list->register_module(std::to_string(i), layers.back());
    }
    norm = holder->register_module("norm", LayerNorm(options_.dim_emb, context_));
  };
  stack("encoder", options.enc_depth, encoder_, encoder_norm_);
  stack("decoder", options.dec_depth, decoder_, decoder_norm_);
  generator_ = Projection(options.dim_emb, options.dim_vocab_target, false, context_);
  if (options.tied_embeddings) {
    generator_->weight = target_embedding_;  // Not registered: one parameter, used twice.
  } else {
    register_module("generator", generator_);
  }
  initialise(0);
}

void TransformerImpl::initialise(uint64_t seed) {
  const at::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(seed);
  const double width = static_cast<double>(options_.dim_emb);
  for (auto& item : named_parameters()) {
    at::Tensor& parameter = item.value();
    if (item.key().find("embedding") != std::string::npos) {
      parameter.normal_(0, 1 / std::sqrt(width), generator);
    } else if (item.key().find("in_proj") != std::string::npos) {
      const double bound =
          std::sqrt(6 / (2 * width));  // three square matrices, one above the other
      parameter.uniform_(-bound, bound, generator);
    } else if (parameter.dim() == 2) {  // Glorot and Bengio 2010, equation 16
      const double bound =
          std::sqrt(6.0 / static_cast<double>(parameter.size(0) + parameter.size(1)));
      parameter.uniform_(-bound, bound, generator);
    }
  }
}

at::Tensor TransformerImpl::embed(const at::Tensor& table, const at::Tensor& ids,
                                  int64_t first_position) {
  const int64_t length = ids.size(1);
  TORCH_CHECK_VALUE(first_position + length <= options_.max_positions, "a sentence of ",
                    first_position + length, " tokens: expected at most ", options_.max_positions);
  const at::Tensor x = at::embedding(table, ids) * std::sqrt(static_cast<double>(options_.dim_emb));
  const at::Tensor summed = x + positions_.narrow(0, first_position, length).to(x.scalar_type());
  return dropout(summed, is_training() ? options_.dropout : 0, context_->stream);
}

at::Tensor TransformerImpl::encode(const at::Tensor& source_BS, const at::Tensor& lengths_B) {
  check_range("source lengths", lengths_B, 1, source_BS.size(1));
  check_range("source ids", source_BS, 0, options_.dim_vocab_source - 1);
  at::Tensor x = embed(source_embedding_, source_BS, 0);
  for (auto& layer : encoder_) x = layer->forward(x, lengths_B);
  return encoder_norm_->forward(x);
}

std::tuple<at::Tensor, at::Tensor> TransformerImpl::forward(const Batch& batch) {
  check_range("target lengths", batch.target_lengths_B, 1, batch.input_BT.size(1));
  check_range("labels", batch.labels_BT, 0, options_.dim_vocab_target - 1);
  check_range("target ids", batch.input_BT, 0, options_.dim_vocab_target - 1);
  const at::Tensor memory = encode(batch.source_BS, batch.source_lengths_B);
  at::Tensor x = embed(target_embedding_, batch.input_BT, 0);
  for (auto& layer : decoder_) {
    x = layer->forward(x, batch.target_lengths_B, layer->project_memory(memory),
                       batch.source_lengths_B);
  }
  // Only rows that carry a label reach the projection to the vocabulary.
  const at::Tensor labels = batch.labels_BT.reshape({-1});
  const at::Tensor rows = at::nonzero(labels).squeeze(1);
  const at::Tensor hidden =
      decoder_norm_->forward(x.reshape({-1, x.size(2)}).index_select(0, rows));
  const LossSums sums =
      smoothed_cross_entropy(hidden, generator_->weight, labels.index_select(0, rows),
                             is_training() ? options_.label_smoothing : 0);
  return {sums.loss, sums.nll};
}

DecoderState TransformerImpl::begin_decoding(const at::Tensor& memory_BSD,
                                             const at::Tensor& lengths_B) {
  DecoderState state;
  state.self.resize(decoder_.size());
  for (auto& layer : decoder_) {
    KeyValues kv = layer->project_memory(memory_BSD);
    state.memory.push_back({kv.keys.contiguous(), kv.values.contiguous()});
  }
  state.source_lengths_B = lengths_B;
  return state;
}

at::Tensor TransformerImpl::decode_step(const at::Tensor& last_BK, DecoderState& state) {
  const at::Tensor last_N1 = last_BK.reshape({-1, 1});
  at::Tensor x = embed(target_embedding_, last_N1, state.position)
                     .view({last_BK.size(0), last_BK.size(1), options_.dim_emb});
  ++state.position;
  for (size_t i = 0; i < decoder_.size(); ++i) {
    x = decoder_[i]->step(x, state.memory[i], state.source_lengths_B, state.self[i]);
  }
  return generator_->forward(decoder_norm_->forward(x));
}

int64_t count_parameters(const torch::nn::Module& module) {
  int64_t count = 0;
  for (const auto& parameter : module.parameters()) count += parameter.numel();
  return count;
}

}  // namespace cohort::nmt
