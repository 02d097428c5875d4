#include "cohort/nmt/transformer.h"

#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/nmt/search.h"
#include "cohort/optim/adam.h"

#include "tests/support/sentences.h"

namespace cohort::nmt {
namespace {

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
  Transformer model(test::tiny_options());
  model->to(at::kDouble);
  const auto sentences = test::make_sentences(6, 2);
  const double together =
      std::get<0>(model->forward(test::make_test_batch(sentences))).item<double>();
  double apart = 0;
  for (const auto& s : sentences)
    apart += std::get<0>(model->forward(test::make_test_batch({s}))).item<double>();
  EXPECT_NEAR(together, apart, 1e-11);
}

// The scores of stepwise decoding with kept keys and values, against the whole sentence at once.
TEST(TransformerTest, CachedDecodingEqualsTheWholeSentence) {
  const at::NoGradGuard no_grad;
  Transformer model(test::tiny_options());
  model->to(at::kDouble);
  model->eval();
  const auto batch = test::make_test_batch(test::make_sentences(5, 3));
  DecoderState state = model->begin_decoding(model->encode(batch.source_BS, batch.source_lengths_B),
                                             batch.source_lengths_B);
  double nll = 0;
  for (int64_t t = 0; t < batch.labels_BT.size(1); ++t) {
    const at::Tensor scores =
        at::log_softmax(model->decode_step(batch.input_BT.narrow(1, t, 1), state).squeeze(1), 1);
    for (int64_t b = 0; b < batch.labels_BT.size(0); ++b) {
      const int64_t label = batch.labels_BT[b][t].item<int64_t>();
      if (label != 0) nll -= scores[b][label].item<double>();
    }
  }
  EXPECT_NEAR(nll, std::get<1>(model->forward(batch)).item<double>(), 1e-10);
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

TEST(TransformerTest, IdsAndLengthsOutOfRangeAreRefused) {
  Transformer model(test::tiny_options());
  auto batch = test::make_test_batch(test::make_sentences(3, 6));
  batch.labels_BT[0][0] = test::kVocabulary;
  EXPECT_THROW(model->forward(batch), c10::ValueError);
  batch = test::make_test_batch(test::make_sentences(3, 6));
  batch.source_lengths_B[0] = batch.source_BS.size(1) + 1;
  EXPECT_THROW(model->forward(batch), c10::ValueError);
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
}

TEST(TransformerTest, ASentenceBeyondTheLastPositionIsRefused) {
  auto options = test::tiny_options();
  options.max_positions = 3;
  Transformer model(options);
  EXPECT_THROW(model->forward(test::make_test_batch(test::make_sentences(8, 1))), c10::ValueError);
}

}  // namespace
}  // namespace cohort::nmt
