// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/transformer.h"

#include <algorithm>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>
#include <cmath>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/nmt/decode_times.h"
#include "cohort/nmt/kernels/kernels.h"

namespace cohort::nmt {
namespace {

at::ScalarType compute_type(const at::Tensor& parameter, Precision precision) {
  if (precision == Precision::kInt8) return at::kFloat;
  // A model turned to float64 computes in it, whatever the option says: tests rest on that.
  if (parameter.scalar_type() != at::kFloat) return parameter.scalar_type();
  return precision == Precision::kBFloat16 ? at::kBFloat16 : at::kFloat;
}

// Rows [first, first + count) of x, which may be undefined. A view of all of them would cost a copy of
// their gradient.
at::Tensor rows_of(const at::Tensor& x, int64_t first, int64_t count) {
  return !x.defined() || count == x.size(0) ? x : x.narrow(0, first, count);
}

// A block of a layer, behind which are dropout, the residual connection and its norm.
struct ResidualBlock {
  LayerNorm& norm;
  std::function<at::Tensor(const at::Tensor&)> compute;
};

// Packed rows drop what padded ones do, on which other devices compute.
DropoutPart of_rows(DropoutPart part, const SentenceRows& rows) {
  part.rows_N = rows.elements_N;
  return part;
}

// The blocks one after another. A tensor-parallel region begins before each and ends in its last
// projection. Sums stay in x's type, which is wider than what the blocks compute in.
at::Tensor residual(at::Tensor x, const SentenceRows& rows, std::span<const ResidualBlock> blocks,
                    LayerContext& context, bool training) {
  const double p = training ? context.dropout : 0;
  const DropoutPart part = of_rows({.size = x.size(-1), .whole = x.size(-1)}, rows);
  const auto run = [&](const ResidualBlock& block, const at::Tensor& input) {
    return block.compute(context.tensor_parallel->copy_to_region(input));
  };
  if (context.norm == Norm::kPost) {
    for (const ResidualBlock& block : blocks)
      x = block.norm->add(x, run(block, x), p, part, x.scalar_type()).normed;
    return x;
  }
  NormedSum before = blocks.front().norm->split(x);
  for (size_t i = 0;; ++i) {
    const at::Tensor y = run(blocks[i], before.normed);
    if (i + 1 == blocks.size()) return add_dropout(before.sum, y, p, context.stream, part);
    before = blocks[i + 1].norm->add(before.sum, y, p, part);
  }
}

at::Tensor feed_forward(const at::Tensor& x, const SentenceRows& rows, Projection& linear1,
                        Projection& linear2, LayerContext& context, bool training) {
  const double p = training ? context.dropout : 0;
  const DropoutPart part =
      of_rows(context.tensor_parallel->dropout_part(linear1->bias.size(0)), rows);
  switch (context.ffn_activation) {
    case Activation::kRelu:
      return linear2->forward(linear1->forward_relu(x, p, part));
    case Activation::kGelu:
      return linear2->forward(gelu_dropout(linear1->forward(x), p, context.stream, part));
    case Activation::kSwish:
      return linear2->forward(swish_dropout(linear1->forward(x), p, context.stream, part));
  }
  TORCH_INTERNAL_ASSERT(false);
}

bool in_inference(const torch::nn::Module& module) {
  return !module.is_training() && !at::GradMode::is_enabled();
}

// Whether the operations of inference alone compute what `module` makes of x.
bool infers(const torch::nn::Module& module, const at::Tensor& x) {
  return in_inference(module) && kernels_for(x).has_inference;
}

const void* row_of(const at::Tensor& rows, int64_t index) {
  return static_cast<const char*>(rows.const_data_ptr()) +
         static_cast<size_t>(index * rows.stride(-2)) * rows.element_size();
}

// Each of a sentence's `queries` sees the sentence's rows of kv_BSE and, if causal, none after it.
SeenRows see_sentences(const at::Tensor& kv_BSE, const at::Tensor& lengths_B, int64_t queries,
                       bool causal) {
  const int64_t rows = kv_BSE.size(1);
  SeenRows seen;
  for (int64_t i = 0; i < kv_BSE.size(0) * rows; ++i) seen.rows.push_back(row_of(kv_BSE, i));
  for (int64_t b = 0; b < kv_BSE.size(0); ++b) {
    const int64_t length = lengths_B.const_data_ptr<int64_t>()[b];
    for (int64_t q = 0; q < queries; ++q) {
      seen.of_query.push_back({static_cast<size_t>(b * rows),
                               static_cast<size_t>(causal ? std::min(length, q + 1) : length)});
    }
  }
  return seen;
}

// Lengths of `sentences` sentences, each in [1, longest], contiguous.
at::Tensor checked_lengths(const char* name, const at::Tensor& lengths_B, int64_t sentences,
                           int64_t longest) {
  TORCH_CHECK_VALUE(
      lengths_B.scalar_type() == at::kLong && lengths_B.sizes() == at::IntArrayRef({sentences}),
      name, ": expected int64 lengths of ", sentences, " sentences, got ", lengths_B.toString(),
      " ", lengths_B.sizes());
  check_range(name, lengths_B, 1, longest);
  return lengths_B.contiguous();
}

// Rows of padded ids [B, longest].
SentenceRows sentence_rows(const char* name, const at::Tensor& lengths_B, const at::Tensor& ids) {
  return {.lengths_B = checked_lengths(name, lengths_B, ids.size(0), ids.size(1)),
          .longest = ids.size(1)};
}

// Which elements of [B, longest] belong to sentences.
at::Tensor rows_of_sentences(const at::Tensor& lengths_B, int64_t longest) {
  const at::Tensor position = at::arange(longest, lengths_B.options());
  return at::nonzero((position < lengths_B.unsqueeze(1)).view({-1})).squeeze(1);
}

// Copies a step's numbers to the model's device, all at once. Returns the tokens there.
at::Tensor copy_step(const at::Tensor& last_N, DecoderState& state) {
  std::vector<int64_t> sentences, continued;
  for (const Path& path : state.paths) {
    sentences.push_back(path.sentence);
    continued.push_back(path.rows.empty() ? 0 : path.rows.back());
  }
  const at::Tensor numbers =
      at::stack({last_N, at::tensor(sentences, at::kLong), at::tensor(continued, at::kLong)})
          .to(state.source_lengths_B.device(), at::kLong, /*non_blocking=*/true);
  state.sentences_N = numbers.select(0, 1);
  state.continued_N = numbers.select(0, 2);
  return numbers.select(0, 0);
}

}  // namespace

Batch Batch::to(c10::Device device) const {
  const auto moved = [&](const at::Tensor& tensor) {
    return tensor.to(device, tensor.scalar_type(), /*non_blocking=*/!device.is_cpu());
  };
  at::Tensor rows = label_rows();
  if (labels_BT.is_pinned() && !rows.is_pinned()) rows = rows.pin_memory();
  return {.source_BS = moved(source_BS),
          .source_lengths_B = moved(source_lengths_B),
          .input_BT = moved(input_BT),
          .labels_BT = moved(labels_BT),
          .target_lengths_B = moved(target_lengths_B),
          .num_target_tokens = num_target_tokens,
          .label_rows_N = moved(rows)};
}

at::Tensor Batch::label_rows() const {
  return label_rows_N.defined() ? label_rows_N
                                : rows_of_sentences(target_lengths_B, labels_BT.size(1));
}

at::Tensor sinusoids(int64_t positions, int64_t width) {
  const at::Tensor position = at::arange(positions, at::kDouble).unsqueeze(1);
  const at::Tensor frequency = at::exp(at::arange(0, width, 2, at::kDouble) *
                                       (-std::log(10000.0) / static_cast<double>(width)));
  const at::Tensor angle = position * frequency;
  return at::stack({at::sin(angle), at::cos(angle)}, 2).view({positions, width}).to(at::kFloat);
}

ProjectionImpl::ProjectionImpl(const ProjectionShape& shape, std::shared_ptr<LayerContext> context)
    : row_parallel_(shape.row_parallel), context_(std::move(context)) {
  if (context_->precision == Precision::kInt8) {
    weight = register_buffer("weight", at::zeros({shape.out, shape.in}, at::kChar));
    weight_scale = register_buffer("weight_scale", at::zeros({shape.out}));
  } else {
    weight = register_parameter("weight", at::zeros({shape.out, shape.in}, context_->device));
  }
  if (shape.bias) bias = register_parameter("bias", at::zeros({shape.out}, context_->device));
}

const ProjectionImpl::Part& ProjectionImpl::packed(int64_t first, int64_t count) {
  const std::lock_guard lock(mutex_);
  const PartKey key{.first = first,
                    .count = count,
                    .data = weight.const_data_ptr(),
                    .version = weight.is_inference() ? 0 : int64_t{weight._version()},
                    .gradients = context_->gradients};
  const auto found = std::ranges::find(parts_, key, &Part::key);
  if (found != parts_.end()) return *found;
  parts_.remove_if(
      [&](const Part& part) { return part.key.first == first && part.key.count == count; });
  Part part{.key = key, .rows = {}, .whole = {}};
  if (context_->precision == Precision::kInt8) {
    part.whole = Int8Matrix({weight, weight_scale});
  } else {
    const auto type = compute_type(weight, context_->precision);
    part.rows = Prepacked(weight.narrow(0, first, count).to(type));
  }
  parts_.push_back(std::move(part));
  return parts_.back();
}

void ProjectionImpl::train(bool on) {
  Module::train(on);
  if (!on) return;
  const std::lock_guard lock(mutex_);
  parts_.clear();
}

at::Tensor ProjectionImpl::forward(const at::Tensor& x) {
  const bool sums = row_parallel_ && context_->tensor_parallel->count() > 1;
  if (!sums) return part(x, 0, weight.size(0));
  const at::Tensor y =
      context_->tensor_parallel->reduce_from_region(product(x, 0, weight.size(0), {}));
  return bias.defined() ? y + bias.to(y.scalar_type()) : y;
}

at::Tensor ProjectionImpl::forward_relu(const at::Tensor& x, double p, const DropoutPart& part) {
  if (context_->precision == Precision::kInt8 || infers(*this, x))
    return relu_dropout(forward(x), p, context_->stream, part);
  TORCH_INTERNAL_ASSERT(!row_parallel_);
  const DecodeScope timed(DecodeSection::kProducts);
  return linear_relu_dropout(
      x, weight, bias,
      {.type = compute_type(weight, context_->precision), .dropout = p, .part = part},
      context_->stream);
}

at::Tensor ProjectionImpl::part(const at::Tensor& x, int64_t first, int64_t count) {
  return product(x, first, count, rows_of(bias, first, count));
}

at::Tensor ProjectionImpl::product(const at::Tensor& x, int64_t first, int64_t count,
                                   const at::Tensor& added) {
  const DecodeScope timed(DecodeSection::kProducts);
  if (context_->precision == Precision::kInt8) {
    TORCH_CHECK_VALUE(
        infers(*this, x),
        "an int8 model: expected inference on the CPU (evaluation mode, no gradients)");
    return packed(0, weight.size(0)).whole.multiply(x.to(at::kFloat), added, first, count);
  }
  const auto type = compute_type(weight, context_->precision);
  if (infers(*this, x)) {
    return packed(first, count).rows.multiply(x.to(type), added.defined() ? added.to(type) : added);
  }
  return linear(x, rows_of(weight, first, count),
                added.defined() ? std::optional(added) : std::nullopt, type);
}

Int8Scores ProjectionImpl::scores(const at::Tensor& x, bool with_sums) {
  TORCH_INTERNAL_ASSERT(context_->precision == Precision::kInt8 && !bias.defined() &&
                        infers(*this, x));
  return packed(0, weight.size(0)).whole.scores(x, with_sums);
}

at::Tensor ChosenRows::multiply(const at::Tensor& x) const {
  return at::cat(multiply_blocks(x), 1).narrow(1, 0, count_);
}

std::vector<at::Tensor> ChosenRows::multiply_blocks(const at::Tensor& x) const {
  if (blocks_.empty()) return {whole_.multiply(x.to(at::kFloat), {}, 0, count_)};
  std::vector<at::Tensor> products;
  for (const Prepacked& block : blocks_) products.push_back(block.multiply(x, {}));
  return products;
}

ChosenRows ProjectionImpl::choose(std::span<const int32_t> rows) {
  TORCH_INTERNAL_ASSERT(!bias.defined() && !rows.empty() && infers(*this, weight));
  ChosenRows chosen;
  chosen.count_ = std::ssize(rows);
  if (context_->precision == Precision::kInt8) {
    chosen.whole_ = packed(0, weight.size(0)).whole.chosen(rows);
    return chosen;
  }
  // Products of one shape are of one kernel, in which all columns are alike.
  constexpr int64_t kBlockRows = 512;
  const int64_t blocks = (chosen.count_ + kBlockRows - 1) / kBlockRows;
  const at::Tensor index =
      at::tensor(at::ArrayRef<int32_t>(rows.data(), rows.size())).to(at::kLong);
  const auto type = compute_type(weight, context_->precision);
  at::Tensor found = at::zeros({blocks * kBlockRows, weight.size(1)}, weight.options().dtype(type));
  found.narrow(0, 0, chosen.count_).copy_(weight.index_select(0, index));
  for (int64_t block = 0; block < blocks; ++block)
    chosen.blocks_.emplace_back(found.narrow(0, block * kBlockRows, kBlockRows));
  return chosen;
}

LayerNormImpl::LayerNormImpl(int64_t width, std::shared_ptr<LayerContext> context)
    : context_(std::move(context)) {
  weight = register_parameter("weight", at::ones({width}, context_->device));
  bias = register_parameter("bias", at::zeros({width}, context_->device));
}

NormParameters LayerNormImpl::parameters_to(at::ScalarType type) const {
  return {.weight_D = weight, .bias_D = bias, .type = type};
}

NormedSum LayerNormImpl::split(const at::Tensor& x) {
  return nmt::layer_norm(x, parameters_to(compute_type(weight, context_->precision)));
}

NormedSum LayerNormImpl::add(const at::Tensor& x, const at::Tensor& y, double p,
                             const DropoutPart& part, std::optional<at::ScalarType> type) {
  return add_dropout_norm(x, y,
                          parameters_to(type.value_or(compute_type(weight, context_->precision))),
                          p, context_->stream, part);
}

at::Tensor LayerNormImpl::forward(const at::Tensor& x) {
  return split(x).normed;
}

AttentionImpl::AttentionImpl(int64_t width, int64_t heads, std::shared_ptr<LayerContext> context)
    : heads_(heads / context->tensor_parallel->count()),
      width_(width / context->tensor_parallel->count()),
      context_(std::move(context)) {
  in_proj = register_module("in_proj",
                            Projection(ProjectionShape{.in = width, .out = 3 * width_}, context_));
  out_proj = register_module(
      "out_proj",
      Projection(ProjectionShape{.in = width_, .out = width, .row_parallel = true}, context_));
}

AttentionOptions AttentionImpl::attention_options(int64_t queries, int64_t keys,
                                                  bool causal) const {
  return {
      .heads = heads_,
      .causal = causal,
      .dropout = is_training() ? context_->dropout : 0,
      .part = context_->tensor_parallel->dropout_part(heads_ * queries * keys)};  // of a sentence
}

at::Tensor AttentionImpl::attend(const at::Tensor& q, const SentenceRows& queries,
                                 const at::Tensor& kv, const SentenceRows& keys) {
  return out_proj->forward(attention(
      q, queries, kv, keys, attention_options(queries.longest, keys.longest, /*causal=*/false),
      context_->stream));
}

at::Tensor AttentionImpl::attend(const at::Tensor& queries, const SeenRows& seen) {
  const at::Tensor mixed = [&] {
    const DecodeScope timed(DecodeSection::kAttention);
    return nmt::attend(queries.reshape({-1, queries.size(-1)}), seen, heads_);
  }();
  return out_proj->forward(mixed.view(queries.sizes()));
}

at::Tensor AttentionImpl::project(const at::Tensor& x, int64_t first, int64_t count) {
  const at::Tensor y = in_proj->part(x, first, count);
  return context_->precision == Precision::kInt8 ? y.to(at::kBFloat16) : y;
}

at::Tensor AttentionImpl::self(const at::Tensor& x, const SentenceRows& rows, bool causal) {
  const at::Tensor qkv = project(x, 0, 3 * width_);
  if (!rows.packed() && infers(*this, qkv)) {
    return attend(qkv.narrow(2, 0, width_), see_sentences(qkv.narrow(2, width_, 2 * width_),
                                                          rows.lengths_B, rows.longest, causal));
  }
  return out_proj->forward(self_attention(
      qkv, rows, attention_options(rows.longest, rows.longest, causal), context_->stream));
}

at::Tensor AttentionImpl::project_memory(const at::Tensor& memory) {
  return project(memory, width_, 2 * width_);
}

at::Tensor AttentionImpl::cross(const at::Tensor& x, const SentenceRows& rows,
                                const at::Tensor& memory, const SentenceRows& memory_rows) {
  const at::Tensor q = project(x, 0, width_);
  if (!rows.packed() && infers(*this, q)) {
    return attend(q, see_sentences(memory, memory_rows.lengths_B, rows.longest, /*causal=*/false));
  }
  return attend(q, rows, memory, memory_rows);
}

at::Tensor AttentionImpl::self_step(const at::Tensor& x_ND, DecoderState& state, size_t layer) {
  const at::Tensor qkv = project(x_ND, 0, 3 * width_);
  const at::Tensor q_ND = qkv.narrow(1, 0, width_), kv_NE = qkv.narrow(1, width_, 2 * width_);
  std::vector<at::Tensor>& past = state.past[layer];
  if (!infers(*this, qkv)) {
    at::Tensor kv_NTE = kv_NE.unsqueeze(1);
    if (!past.empty())
      kv_NTE = at::cat({past.front().index_select(0, state.continued_N), kv_NTE}, 1);
    past = {kv_NTE};
    const at::Tensor lengths_N = at::full_like(state.continued_N, kv_NTE.size(1));
    return attend(q_ND.unsqueeze(1), {.longest = 1}, kv_NTE,
                  {.lengths_B = lengths_N, .longest = kv_NTE.size(1)})
        .squeeze(1);
  }
  past.push_back(kv_NE.contiguous());
  SeenRows seen;
  for (const Path& path : state.paths) {
    seen.of_query.push_back({seen.rows.size(), path.rows.size()});
    for (size_t t = 0; t < path.rows.size(); ++t)
      seen.rows.push_back(row_of(past[t], path.rows[t]));
  }
  return attend(q_ND, seen);
}

at::Tensor AttentionImpl::cross_step(const at::Tensor& x_ND, const DecoderState& state,
                                     size_t layer) {
  const at::Tensor& memory_BSE = state.memory[layer];
  if (!infers(*this, x_ND)) {
    return cross(x_ND.unsqueeze(1), {.longest = 1}, memory_BSE.index_select(0, state.sentences_N),
                 {.lengths_B = state.source_lengths_B.index_select(0, state.sentences_N),
                  .longest = memory_BSE.size(1)})
        .squeeze(1);
  }
  const SeenRows of_sentences =
      see_sentences(memory_BSE, state.source_lengths_B, 1, /*causal=*/false);
  SeenRows seen{.rows = of_sentences.rows};
  for (const Path& path : state.paths)
    seen.of_query.push_back(of_sentences.of_query[static_cast<size_t>(path.sentence)]);
  return attend(project(x_ND, 0, width_), seen);
}

namespace {

std::pair<Projection, Projection> register_feed_forward(
    torch::nn::Module& layer, const TransformerOptions& o,
    const std::shared_ptr<LayerContext>& context) {
  const int64_t inner = o.dim_ffn / context->tensor_parallel->count();
  return {layer.register_module(
              "linear1",
              Projection(ProjectionShape{.in = o.dim_emb, .out = inner, .bias = true}, context)),
          layer.register_module(
              "linear2", Projection(
                             ProjectionShape{
                                 .in = inner, .out = o.dim_emb, .bias = true, .row_parallel = true},
                             context))};
}

// Heads and columns must be cut evenly; every shard needs a word.
void check_shards(const TransformerOptions& o, int64_t count) {
  const auto refuse = [&](const std::string& what, int64_t size) {
    throw ConfigError("a model in " + std::to_string(count) + " shards: expected " + what +
                      ", got " + std::to_string(size));
  };
  if (o.heads % count != 0) refuse("a multiple of that as heads", o.heads);
  if (o.dim_ffn % count != 0) refuse("a multiple of that as dim_ffn", o.dim_ffn);
  for (const int64_t words : {o.dim_vocab_source, o.dim_vocab_target})
    if (words < count) refuse("at least so many words", words);
}

}  // namespace

EncoderLayerImpl::EncoderLayerImpl(const TransformerOptions& o,
                                   std::shared_ptr<LayerContext> context)
    : context_(std::move(context)) {
  self_attn_ = register_module("self_attn", Attention(o.dim_emb, o.heads, context_));
  std::tie(linear1_, linear2_) = register_feed_forward(*this, o, context_);
  norm1_ = register_module("norm1", LayerNorm(o.dim_emb, context_));
  norm2_ = register_module("norm2", LayerNorm(o.dim_emb, context_));
}

at::Tensor EncoderLayerImpl::forward(const at::Tensor& x, const SentenceRows& rows) {
  const bool training = is_training();
  const ResidualBlock blocks[] = {
      {norm1_, [&](const at::Tensor& y) { return self_attn_->self(y, rows, /*causal=*/false); }},
      {norm2_, [&](const at::Tensor& y) {
         return feed_forward(y, rows, linear1_, linear2_, *context_, training);
       }}};
  return residual(x, rows, blocks, *context_, training);
}

DecoderLayerImpl::DecoderLayerImpl(const TransformerOptions& o,
                                   std::shared_ptr<LayerContext> context)
    : context_(std::move(context)) {
  self_attn_ = register_module("self_attn", Attention(o.dim_emb, o.heads, context_));
  multihead_attn_ = register_module("multihead_attn", Attention(o.dim_emb, o.heads, context_));
  std::tie(linear1_, linear2_) = register_feed_forward(*this, o, context_);
  norm1_ = register_module("norm1", LayerNorm(o.dim_emb, context_));
  norm2_ = register_module("norm2", LayerNorm(o.dim_emb, context_));
  norm3_ = register_module("norm3", LayerNorm(o.dim_emb, context_));
}

at::Tensor DecoderLayerImpl::project_memory(const at::Tensor& memory) {
  return multihead_attn_->project_memory(memory);
}

at::Tensor DecoderLayerImpl::forward(const at::Tensor& x, const SentenceRows& rows,
                                     const at::Tensor& memory, const SentenceRows& memory_rows) {
  return blocks(
      x, rows, [&](const at::Tensor& y) { return self_attn_->self(y, rows, /*causal=*/true); },
      [&](const at::Tensor& y) { return multihead_attn_->cross(y, rows, memory, memory_rows); });
}

at::Tensor DecoderLayerImpl::step(const at::Tensor& x_ND, DecoderState& state, size_t layer) {
  return blocks(
      x_ND, {}, [&](const at::Tensor& x) { return self_attn_->self_step(x, state, layer); },
      [&](const at::Tensor& x) { return multihead_attn_->cross_step(x, state, layer); });
}

at::Tensor DecoderLayerImpl::blocks(const at::Tensor& x, const SentenceRows& rows,
                                    const Attending& self, const Attending& cross) {
  const bool training = is_training();
  const ResidualBlock in_order[] = {
      {norm1_, self}, {norm2_, cross}, {norm3_, [&](const at::Tensor& y) {
                                          return feed_forward(y, rows, linear1_, linear2_,
                                                              *context_, training);
                                        }}};
  return residual(x, rows, in_order, *context_, training);
}

void DecoderState::keep(std::span<const int64_t> kept) {
  std::vector<Path> going;
  for (const int64_t index : kept) going.push_back(paths.at(static_cast<size_t>(index)));
  paths = std::move(going);
}

TransformerImpl::TransformerImpl(const TransformerOptions& options, Precision precision,
                                 c10::Device device,
                                 std::shared_ptr<const TensorParallelContext> tensor_parallel)
    : torch::nn::Module("Transformer"),
      options_(options),
      context_(std::make_shared<LayerContext>()) {
  validate(options);
  check_shards(options, tensor_parallel->count());
  const bool int8 = precision == Precision::kInt8;
  if (int8 && (tensor_parallel->count() > 1 || !device.is_cpu()))
    throw ConfigError("an int8 model: expected the whole of it on the CPU");
  context_->tensor_parallel = std::move(tensor_parallel);
  context_->precision = precision;
  context_->norm = options.norm;
  context_->ffn_activation = options.ffn_activation;
  context_->dropout = options.dropout;
  context_->device = device;
  positions_ = sinusoids(options.max_positions, options.dim_emb);
  const auto own_words = [&](int64_t vocabulary) {
    const auto [begin, end] = context_->tensor_parallel->shard_range(vocabulary);
    return end - begin;
  };
  const auto table = [&](const char* name, int64_t vocabulary) {
    return register_parameter(name, at::zeros({own_words(vocabulary), options.dim_emb}, device));
  };
  if (options.tied_embeddings_all) {
    source_embedding_ = target_embedding_ = table("embedding", options.dim_vocab_target);
  } else {
    source_embedding_ = table("source_embedding", options.dim_vocab_source);
    target_embedding_ = table("target_embedding", options.dim_vocab_target);
  }
  const auto stack = [&](const std::string& name, int64_t depth, auto& layers, LayerNorm& norm) {
    auto holder = register_module(name, std::make_shared<torch::nn::Module>(name));
    auto list = holder->register_module("layers", std::make_shared<torch::nn::Module>("layers"));
    for (int64_t i = 0; i < depth; ++i) {
      layers.emplace_back(options_, context_);
      list->register_module(std::to_string(i), layers.back());
    }
    if (options_.norm == Norm::kPre)
      norm = holder->register_module("norm", LayerNorm(options_.dim_emb, context_));
  };
  stack("encoder", options.enc_depth, encoder_, encoder_norm_);
  stack("decoder", options.dec_depth, decoder_, decoder_norm_);
  generator_ = Projection(
      ProjectionShape{.in = options.dim_emb, .out = own_words(options.dim_vocab_target)}, context_);
  if (!int8 && (options.tied_embeddings || options.tied_embeddings_all)) {
    generator_->weight = target_embedding_;  // Not registered: one parameter, used twice.
  } else {
    register_module("generator", generator_);
  }
  if (!device.is_meta() && !int8) initialise(0);
}

void TransformerImpl::train(bool on) {
  Module::train(on);
  generator_->train(on);  // With tied embeddings it is no registered child.
}

void TransformerImpl::initialise(uint64_t seed) {
  TORCH_CHECK_VALUE(context_->precision != Precision::kInt8,
                    "an int8 model: expected values from a checkpoint or from quantize");
  Initialiser draw(options_, seed, context_->tensor_parallel);
  for (auto& item : named_parameters()) draw(item.key(), item.value());
}

at::Tensor TransformerImpl::embed(Side side, const at::Tensor& ids_BT, int64_t first_position,
                                  const SentenceRows& rows) {
  const bool source = side == Side::kSource;
  const int64_t length = ids_BT.size(1);
  TORCH_CHECK_VALUE(first_position + length <= options_.max_positions, "a sentence of ",
                    first_position + length, " tokens: expected at most ", options_.max_positions);
  const at::Tensor ids =
      rows.packed() ? ids_BT.reshape({-1}).index_select(0, rows.elements_N) : ids_BT;
  const at::Tensor embedded = context_->tensor_parallel->embed(
      source ? source_embedding_ : target_embedding_, ids,
      source ? options_.dim_vocab_source : options_.dim_vocab_target);
  const at::Tensor x = embedded * std::sqrt(static_cast<double>(options_.dim_emb));
  if (positions_.device() != x.device()) positions_ = positions_.to(x.device());
  at::Tensor positions = positions_.narrow(0, first_position, length).to(x.scalar_type());
  if (rows.packed()) positions = positions.index_select(0, at::remainder(rows.elements_N, length));
  const at::Tensor summed = x + positions;
  return dropout(summed, is_training() ? options_.dropout : 0, context_->stream,
                 of_rows({.size = x.size(-1), .whole = x.size(-1)}, rows));
}

at::Tensor TransformerImpl::run_layer(const torch::nn::Module& layer,
                                      const std::vector<at::Tensor>& inputs,
                                      const LayerBody& body) {
  return layer_runner_ ? layer_runner_(layer, inputs, body) : body(inputs);
}

int64_t TransformerImpl::num_parameters() const {
  int64_t count = 0;
  for (const auto& item : named_parameters()) {
    const TensorPart part =
        part_of(item.key(), item.value().sizes().vec(), options_, *context_->tensor_parallel);
    count += c10::multiply_integers(part.shape);
  }
  return count;
}

std::vector<torch::nn::Module*> TransformerImpl::layers() {
  std::vector<torch::nn::Module*> layers;
  for (EncoderLayer& layer : encoder_) layers.push_back(layer.get());
  for (DecoderLayer& layer : decoder_) layers.push_back(layer.get());
  return layers;
}

at::Tensor TransformerImpl::encode(const at::Tensor& source_BS, const at::Tensor& lengths_B) {
  return encode_rows(source_BS, sentence_rows("source lengths", lengths_B, source_BS));
}

at::Tensor TransformerImpl::encode_rows(const at::Tensor& source_BS, const SentenceRows& rows) {
  if (at::GradMode::is_enabled()) ++context_->gradients;
  check_range("source ids", source_BS, 0, options_.dim_vocab_source - 1);
  at::Tensor x = embed(Side::kSource, source_BS, 0, rows);
  for (EncoderLayer& layer : encoder_) {
    x = run_layer(*layer, {x}, [layer, rows](const auto& inputs) mutable {
      return layer->forward(inputs[0], rows);
    });
  }
  return encoder_norm_ ? encoder_norm_->forward(x) : x;
}

std::pair<at::Tensor, at::Tensor> TransformerImpl::labelled_states(const Batch& batch) {
  check_range("target ids", batch.input_BT, 0, options_.dim_vocab_target - 1);
  SentenceRows source = sentence_rows("source lengths", batch.source_lengths_B, batch.source_BS);
  SentenceRows target = sentence_rows("target lengths", batch.target_lengths_B, batch.input_BT);
  const at::Tensor rows = batch.label_rows();
  if (at::GradMode::is_enabled() && takes_packed_rows(batch.input_BT)) {
    source.elements_N = rows_of_sentences(source.lengths_B, source.longest);
    target.elements_N = rows;
  }
  const at::Tensor labels_N = batch.labels_BT.reshape({-1}).index_select(0, rows);
  check_range("labels", labels_N, 1, options_.dim_vocab_target - 1);
  // Once for all layers: so their gradients are summed over shards once.
  const at::Tensor memory =
      context_->tensor_parallel->copy_to_region(encode_rows(batch.source_BS, source));
  at::Tensor x = embed(Side::kTarget, batch.input_BT, 0, target);
  for (DecoderLayer& layer : decoder_) {
    x = run_layer(*layer, {x, memory}, [layer, source, target](const auto& inputs) mutable {
      return layer->forward(inputs[0], target, layer->project_memory(inputs[1]), source);
    });
  }
  // Only rows that carry a label reach the projection to the vocabulary.
  const at::Tensor states = target.packed() ? x : x.reshape({-1, x.size(2)}).index_select(0, rows);
  return {decoder_output(states), labels_N};
}

std::tuple<at::Tensor, at::Tensor> TransformerImpl::forward(const Batch& batch) {
  if (context_->precision == Precision::kInt8) {  // It infers, so there is no smoothing.
    const at::Tensor nll = -log_probabilities(batch).sum();
    return {nll.to(at::kFloat), nll};
  }
  const auto [hidden, labels] = labelled_states(batch);
  const LossSums sums = context_->tensor_parallel->cross_entropy(
      hidden, generator_->weight, labels, is_training() ? options_.label_smoothing : 0,
      options_.dim_vocab_target);
  return {sums.loss, sums.nll};
}

at::Tensor TransformerImpl::log_probabilities(const Batch& batch) {
  constexpr int64_t kRows = 256;  // at a time: their scores over the vocabulary are float32
  const at::NoGradGuard no_grad;
  const auto [hidden, labels] = labelled_states(batch);
  const auto wide = hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor result = at::empty({labels.size(0)}, labels.options().dtype(at::kDouble));
  for (int64_t first = 0; first < labels.size(0); first += kRows) {
    const int64_t rows = std::min(kRows, labels.size(0) - first);
    const at::Tensor scores = all_scores(hidden.narrow(0, first, rows));
    const at::Tensor chosen = labels.narrow(0, first, rows).unsqueeze(1);
    result.narrow(0, first, rows)
        .copy_(at::log_softmax(scores, 1, wide).gather(1, chosen).squeeze(1));
  }
  TORCH_CHECK(at::isfinite(result).all().item<bool>(),
              "the model's scores are not finite: it has diverged, or its parameters are damaged");
  return result;
}

// What the projection to the vocabulary takes, in the compute type.
at::Tensor TransformerImpl::decoder_output(const at::Tensor& x) {
  return decoder_norm_ ? decoder_norm_->forward(x)
                       : x.to(compute_type(generator_->weight, context_->precision));
}

at::Tensor TransformerImpl::all_scores(const at::Tensor& hidden) {
  const DecodeScope timed(DecodeSection::kVocabulary);
  return context_->tensor_parallel->gather_from_region(generator_->forward(hidden),
                                                       options_.dim_vocab_target);
}

DecoderState TransformerImpl::begin_decoding(const at::Tensor& memory_BSD,
                                             const at::Tensor& lengths_B) {
  TORCH_CHECK_VALUE(memory_BSD.device() == device() && lengths_B.device() == device(),
                    "begin_decoding: expected encodings and lengths on the model's device, ",
                    device(), ", got them on ", memory_BSD.device(), " and ", lengths_B.device());
  TORCH_INTERNAL_ASSERT(in_inference(*this));
  DecoderState state;
  for (auto& layer : decoder_) state.memory.push_back(layer->project_memory(memory_BSD));
  state.past.resize(decoder_.size());
  state.source_lengths_B =
      checked_lengths("source lengths", lengths_B, memory_BSD.size(0), memory_BSD.size(1));
  for (int64_t b = 0; b < memory_BSD.size(0); ++b) state.paths.push_back({.sentence = b});
  return state;
}

at::Tensor TransformerImpl::decode_step(const at::Tensor& last_N, DecoderState& state) {
  return all_scores(next_states(last_N, state));
}

std::vector<at::Tensor> TransformerImpl::decode_step(const at::Tensor& last_N, DecoderState& state,
                                                     const ChosenRows& pieces) {
  const at::Tensor states = next_states(last_N, state);
  const DecodeScope timed(DecodeSection::kVocabulary);
  return pieces.multiply_blocks(states);
}

LogProbs TransformerImpl::decode_log_probs(const at::Tensor& last_N, DecoderState& state,
                                           const std::optional<Questions>& questions,
                                           bool with_sums) {
  const at::Tensor states = next_states(last_N, state);
  if (context_->precision == Precision::kInt8) {
    std::optional<DecodeScope> timed(DecodeSection::kVocabulary);
    const Int8Scores scores = generator_->scores(states, with_sums);
    timed.reset();
    return LogProbs(scores);
  }
  return LogProbs(all_scores(states), questions, with_sums);
}

at::Tensor TransformerImpl::next_states(const at::Tensor& last_N, DecoderState& state) {
  TORCH_CHECK_VALUE(last_N.is_cpu(), "decode_step: expected tokens on the CPU, got some on ",
                    last_N.device());
  TORCH_INTERNAL_ASSERT(in_inference(*this));
  const DecodeScope timed(DecodeSection::kDecoder);
  TORCH_CHECK_VALUE(last_N.dim() == 1 && last_N.size(0) == std::ssize(state.paths),
                    "decode_step: expected a token for each of ", state.paths.size(),
                    " translations, got ", last_N.sizes());
  check_range("decode_step: tokens", last_N, 0, options_.dim_vocab_target - 1);
  const at::Tensor tokens_N =
      infers(*this, state.source_lengths_B) ? last_N : copy_step(last_N, state);
  at::Tensor x = embed(Side::kTarget, tokens_N.unsqueeze(1), state.position, {}).squeeze(1);
  ++state.position;
  for (size_t n = 0; n < state.paths.size(); ++n)
    state.paths[n].rows.push_back(static_cast<int64_t>(n));
  for (size_t i = 0; i < decoder_.size(); ++i) {
    x = decoder_[i]->step(x, state, i);
  }
  return decoder_output(x);
}

Transformer quantize(const Transformer& model) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(model->precision() != Precision::kInt8,
                    "quantize: expected a float32 model, got an int8 one");
  Transformer result(model->options(), Precision::kInt8);
  const auto given = model->named_parameters();
  for (auto& item : result->named_parameters()) item.value().copy_(given[item.key()]);
  auto buffers = result->named_buffers();
  for (auto& item : buffers) {
    if (item.value().scalar_type() != at::kChar) continue;
    const at::Tensor* weight = given.find(item.key());
    if (weight == nullptr) {  // a tied generator's
      const bool all = model->options().tied_embeddings_all;
      weight = given.find(all ? "embedding" : "target_embedding");
    }
    const Int8Rows rows = quantize_rows(item.key(), *weight);
    item.value().copy_(rows.values);
    buffers[item.key() + "_scale"].copy_(rows.scales);
  }
  result->eval();
  return result;
}

void check_scales(const Transformer& model, const std::string& where) {
  for (const auto& item : model->named_buffers()) {
    const at::Tensor& scales = item.value();
    if (scales.scalar_type() != at::kFloat) continue;
    const at::Tensor bad =
        at::nonzero(at::isfinite(scales).logical_and(scales.ge(0)).logical_not());
    if (bad.size(0) == 0) continue;
    const auto row = bad[0][0].item<int64_t>();
    throw ConfigError(c10::str(where, ": ", item.key(), "[", row,
                               "]: expected a finite scale that is not negative, got ",
                               scales[row].item<float>()));
  }
}

int64_t count_parameters(const torch::nn::Module& module) {
  int64_t count = 0;
  for (const auto& parameter : module.parameters()) count += parameter.numel();
  return count;
}

}  // namespace cohort::nmt
