// SPDX-License-Identifier: Apache-2.0
// Trained models whose scores PyTorch's modules computed, in float64, from the same files: what
// tests/peers/nmt_parity.py --record has left in recorded_logits/.
#include <filesystem>
#include <gtest/gtest.h>

#include "cohort/base/safetensors.h"
#include "cohort/train/checkpoint.h"
#include "cohort/translate/run_folder.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/environment.h"
#include "tests/support/logits.h"

namespace cohort::translate {
namespace recorded_logits_test {

namespace fs = std::filesystem;

struct Recorded {
  std::string folder;
  train::Metadata metadata;
  nmt::Transformer model{nullptr};
  at::Tensor source_BS, source_lengths_B, input_BT, target_lengths_B, logits_BTV;
};

at::Tensor copy_of(const TensorView& view) {
  const auto type = view.dtype == DType::kI64 ? at::kLong : at::kFloat;
  at::Tensor tensor = at::empty(view.shape, type);
  TORCH_CHECK(tensor.nbytes() == view.bytes.size());
  std::memcpy(tensor.data_ptr(), view.bytes.data(), view.bytes.size());
  return tensor;
}

Recorded read(const std::string& folder) {
  Recorded recorded{.folder = folder, .metadata = train::read_manifest(folder)};
  nmt::TransformerOptions options = model_of(recorded.metadata);
  options.dropout = 0;
  recorded.model = nmt::Transformer(options, nmt::Precision::kFloat32);
  train::load_checkpoint(folder, *recorded.model);
  recorded.model->eval();
  const SafetensorsFile file(folder + "/logits.safetensors");
  recorded.source_BS = copy_of(file.at("source"));
  recorded.source_lengths_B = (recorded.source_BS != 0).sum(1);
  recorded.input_BT = copy_of(file.at("input"));
  recorded.target_lengths_B = (recorded.input_BT != 0).sum(1);
  recorded.logits_BTV = copy_of(file.at("logits"));
  return recorded;
}

class RecordedLogitsTest : public testing::Test {
 protected:
  RecordedLogitsTest() {
    const fs::path all =
        fs::path(test::environment("COHORT_SOURCE")) / "tests/translate/recorded_logits";
    for (const auto& entry : fs::directory_iterator(all)) recorded_.push_back(read(entry.path()));
  }
  std::vector<Recorded> recorded_;
};

// Absolute and relative: float32's rounding through some layers of 16 columns.
constexpr double kTolerance = 1e-5;

TEST_F(RecordedLogitsTest, TheSearchsScoresArePyTorchs) {
  ASSERT_EQ(recorded_.size(), 4);
  for (Recorded& recorded : recorded_) {
    const at::Tensor ours = test::logits_of(recorded.model, recorded.source_BS,
                                            recorded.source_lengths_B, recorded.input_BT);
    const at::Tensor difference = (ours - recorded.logits_BTV).abs();
    const at::Tensor bound = kTolerance + kTolerance * recorded.logits_BTV.abs();
    const at::Tensor real = (recorded.input_BT != 0).unsqueeze(2);  // Padding is nobody's.
    EXPECT_TRUE((difference <= bound).logical_or(~real).all().item<bool>())
        << recorded.folder << " by " << (difference * real).max().item<double>();
    EXPECT_GT(recorded.logits_BTV.abs().max().item<double>(), 1) << "it has learnt something";
  }
}

TEST_F(RecordedLogitsTest, TrainingsLossIsThatOfPyTorchsScores) {
  for (Recorded& recorded : recorded_) {
    at::Tensor labels = at::zeros_like(recorded.input_BT);
    const int64_t width = labels.size(1);
    labels.narrow(1, 0, width - 1).copy_(recorded.input_BT.narrow(1, 1, width - 1));
    labels.scatter_(1, (recorded.target_lengths_B - 1).unsqueeze(1), 3);
    const nmt::Batch batch{.source_BS = recorded.source_BS,
                           .source_lengths_B = recorded.source_lengths_B,
                           .input_BT = recorded.input_BT,
                           .labels_BT = labels,
                           .target_lengths_B = recorded.target_lengths_B,
                           .num_target_tokens = recorded.target_lengths_B.sum().item<int64_t>()};
    const at::Tensor log_probs = at::log_softmax(recorded.logits_BTV.to(at::kDouble), 2);
    const at::Tensor chosen = log_probs.gather(2, labels.unsqueeze(2)).squeeze(2);
    const double expected = -(chosen * (recorded.input_BT != 0)).sum().item<double>();
    recorded.model->train();
    const double ours = std::get<1>(recorded.model->forward(batch)).item<double>();
    EXPECT_NEAR(ours, expected, kTolerance * expected) << recorded.folder;
  }
}

// ... and what is saved is what PyTorch was given.
TEST_F(RecordedLogitsTest, AModelIsWrittenAsItWas) {
  for (const Recorded& recorded : recorded_) {
    const TemporaryFolder folder;
    for (const auto& entry : fs::directory_iterator(recorded.folder)) {
      const std::string name = entry.path().filename();
      if (!name.starts_with("weights-")) continue;
      const int64_t update = std::stoll(name.substr(name.find('-') + 1));
      train::save_checkpoint(folder.path(), *recorded.model, update, recorded.metadata);
      EXPECT_EQ(read_file(folder / name), read_file(entry.path())) << entry.path();
    }
  }
}

}  // namespace recorded_logits_test
}  // namespace cohort::translate
