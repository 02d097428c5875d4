// SPDX-License-Identifier: Apache-2.0
// Parts of a model: their dropouts take the whole's elements, their parameters are the whole's.
#include "cohort/nmt/tensor_parallel_context.h"

#include <functional>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/nmt/kernels/cpu/loops.h"
#include "cohort/nmt/transformer.h"

namespace cohort::nmt {
namespace tensor_parallel_context_test {

constexpr double kDropout = 0.4;
constexpr DropoutStream kStream{.seed = 5, .call = 2};

// Runs `apply` on x and on its parts along `dim`; expects results and gradients of parts to be
// those of the whole, bit by bit. `size_of`: neighbours of the part that are neighbours in the
// whole.
void expect_parts_of_whole(
    const at::Tensor& values, int64_t dim, int64_t count,
    const std::function<at::Tensor(const at::Tensor&, DropoutStream&, const DropoutPart&)>& apply) {
  const at::Tensor whole = values.clone().requires_grad_(true);
  const at::Tensor grad = at::randn_like(values);
  DropoutStream stream = kStream;
  const at::Tensor expected = apply(whole, stream, {});
  expected.backward(grad);
  EXPECT_GT((expected == 0).sum().item<int64_t>(), 0);
  for (int64_t index = 0; index < count; ++index) {
    SCOPED_TRACE("part " + std::to_string(index) + " of " + std::to_string(count));
    const TensorParallelContext tensor_parallel(index, count);
    const auto [begin, end] = tensor_parallel.shard_range(values.size(dim));
    const at::Tensor own =
        values.narrow(dim, begin, end - begin).clone().contiguous().requires_grad_(true);
    int64_t neighbours = 1;
    for (int64_t d = dim; d < own.dim(); ++d) neighbours *= own.size(d);
    DropoutStream own_stream = kStream;
    const at::Tensor result = apply(own, own_stream, tensor_parallel.dropout_part(neighbours));
    EXPECT_TRUE(at::equal(result, expected.narrow(dim, begin, end - begin)));
    result.backward(grad.narrow(dim, begin, end - begin).contiguous());
    EXPECT_TRUE(at::equal(own.grad(), whole.grad().narrow(dim, begin, end - begin)));
    EXPECT_EQ(own_stream.call, stream.call);
  }
}

// 9 columns of 27: parts that begin between the four numbers of a hash; 1,200 of 2,400: more than a
// block of the kernels.
TEST(TensorParallelContextTest, DropoutsOfPartsTakeTheElementsOfTheWhole) {
  torch::manual_seed(3);
  for (const auto& [columns, count] : {std::pair{27, 3}, std::pair{2400, 2}, std::pair{8, 4}}) {
    for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
      const at::Tensor x = at::randn({5, 2, columns}).to(type);
      for (const auto operation : {&relu_dropout, &gelu_dropout, &swish_dropout}) {
        expect_parts_of_whole(x, 2, count, [&](const auto& own, auto& stream, const auto& part) {
          return operation(own, kDropout, stream, part);
        });
      }
    }
  }
}

// By a product that changes nothing, whatever its size.
void check_linear_relu_dropout_of_parts() {
  torch::manual_seed(3);
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const auto wide = type == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor x = at::randn({150, 2, 27}).to(type), weight = at::eye(27, wide);
    const at::Tensor bias = at::randn({27}, wide), grad = at::randn({150, 2, 27}).to(type);
    const auto run = [&](int64_t begin, int64_t size, const DropoutPart& part) {
      const at::Tensor own_bias = bias.narrow(0, begin, size).clone().requires_grad_(true);
      DropoutStream stream = kStream;
      const at::Tensor y =
          linear_relu_dropout(x, weight.narrow(0, begin, size), own_bias,
                              {.type = type, .dropout = kDropout, .part = part}, stream);
      y.backward(grad.narrow(2, begin, size));
      return std::pair(y.detach(), own_bias.grad());
    };
    const auto [expected, of_bias] = run(0, 27, {});
    for (int64_t index = 0; index < 3; ++index) {
      const TensorParallelContext tensor_parallel(index, 3);
      const auto [y, of_own_bias] = run(9 * index, 9, tensor_parallel.dropout_part(9));
      EXPECT_TRUE(at::equal(y, expected.narrow(2, 9 * index, 9)));
      EXPECT_TRUE(at::equal(of_own_bias, of_bias.narrow(0, 9 * index, 9)));
    }
  }
}

TEST(TensorParallelContextTest, LinearReluDropoutOfPartsIsThatOfTheWhole) {
  for (const Loops* const* table = supported_loops(); *table != nullptr; ++table) {
    SCOPED_TRACE((*table)->name);
    use_loops(**table);
    check_linear_relu_dropout_of_parts();
  }
  use_loops(*supported_loops()[0]);
}

