// SPDX-License-Identifier: Apache-2.0
// Threads that infer with one model at a time. scripts/sanitize tsan runs them, too.
#include <gtest/gtest.h>
#include <thread>
#include <vector>

#include "cohort/nmt/search.h"

#include "tests/support/sentences.h"

namespace cohort::nmt {
namespace search_threads_test {

using Searched = std::vector<std::vector<Hypothesis>>;

void expect_same(const Searched& found, const Searched& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(found[i].size(), expected[i].size());
    for (size_t k = 0; k < expected[i].size(); ++k) {
      EXPECT_EQ(found[i][k].tokens, expected[i][k].tokens);
      EXPECT_EQ(found[i][k].log_prob, expected[i][k].log_prob);
    }
  }
}

// No thread has used the model before: both of them find its weights not packed yet.
void expect_same_in_threads(Precision precision) {
  const auto make = [&] {
    const bool int8 = precision == Precision::kInt8;
    Transformer model(test::tiny_options(), int8 ? Precision::kFloat32 : precision);
    model->initialise(3);
    if (int8) model = quantize(model);
    model->eval();
    return model;
  };
  const std::vector<Batch> batches{test::make_test_batch(test::make_sentences(5, 1)),
                                   test::make_test_batch(test::make_sentences(9, 2))};
  const auto searched = [](Transformer& model, const Batch& batch) {
    return search(model, batch.source_BS, batch.source_lengths_B,
                  {.beam_size = 3, .max_length = 8});
  };
  std::vector<Searched> expected, found(batches.size());
  Transformer alone = make(), shared = make();
  for (const Batch& batch : batches) expected.push_back(searched(alone, batch));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < batches.size(); ++i)
    threads.emplace_back([&, i] { found[i] = searched(shared, batches[i]); });
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < batches.size(); ++i) expect_same(found[i], expected[i]);
}

TEST(SearchThreadsTest, TwoShareAModel) {
  expect_same_in_threads(Precision::kFloat32);
}

TEST(SearchThreadsTest, TwoShareAnInt8Model) {
  expect_same_in_threads(Precision::kInt8);
}

}  // namespace search_threads_test
}  // namespace cohort::nmt
