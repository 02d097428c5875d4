// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/evaluation.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/translate/run_folder.h"

#include "tests/support/ranks.h"

namespace cohort::translate {
namespace evaluation_test {

namespace fs = std::filesystem;

text::ParallelText make_text(int count) {
  text::ParallelText pairs;
  const std::vector<std::string> words = {"red", "green", "blue", "one",
                                          "two", "three", "cat",  "dog"};
  for (int i = 0; i < count; ++i) {
    std::string source;
    for (int k = 0; k <= i % 6; ++k)
      source += (k ? " " : "") + words[static_cast<size_t>(i * 7 + k * 3) % 8];
    pairs.source.push_back(source);
    pairs.target.push_back(source + " end");
  }
  return pairs;
}

fs::path fresh_folder(const std::string& name) {
  const fs::path folder =
      fs::temp_directory_path() / ("cohort-test-" + name + std::to_string(getpid()));
  fs::remove_all(folder);
  fs::create_directories(folder);
  return folder;
}

text::Tokenizer make_tokenizer(const fs::path& folder, const text::ParallelText& pairs) {
  text::train_tokenizer(pairs.target, folder / "t.spm",
                        {.vocab_size = 40, .character_coverage = 1.0});
  return text::Tokenizer(folder / "t.spm");
}

nmt::Transformer make_model() {
  nmt::Transformer model(nmt::TransformerOptions{.dim_vocab_source = 40,
                                                 .dim_vocab_target = 40,
                                                 .dim_emb = 16,
                                                 .heads = 2,
                                                 .enc_depth = 1,
                                                 .dec_depth = 1,
                                                 .dim_ffn = 32,
                                                 .max_positions = 200});
  model->to(at::kDouble);
  return model;
}

TEST(EvaluationTest, ThreeRanksGiveTheLossAndScoreOfOne) {
  test::ranks(3, [](const comm::ProcessGroup& group) {
    const auto folder = fresh_folder("evaluation");
    const auto pairs = make_text(23);
    const auto tokenizer = make_tokenizer(folder, pairs);
    const auto corpus = tokenize(pairs, tokenizer, tokenizer);
    auto model = make_model();
    const EvaluationOptions options{.mini_batch_words = 30};
    comm::ProcessGroup alone(comm::RankInfo{});
    // An untrained model shares hardly a word with its references, and a score near 0 would hide
    // lost sentences: every other reference is its own translation.
    auto references = pairs.target;
    const auto translations =
        evaluate(model, corpus, references, tokenizer, alone, options).translations;
    for (size_t i = 0; i < references.size(); i += 2) references[i] = translations[i];
    const Evaluation one = evaluate(model, corpus, references, tokenizer, alone, options);
    auto watched = options;
    std::vector<int64_t> done;
    int64_t total = 0;
    watched.on_batch = [&](int64_t batches, int64_t of) {
      done.push_back(batches);
      total = of;
    };
    const Evaluation all = evaluate(model, corpus, references, tokenizer, group, watched);
    ASSERT_FALSE(done.empty());
    EXPECT_TRUE(std::ranges::is_sorted(done));
    EXPECT_EQ(done.front(), 1);
    EXPECT_EQ(done.back(), total);
    EXPECT_EQ(std::ssize(done), total);
    EXPECT_GT(all.loss_seconds, 0);
    EXPECT_GT(all.translate_seconds, 0);
    EXPECT_NEAR(all.loss, one.loss, 1e-12);  // sums of some 200 terms near 4 in another order
    EXPECT_GT(one.bleu.score, 10);
    EXPECT_LT(one.bleu.score, 90);
    EXPECT_DOUBLE_EQ(all.bleu.score, one.bleu.score);
    EXPECT_EQ(all.chrf.score, one.chrf.score);
    EXPECT_GT(one.chrf.score, 10);
    EXPECT_EQ(all.bleu.sys_len, one.bleu.sys_len);
    EXPECT_EQ(all.bleu.ref_len, one.bleu.ref_len);
    if (group.rank() == 0) {
      EXPECT_EQ(all.translations, one.translations);
    }
    fs::remove_all(folder);
  });
}

TEST(CheckpointTest, RoundTripsAndRefusesWhatIsDamagedOrAnothers) {
  const auto folder = fresh_folder("checkpoint");
  auto model = make_model();
  train::save_checkpoint(folder.string(), *model, 7, metadata_of(model->options()));
  EXPECT_EQ(model_of(train::read_manifest(folder.string())), model->options());
  auto other = make_model();
  other->initialise(5);
  other->to(at::kDouble);
  train::load_checkpoint(folder.string(), *other);
  for (const auto& item : other->named_parameters()) {
    EXPECT_TRUE(at::equal(item.value(), model->named_parameters()[item.key()])) << item.key();
  }

  auto wider = model->options();
  wider.dim_ffn = 64;
  nmt::Transformer another(wider);
  another->to(at::kDouble);
  const auto error_of = [&](torch::nn::Module& module) -> std::string {
    try {
      train::load_checkpoint(folder.string(), module);
    } catch (const ConfigError& error) {
      return one_line(error);
    }
    return "no error";
  };
  EXPECT_NE(
      error_of(*another).find("a checkpoint of another model: encoder.layers.0.linear1.weight"),
      std::string::npos)
      << error_of(*another);

  const fs::path weights = folder / "weights-7.safetensors";
  std::fstream file(weights, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-5, std::ios::end);
  file.put('\x5a');
  file.close();
  EXPECT_NE(error_of(*other).find("SHA-256"), std::string::npos);
  fs::remove(weights);
  EXPECT_NE(error_of(*other).find("weights-7.safetensors"), std::string::npos);
  fs::remove_all(folder);
}

}  // namespace evaluation_test
}  // namespace cohort::translate