TEST(TensorParallelContextTest, AttentionsDropoutTakesTheElementsOfTheWhole) {
  torch::manual_seed(4);
  const at::Tensor lengths = at::tensor({3, 7, 1}, at::kLong);
  for (const int64_t count : {2, 4}) {
    const at::Tensor scores = at::randn({3, 4, 5, 7}, at::kDouble);
    expect_parts_of_whole(scores, 1, count, [&](const auto& own, auto& stream, const auto& part) {
      return masked_softmax(own, lengths, /*causal=*/false, 0.5, kDropout, stream, part);
    });
    // By heads: [B, T, 3, H, width]. The result takes the queries' place.
    const at::Tensor qkv = at::randn({3, 7, 3, 4, 5}, at::kDouble);
    expect_parts_of_whole(qkv, 3, count, [&](const auto& own, auto& stream, const auto& part) {
      const int64_t heads = own.size(3);
      const DropoutPart of_weights{.size = heads * 7 * 7,
                                   .whole = 4 * 7 * 7,
                                   .first = part.first / part.size * heads * 7 * 7};
      const at::Tensor mixed = self_attention(
          own.flatten(2), lengths,
          {.heads = heads, .causal = true, .dropout = kDropout, .part = of_weights}, stream);
      return at::cat({mixed.unflatten(2, {1, heads, 5}), own.narrow(2, 1, 2)}, 2);
    });
  }
}

TEST(TensorParallelContextTest, PartsThatDoNotFitAreRefused) {
  DropoutStream stream;
  EXPECT_THROW(relu_dropout(at::ones({3, 5}), 0.5, stream, {.size = 4, .whole = 8}),
               c10::ValueError);
  EXPECT_THROW(relu_dropout(at::ones({2, 4}), 0.5, stream, {.size = 4, .whole = 8, .first = 6}),
               c10::ValueError);
}

TransformerOptions options(bool tied) {
  return {.dim_vocab_source = tied ? 41 : 37,
          .dim_vocab_target = 41,
          .dim_emb = 16,
          .heads = 4,
          .enc_depth = 1,
          .dec_depth = 1,
          .dim_ffn = 24,
          .tied_embeddings_all = tied};
}

TEST(TensorParallelContextTest, PartsAreDrawnAsTheWholeModelIs) {
  for (const bool tied : {false, true}) {
    Transformer whole(options(tied));
    whole->initialise(9);
    for (const int64_t count : {2, 4}) {
      std::map<std::string, at::Tensor> joined;
      for (int64_t index = 0; index < count; ++index) {
        Transformer own(options(tied), Precision::kFloat32, at::kCPU,
                        std::make_shared<TensorParallelContext>(index, count));
        own->initialise(9);
        for (const auto& item : own->named_parameters()) {
          const at::Tensor expected = whole->named_parameters()[item.key()];
          const TensorPart part = part_of(item.key(), item.value().sizes().vec(), options(tied),
                                          *own->tensor_parallel());
          EXPECT_EQ(part.shape, expected.sizes().vec()) << item.key();
          EXPECT_EQ(part.part_shape(), item.value().sizes().vec()) << item.key();
          const at::Tensor elements = item.value().detach().view(-1);
          at::Tensor& all = joined.try_emplace(item.key(), at::full(part.shape, NAN)).first->second;
          for (const PartRun& run : part.runs({0, elements.numel()})) {
            const int64_t length = run.whole.end - run.whole.begin;
            all.view(-1)
                .narrow(0, run.whole.begin, length)
                .copy_(elements.narrow(0, run.part_begin, length));
          }
        }
      }
      for (const auto& item : whole->named_parameters())
        EXPECT_TRUE(at::equal(joined.at(item.key()), item.value())) << item.key();
    }
  }
}

// The base model's 93,255,680 parameters: all are cut but 38,912 of norms and biases of outputs.
TEST(TensorParallelContextTest, PartsHoldTheirShareOfTheBaseModel) {
  const auto parameters_of = [](int64_t index, int64_t count) {
    Transformer part(preset("base"), Precision::kFloat32, at::kMeta,
                     std::make_shared<TensorParallelContext>(index, count));
    EXPECT_EQ(part->num_parameters(), 93'255'680);
    return count_parameters(*part);
  };
  EXPECT_EQ(parameters_of(0, 1), 93'255'680);
  EXPECT_EQ(parameters_of(0, 2), 46'647'296);
  EXPECT_EQ(parameters_of(1, 2), 46'647'296);
  EXPECT_EQ(parameters_of(3, 4), 23'343'104);
}

TEST(TensorParallelContextTest, ModelsThatComeOutUnevenAreRefused) {
  const auto make = [](int64_t count) {
    return Transformer(options(false), Precision::kFloat32, at::kCPU,
                       std::make_shared<TensorParallelContext>(0, count));
  };
  EXPECT_NO_THROW(make(4));
  EXPECT_THROW(make(3), c10::ValueError);   // heads
  EXPECT_THROW(make(16), c10::ValueError);  // inner columns, and heads
}

}  // namespace tensor_parallel_context_test
}  // namespace cohort::nmt
