// SPDX-License-Identifier: Apache-2.0
// `cohort nmt train --tensor-parallel` as a user runs it.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/apps/nmt_command.h"

namespace tensor_parallel_command_test {

using cohort::test::bin;
using cohort::test::contents;
using cohort::test::Ended;
using cohort::test::lines_of;
using cohort::test::shell;

class TensorParallelCommandTest : public cohort::test::NmtCommand {
 protected:
  void train(const std::string& name, int ranks, int updates, const std::string& flags,
             const std::string& precision = "float32", int num_hosts = 1) {
    std::string command = on_ranks(ranks, train_flags(name) + "--precision " + precision +
                                              " --exponential-smoothing 0.1 --tied-embeddings "
                                              "--save-interval-updates 4 --after-batches " +
                                              std::to_string(updates) + " " + flags);
    if (num_hosts > 1) {  // ranks of one machine that count as on several, in turns
      std::ofstream(path("on-hosts"))
          << "COHORT_HOST_NAME=host$((RANK % " << num_hosts << ")) exec \"$@\"\n";
      command.replace(command.find("-- "), 3, "-- sh " + path("on-hosts") + " ");
    }
    const Ended ended = shell(command);
    ASSERT_EQ(ended.code, 0) << ended.output;
  }
  // The last row of that type.
  nlohmann::json last(const std::string& name, const std::string& type) {
    nlohmann::json found;
    for (const std::string& line : lines_of(contents(path(name + "/history.jsonl")))) {
      const auto row = nlohmann::json::parse(line);
      if (row["type"] == type) found = row;
    }
    return found;
  }
};

// Two data-parallel ranks throughout, so batches and dropout are the same.
TEST_F(TensorParallelCommandTest, ARunGoesOnWithDividedModelsAndWithout) {
  train("plain", 2, 12, "");
  train("r", 2, 2, "");
  train("r", 4, 4, "--tensor-parallel 2");
  train("r", 4, 6, "--tensor-parallel 2 --strategy zero3");
  train("r", 4, 8, "--tensor-parallel 2 --strategy zero1 --gradient-checkpointing");
  train("r", 4, 10, "--tensor-parallel 2 --strategy hybrid", "float32", /*num_hosts=*/2);
  train("r", 2, 12, "--strategy zero2");
  EXPECT_NEAR(last("r", "valid")["valid_loss"].get<double>(),
              last("plain", "valid")["valid_loss"].get<double>(), 1e-4)
      << "float32, summed in another order";
  for (const std::string checkpoint : {"r/last", "r/best", "r/checkpoints/4", "r/checkpoints/8"}) {
    const Ended verified = shell(bin("cohort") + " checkpoint verify " + path(checkpoint));
    EXPECT_EQ(verified.code, 0) << checkpoint << ": " << verified.output;
  }
}

// One model on all ranks, from the first update to best/, which one process then uses.
TEST_F(TensorParallelCommandTest, TwoRanksTrainOneModelThatOneProcessUses) {
  train("one", 1, 6, "");
  train("two", 2, 6, "--tensor-parallel 2");
  EXPECT_NEAR(last("two", "valid")["valid_loss"].get<double>(),
              last("one", "valid")["valid_loss"].get<double>(), 1e-4);
  // Where the machine multiplies bfloat16, parts are rounded to it before they are summed.
  train("auto", 2, 6, "--tensor-parallel 2", "auto");
  EXPECT_NEAR(last("auto", "valid")["valid_loss"].get<double>(),
              last("one", "valid")["valid_loss"].get<double>(), 0.02);
  const auto translation = [&](const std::string& name) {
    const Ended ended = shell(bin("cohort-nmt") +
                              " translate --precision float32 --beam-size 1 --normalize 0 "
                              "--max-output-length 60 --model-dir " +
                              path(name) + " < " + path("valid.en"));
    EXPECT_EQ(ended.code, 0) << ended.output;
    return ended.output;
  };
  std::string at_best;  // "H translation" of each sentence
  for (const std::string& line : lines_of(contents(path("two/result-dev.txt"))))
    if (line.starts_with("H ")) at_best += line.substr(2) + "\n";
  EXPECT_EQ(translation("two"), at_best);
}

// Two ranks hold more of a batch than one does.
TEST_F(TensorParallelCommandTest, BatchesAreFittedToWhatTheRanksHoldTogether) {
  const auto rows = [&](const std::string& name, int ranks, const std::string& flags) {
    std::string all = train_flags(name) + "--after-batches 1 --workspace 2 " + flags;
    all.replace(all.find("--mini-batch 16"), 15, "--mini-batch-fit");
    const Ended ended = shell(on_ranks(ranks, all));
    EXPECT_EQ(ended.code, 0) << ended.output;
    const auto manifest = nlohmann::json::parse(contents(path(name + "/last/manifest.json")));
    return nlohmann::json::parse(manifest["facts"]["fit_rows"].get<std::string>())
        .back()
        .get<int64_t>();
  };
  const int64_t one = rows("one", 1, ""), two = rows("two", 2, "--tensor-parallel 2");
  EXPECT_GT(two, one);
  EXPECT_LT(two, 2 * one) << "what goes from layer to layer is whole on both";
  const int64_t sharded = rows("sharded", 2, "--strategy zero3");
  EXPECT_LT(sharded, one) << "gathered parameters take some of the workspace";
  EXPECT_GT(sharded, one / 2);
}

TEST_F(TensorParallelCommandTest, DivisionsThatDoNotComeOutEvenAreRefused) {
  expect_refused(train_flags("x") + "--tensor-parallel 2",
                 "--tensor-parallel 2: expected a divisor of the number of ranks, 1");
  expect_refused(train_flags("x") + "--tensor-parallel 0", "expected 1 to 65536");
  std::string flags = train_flags("x");
  flags.replace(flags.find("--transformer-dim-ffn 64"), 24, "--transformer-dim-ffn 33");
  const Ended odd = shell(on_ranks(2, flags + "--tensor-parallel 2"));
  EXPECT_EQ(odd.code, 2) << odd.output;
  EXPECT_NE(odd.output.find("a model in 2 shards: expected a multiple of that as dim_ffn, got 33"),
            std::string::npos)
      << odd.output;
}

}  // namespace tensor_parallel_command_test
