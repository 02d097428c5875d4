// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/transformer.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/nmt/search.h"
#include "cohort/optim/adam.h"
#include "cohort/translate/layer_runner.h"
#include "cohort/translate/tensor_memory.h"

#include "tests/support/aten_kernels.h"
#include "tests/support/message_of.h"
#include "tests/support/sentences.h"

namespace cohort::nmt {
namespace transformer_test {

// Every norm with every activation, untied, tied and tied with the source.
std::vector<TransformerOptions> variants() {
  std::vector<TransformerOptions> result;
  for (const Norm norm : {Norm::kPre, Norm::kPost}) {
    for (const auto activation : {Activation::kRelu, Activation::kGelu, Activation::kSwish}) {
      auto options = test::tiny_options();
      options.norm = norm;
      options.ffn_activation = activation;
      options.tied_embeddings = activation == Activation::kGelu;
      options.tied_embeddings_all = activation == Activation::kSwish;
      result.push_back(options);
    }
  }
  return result;
}

std::string name_of(const TransformerOptions& options) {
  return to_string(options.norm) + " " + to_string(options.ffn_activation);
}

TEST(TransformerTest, BaseHasExactly93255680Parameters) {
  EXPECT_EQ(count_parameters(*Transformer(preset("base"))), 93'255'680);
}

TEST(TransformerTest, TheSameSeedGivesTheSameModel) {
  Transformer a(test::tiny_options());
  Transformer b(test::tiny_options());
  a->initialise(3);
  b->initialise(3);
  const auto batch = test::make_test_batch(test::make_sentences(4, 1));
  EXPECT_TRUE(at::equal(std::get<0>(a->forward(batch)), std::get<0>(b->forward(batch))));
  b->initialise(4);
  EXPECT_FALSE(at::equal(std::get<0>(a->forward(batch)), std::get<0>(b->forward(batch))));
}

TEST(TransformerTest, PaddingChangesNothing) {
  for (const auto& options : variants()) {
    Transformer model(options);
    model->to(at::kDouble);
    const auto sentences = test::make_sentences(6, 2);
    const double together =
        std::get<0>(model->forward(test::make_test_batch(sentences))).item<double>();
    double apart = 0;
    for (const auto& s : sentences)
      apart += std::get<0>(model->forward(test::make_test_batch({s}))).item<double>();
    EXPECT_NEAR(together, apart, 1e-11) << name_of(options);
  }
}

// Its loss, then the gradients of all parameters.
std::vector<at::Tensor> loss_and_gradients(Transformer& model, const Batch& batch) {
  model->zero_grad();
  const at::Tensor loss = std::get<0>(model->forward(batch));
  loss.backward();
  std::vector<at::Tensor> result{loss.detach()};
  for (const at::Tensor& parameter : model->parameters())
    result.push_back(parameter.grad().clone());
  return result;
}

std::vector<std::vector<test::Sentence>> packed_batches() {
  const test::Sentence empty{};  // of an end mark alone
  auto equal = test::make_sentences(3, 4);
  for (auto& sentence : equal) {
    sentence.source.resize(5, 7);
    sentence.target.resize(4, 8);
  }
  return {test::make_sentences(6, 2), test::make_sentences(1, 3), equal,
          {empty, empty, empty},      {empty, equal[0]},          test::make_sentences(40, 5)};
}

TEST(TransformerTest, AStepOfABatchIsTheSumOfStepsOfItsSentencesAlone) {
  for (const auto& options : variants()) {
    Transformer model(options);
    model->to(at::kDouble);
    for (const auto& sentences : packed_batches()) {
      SCOPED_TRACE(c10::str(name_of(options), ", sentences ", sentences.size()));
      const auto together = loss_and_gradients(model, test::make_test_batch(sentences));
      std::vector<at::Tensor> apart;
      for (const at::Tensor& tensor : together) apart.push_back(at::zeros_like(tensor));
      for (const auto& sentence : sentences) {
        const auto alone = loss_and_gradients(model, test::make_test_batch({sentence}));
        for (size_t i = 0; i < alone.size(); ++i) apart[i] += alone[i];
      }
      for (size_t i = 0; i < together.size(); ++i)
        EXPECT_TRUE(together[i].allclose(apart[i], 1e-11, 1e-12)) << i;
    }
  }
}

TEST(TransformerTest, TrainingsRowsHaveNoPadding) {
  Transformer model(test::tiny_options());
  model->to(at::kDouble);
  std::vector<int64_t> rows;  // of each layer's input
  model->set_layer_runner([&](const torch::nn::Module&, const std::vector<at::Tensor>& inputs,
                              const TransformerImpl::LayerBody& body) {
    for (const at::Tensor& input : inputs) {
      EXPECT_EQ(input.dim(), at::GradMode::is_enabled() ? 2 : 3);
      rows.push_back(input.size(0));
    }
    return body(inputs);
  });
  for (const auto& sentences : packed_batches()) {
    const Batch batch = test::make_test_batch(sentences);
    const int64_t source = batch.source_lengths_B.sum().item<int64_t>();
    const int64_t target = batch.num_target_tokens;
    EXPECT_TRUE(at::equal(at::nonzero(batch.labels_BT.flatten()).squeeze(1), batch.label_rows()));
    rows.clear();
    const double packed = std::get<0>(model->forward(batch)).item<double>();
    EXPECT_EQ(rows, (std::vector<int64_t>{source, source, target, source, target, source}));
    const at::NoGradGuard no_grad;
    EXPECT_NEAR(std::get<0>(model->forward(batch)).item<double>(), packed, 1e-11);
  }
}

struct Step {
  at::Tensor loss, nll;
  std::vector<at::Tensor> gradients;
};

// With dropout, whose elements are the same ones everywhere.
Step one_step(TransformerOptions options, const Batch& batch) {
  options.dropout = 0.2;
  Transformer model(options);
  model->to(at::kDouble);
  model->set_dropout_stream({.seed = 3});
  Step step;
  std::tie(step.loss, step.nll) = model->forward(batch);
  step.loss.backward();
  for (const at::Tensor& parameter : model->parameters())
    step.gradients.push_back(parameter.grad());
  return step;
}

TEST(TransformerTest, AStepByOperationsOfAtenEqualsOneByLoops) {
  const auto batch = test::make_test_batch(test::make_sentences(6, 2));
  for (const auto& options : variants()) {
    SCOPED_TRACE(name_of(options));
    const Step loops = one_step(options, batch);
    const test::AtenKernels guard;
    const Step aten = one_step(options, batch.to(at::kCPU));
    EXPECT_NEAR(loops.loss.item<double>(), aten.loss.item<double>(), 1e-11);
    EXPECT_NEAR(loops.nll.item<double>(), aten.nll.item<double>(), 1e-11);
    for (size_t i = 0; i < loops.gradients.size(); ++i)
      EXPECT_TRUE(loops.gradients[i].allclose(aten.gradients[i], 1e-11, 1e-12)) << i;
    EXPECT_GT(loops.gradients[0].abs().sum().item<double>(), 0);
  }
}

// Without the operations of inference alone: what another device does in evaluation.
TEST(TransformerTest, EvaluationByOperationsOfAtenEqualsThatByLoops) {
  const at::NoGradGuard no_grad;
  const auto batch = test::make_test_batch(test::make_sentences(6, 2));
  for (const auto& options : variants()) {
    Transformer model(options);
    model->to(at::kDouble);
    model->eval();
    const at::Tensor loops = model->log_probabilities(batch);
    const test::AtenKernels guard;
    const at::Tensor aten = model->log_probabilities(batch);
    EXPECT_TRUE(loops.allclose(aten, 1e-11, 1e-12)) << name_of(options);
  }
}

// The scores of stepwise decoding with kept keys and values, against the whole sentence at once.
void expect_cached_decoding_equals_the_whole_sentence(const TransformerOptions& options) {
  const at::NoGradGuard no_grad;
  Transformer model(options);
  model->to(at::kDouble);
  model->eval();
  const auto batch = test::make_test_batch(test::make_sentences(5, 3));
  DecoderState state = model->begin_decoding(model->encode(batch.source_BS, batch.source_lengths_B),
                                             batch.source_lengths_B);
  double nll = 0;
  for (int64_t t = 0; t < batch.labels_BT.size(1); ++t) {
    const at::Tensor scores =
        at::log_softmax(model->decode_step(batch.input_BT.select(1, t), state), 1);
    for (int64_t b = 0; b < batch.labels_BT.size(0); ++b) {
      const int64_t label = batch.labels_BT[b][t].item<int64_t>();
      if (label != 0) nll -= scores[b][label].item<double>();
    }
  }
  EXPECT_NEAR(nll, std::get<1>(model->forward(batch)).item<double>(), 1e-10) << name_of(options);
}

TEST(TransformerTest, CachedDecodingEqualsTheWholeSentence) {
  for (const auto& options : variants()) expect_cached_decoding_equals_the_whole_sentence(options);
}

TEST(TransformerTest, CachedDecodingByOperationsOfAtenEqualsTheWholeSentence) {
  const test::AtenKernels guard;
  for (const auto& options : variants()) expect_cached_decoding_equals_the_whole_sentence(options);
}

// What decoding keeps of the weights in bfloat16 must not outlive an update.
TEST(TransformerTest, DecodingAfterAnUpdateUsesTheNewWeights) {
  const auto batch = test::make_test_batch(test::make_sentences(8, 5));
  Transformer model(test::tiny_options(), Precision::kBFloat16);
  search(model, batch.source_BS, batch.source_lengths_B);
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  for (const auto& item : model->named_parameters())
    parameters.emplace_back(item.key(), item.value());
  optim::Adam adam(parameters);
  for (int step = 0; step < 20; ++step) {
    std::get<0>(model->forward(batch)).backward();
    adam.step(0.01);
    adam.zero_grad();
  }
  Transformer fresh(test::tiny_options(), Precision::kBFloat16);
  const at::NoGradGuard no_grad;
  for (auto& item : fresh->named_parameters())
    item.value().copy_(model->named_parameters()[item.key()]);
  const auto expected = search(fresh, batch.source_BS, batch.source_lengths_B);
  const auto found = search(model, batch.source_BS, batch.source_lengths_B);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(found[i][0].tokens, expected[i][0].tokens);
    EXPECT_EQ(found[i][0].log_prob, expected[i][0].log_prob);
  }
}

TEST(TransformerTest, TiedEmbeddingsAreOneTableWithBothGradients) {
  auto options = test::tiny_options();
  Transformer untied(options);
  options.tied_embeddings = true;
  Transformer tied(options);
  EXPECT_EQ(count_parameters(*untied) - count_parameters(*tied),
            options.dim_vocab_target * options.dim_emb);
  for (auto* model : {&untied, &tied}) (*model)->to(at::kDouble);
  {
    const at::NoGradGuard no_grad;
    for (auto& item : tied->named_parameters())
      untied->named_parameters()[item.key()].copy_(item.value());
    untied->named_parameters()["generator.weight"].copy_(
        tied->named_parameters()["target_embedding"]);
  }
  const auto batch = test::make_test_batch(test::make_sentences(5, 7));
  for (auto* model : {&untied, &tied}) {
    (*model)->train();
    std::get<0>((*model)->forward(batch)).backward();
  }
  const auto gradient = [](Transformer& model, const char* name) {
    return model->named_parameters()[name].grad();
  };
  EXPECT_TRUE(at::allclose(
      gradient(tied, "target_embedding"),
      gradient(untied, "target_embedding") + gradient(untied, "generator.weight"), 1e-12, 1e-14));
}

TEST(TransformerTest, TiedEmbeddingsAllAreOneTableWithAllThreeGradients) {
  auto options = test::tiny_options();
  Transformer untied(options);
  options.tied_embeddings_all = true;
  Transformer tied(options);
  EXPECT_EQ(count_parameters(*untied) - count_parameters(*tied),
            2 * options.dim_vocab_target * options.dim_emb);
  for (auto* model : {&untied, &tied}) (*model)->to(at::kDouble);
  const auto of_untied = untied->named_parameters();
  const auto of_tied = tied->named_parameters();
  const std::vector<std::string> tables = {"source_embedding", "target_embedding",
                                           "generator.weight"};
  {
    const at::NoGradGuard no_grad;
    for (const auto& item : of_untied) {
      const bool table = std::ranges::find(tables, item.key()) != tables.end();
      untied->named_parameters()[item.key()].copy_(of_tied[table ? "embedding" : item.key()]);
    }
  }
  const auto batch = test::make_test_batch(test::make_sentences(5, 7));
  for (auto* model : {&untied, &tied}) std::get<0>((*model)->forward(batch)).backward();
  at::Tensor sum = at::zeros_like(of_tied["embedding"]);
  for (const auto& name : tables) sum += of_untied[name].grad();
  EXPECT_TRUE(at::allclose(of_tied["embedding"].grad(), sum, 1e-12, 1e-14));
  options.dim_vocab_source += 1;
  EXPECT_THROW(Transformer{options}, ConfigError);
}

TEST(TransformerTest, APostNormModelHasNoFinalNorms) {
  auto options = test::tiny_options();
  const int64_t pre = count_parameters(*Transformer(options));
  options.norm = Norm::kPost;
  EXPECT_EQ(pre - count_parameters(*Transformer(options)), 2 * 2 * options.dim_emb);
}

// Loss, then every parameter's gradient, of two steps whose dropout continues from the first to the
// second.
std::vector<at::Tensor> losses_and_gradients(const TransformerOptions& options, Precision precision,
                                             bool gradient_checkpointing = false) {
  Transformer model(options, precision);
  translate::set_up_layers(model, gradient_checkpointing);
  model->initialise(11);
  model->set_dropout_stream({.seed = 5, .call = 100});
  std::vector<at::Tensor> result;
  for (const uint32_t seed : {1U, 2U}) {
    const auto loss =
        std::get<0>(model->forward(test::make_test_batch(test::make_sentences(6, seed))));
    loss.backward();
    result.push_back(loss.detach());
  }
  for (const auto& parameter : model->parameters()) result.push_back(parameter.grad());
  return result;
}

TEST(TransformerTest, GradientCheckpointingChangesNoBit) {
  for (auto options : variants()) {
    options.dropout = 0.3;
    for (const Precision precision :
         {Precision::kFloat32,
          multiplies_bfloat16() ? Precision::kBFloat16 : Precision::kFloat32}) {
      const auto expected = losses_and_gradients(options, precision);
      const auto found = losses_and_gradients(options, precision, /*gradient_checkpointing=*/true);
      ASSERT_EQ(found.size(), expected.size());
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(at::equal(found[i], expected[i])) << name_of(options) << ", tensor " << i;
    }
  }
}

TEST(TransformerTest, GradientCheckpointingHoldsOneLayerAtATime) {
  const auto peak = [](int64_t depth, bool gradient_checkpointing) {
    auto options = test::tiny_options();
    options.enc_depth = options.dec_depth = depth;
    options.dropout = 0.1;
    Transformer model(options);
    translate::set_up_layers(model, gradient_checkpointing);
    const auto batch = test::make_test_batch(test::make_sentences(64, 3));
    const auto step = [&] { std::get<0>(model->forward(batch)).backward(); };
    step();  // Gradients are there from now on.
    return static_cast<double>(translate::peak_tensor_bytes(step));
  };
  // A layer more on each side costs without it all that the layers compute, with it their inputs.
  const double whole = (peak(6, false) - peak(2, false)) / 4;
  const double inputs = (peak(6, true) - peak(2, true)) / 4;
  EXPECT_LT(inputs, 0.15 * whole) << inputs << " bytes a layer against " << whole;
}

TEST(TransformerTest, IdsAndLengthsOutOfRangeAreRefused) {
  Transformer model(test::tiny_options());
  auto batch = test::make_test_batch(test::make_sentences(3, 6));
  batch.labels_BT[0][0] = test::kVocabulary;
  EXPECT_EQ(test::message_of<c10::ValueError>([&] { model->forward(batch); }),
            "labels: expected 1 to 39, got 40");
  batch.labels_BT[0][0] = 0;
  EXPECT_EQ(test::message_of<c10::ValueError>([&] { model->forward(batch); }),
            "labels: expected 1 to 39, got 0");
  batch = test::make_test_batch(test::make_sentences(3, 6));
  batch.source_lengths_B[0] = batch.source_BS.size(1) + 1;
  EXPECT_EQ(test::message_of<c10::ValueError>([&] { model->forward(batch); }),
            "source lengths: expected 1 to " + std::to_string(batch.source_BS.size(1)) + ", got " +
                std::to_string(batch.source_BS.size(1) + 1));
  const at::NoGradGuard no_grad;
  model->eval();
  batch = test::make_test_batch(test::make_sentences(3, 6));
  const at::Tensor memory = model->encode(batch.source_BS, batch.source_lengths_B);
  DecoderState state = model->begin_decoding(memory, batch.source_lengths_B);
  EXPECT_EQ(test::message_of<c10::ValueError>([&] {
              model->decode_step(at::tensor({2, 2, -1}, at::kLong), state);
            }),
            "decode_step: tokens: expected 0 to 39, got -1");
}

TEST(TransformerTest, LengthsMayBeAColumnAndMustBeAsManyAsSentences) {
  const at::NoGradGuard no_grad;
  Transformer model(test::tiny_options());
  model->eval();
  const auto batch = test::make_test_batch(test::make_sentences(5, 3));
  const at::Tensor lengths = batch.source_lengths_B;
  const at::Tensor column = at::stack({lengths, at::ones_like(lengths)}, 1).select(1, 0);
  const at::Tensor memory = model->encode(batch.source_BS, lengths);
  EXPECT_TRUE(at::equal(model->encode(batch.source_BS, column), memory));
  for (const at::Tensor& other : {lengths.narrow(0, 0, 4), lengths.to(at::kInt), lengths + 100}) {
    EXPECT_THROW(model->encode(batch.source_BS, other), c10::ValueError);
    EXPECT_THROW(model->begin_decoding(memory, other), c10::ValueError);
  }
}

TEST(TransformerTest, ItLearnsToCopy) {
  Transformer model(test::tiny_options());
  torch::optim::Adam adam(model->parameters(), torch::optim::AdamOptions(5e-3));
  double last = 0;
  for (int step = 0; step < 150; ++step) {
    auto sentences = test::make_sentences(16, static_cast<uint32_t>(step % 4));
    for (auto& s : sentences) s.target = s.source;
    const auto batch = test::make_test_batch(sentences);
    auto [loss, nll] = model->forward(batch);
    adam.zero_grad();
    (loss / static_cast<double>(batch.num_target_tokens)).backward();
    adam.step();
    last = nll.item<double>() / static_cast<double>(batch.num_target_tokens);
  }
  EXPECT_LT(last, 1.0) << "from log(40) = 3.7 nats a token";
}

TEST(TransformerTest, BadSizesAreNamed) {
  try {
    preset("huge");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_EQ(one_line(error), "--preset huge: expected tiny, small, base or big");
  }
  TransformerOptions options;
  options.heads = 7;
  EXPECT_THROW(validate(options), ConfigError);
  EXPECT_THROW(parse_norm("nad"), ConfigError);
  EXPECT_THROW(parse_activation("tanh"), ConfigError);
}

TEST(TransformerTest, ASentenceBeyondTheLastPositionIsRefused) {
  auto options = test::tiny_options();
  options.max_positions = 3;
  Transformer model(options);
  EXPECT_THROW(model->forward(test::make_test_batch(test::make_sentences(8, 1))), c10::ValueError);
}

}  // namespace transformer_test
}  // namespace cohort::nmt
