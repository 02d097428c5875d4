// SPDX-License-Identifier: Apache-2.0
// Evaluation of a model on a device, by ranks whose group is on that device.
#include <filesystem>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <unistd.h>

#include "cohort/translate/evaluation.h"
#include "cohort/translate/tensor_parallel_context.h"

#include "tests/device/same_bits.h"
#include "tests/device/second_device.h"
#include "tests/support/aten_kernels.h"
#include "tests/support/sentences.h"

namespace cohort::translate {
namespace evaluation_device_test {

namespace fs = std::filesystem;

text::ParallelText make_text() {
  const std::vector<std::string> words{"red", "green", "blue", "one", "two", "three", "cat", "dog"};
  text::ParallelText pairs;
  for (size_t i = 0; i < 17; ++i) {
    std::string source = words[i % 8];
    for (size_t k = 0; k < i % 6; ++k) source += " " + words[(i * 7 + k * 3) % 8];
    pairs.source.push_back(source);
    pairs.target.push_back(source + " end");
  }
  return pairs;
}

text::Tokenizer make_tokenizer(const text::ParallelText& pairs) {
  const fs::path file =
      fs::temp_directory_path() / ("cohort-test-device-" + std::to_string(getpid()) + ".spm");
  text::train_tokenizer(pairs.target, file,
                        {.vocab_size = test::kVocabulary, .character_coverage = 1.0});
  const text::Tokenizer tokenizer(file);
  fs::remove(file);
  return tokenizer;
}

nmt::Transformer model_on(at::Device device) {
  nmt::Transformer model(test::tiny_options());
  model->initialise(3);
  model->to(device);
  return model;
}

void expect_equal_evaluations(const comm::ProcessGroup& group) {
  const auto pairs = make_text();
  const auto tokenizer = make_tokenizer(pairs);
  const Corpus corpus = tokenize(pairs, tokenizer, tokenizer);
  const EvaluationOptions options{.mini_batch_words = 30,
                                  .search = {.beam_size = 2, .normalize = 1, .max_length = 20}};
  const auto evaluated = [&](at::Device device, const comm::ProcessGroup& ranks) {
    nmt::Transformer model = model_on(device);
    return evaluate(model, corpus, pairs.source, tokenizer, ranks, options);
  };
  const comm::ProcessGroup on_cpu = test::on_cpu(group);
  const Evaluation expected = [&] {
    const test::AtenKernels guard;
    return evaluated(at::kCPU, on_cpu);
  }();
  // Also a model on the device in a group of the CPU.
  for (const comm::ProcessGroup* ranks : {&group, &on_cpu}) {
    const Evaluation got = evaluated(test::second_device(), *ranks);
    EXPECT_EQ(got.loss, expected.loss);
    EXPECT_EQ(got.bleu.sys_len, expected.bleu.sys_len);
    EXPECT_EQ(got.bleu.ref_len, expected.bleu.ref_len);
    EXPECT_EQ(got.chrf.score, expected.chrf.score);
    EXPECT_EQ(got.translations, expected.translations);
  }
  EXPECT_GT(expected.loss, 1);
  EXPECT_GT(expected.bleu.sys_len, 0);

  // Losses stay on the device and are read once, at the end.
  nmt::Transformer model = model_on(test::second_device());
  auto loss_alone = options;
  loss_alone.translate = false;
  int64_t num_batches = 0;
  loss_alone.on_batch = [&](int64_t, int64_t total) { num_batches = total; };
  evaluate(model, corpus, pairs.source, tokenizer, on_cpu, loss_alone);  // Positions move once.
  test::reset_device_counts();
  evaluate(model, corpus, pairs.source, tokenizer, on_cpu, loss_alone);
  const test::DeviceCounts counts = test::device_counts();
  EXPECT_GE(num_batches, 2);
  EXPECT_EQ(counts.host_to_device, 6 * num_batches);
  EXPECT_EQ(counts.device_to_host, 1);
  EXPECT_EQ(counts.synchronisations, 1);
}

TEST(EvaluationDeviceTest, LossAndTranslationsHaveTheBitsOfTheCpuAndTheLossIsReadOnce) {
  test::device_ranks(2, expect_equal_evaluations);
}

TEST(EvaluationDeviceTest, ThreeRanksEvaluateAndTranslateAsOnTheCpu) {
  test::device_ranks(3, expect_equal_evaluations);
}

void expect_equal_translations(const comm::ProcessGroup& group) {
  const nmt::Batch batch = test::make_test_batch(test::make_sentences(9, 5));
  const auto translated = [&](at::Device device, const comm::ProcessGroup& ranks) {
    nmt::Transformer model(test::tiny_options(), nmt::Precision::kFloat32, at::kCPU,
                           make_tensor_parallel_context(ranks));
    model->initialise(3);
    model->to(device);
    return nmt::search(model, batch.source_BS, batch.source_lengths_B,
                       {.beam_size = 3, .max_length = 12});
  };
  const auto expected = [&] {
    const test::AtenKernels guard;
    return translated(at::kCPU, test::on_cpu(group));
  }();
  const auto got = translated(test::second_device(), group);
  ASSERT_EQ(got.size(), 9);
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].size(), 3);
    for (size_t k = 0; k < 3; ++k) {
      EXPECT_EQ(got[i][k].tokens, expected[i][k].tokens);
      EXPECT_EQ(got[i][k].log_prob, expected[i][k].log_prob);
    }
  }
}

TEST(EvaluationDeviceTest, TranslationsOfATensorParallelModelHaveTheBitsOfTheCpu) {
  test::device_ranks(2, expect_equal_translations);
}

}  // namespace evaluation_device_test
}  // namespace cohort::translate
