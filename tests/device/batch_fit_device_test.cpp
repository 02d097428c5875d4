// SPDX-License-Identifier: Apache-2.0
// Batch sizes by the memory that a device's tensors take.
#include <gtest/gtest.h>

#include "cohort/translate/batch_fit.h"
#include "cohort/translate/layer_runner.h"

#include "tests/device/second_device.h"
#include "tests/support/aten_kernels.h"
#include "tests/support/sentences.h"

namespace cohort::translate {
namespace batch_fit_device_test {

nmt::Transformer model_on(at::Device device) {
  nmt::Transformer model(test::tiny_options(), nmt::Precision::kFloat32, device);
  model->initialise(1);
  model->train();
  set_up_layers(model, /*gradient_checkpointing=*/false);
  return model;
}

// The second device reports what was asked for, as the CPU's allocator does. They differ by a batch's
// small tensors alone: on the device the labels' places are found before forward.
TEST(BatchFitDeviceTest, TensorsTakeWhatTheyTakeOnTheCpu) {
  const test::AtenKernels same_operations;
  const comm::ProcessGroup alone(comm::RankInfo{});
  nmt::Transformer on_cpu = model_on(at::kCPU), on_device = model_on(test::second_device());
  const int64_t bytes = batch_bytes(on_cpu, 24, 12);
  EXPECT_GT(bytes, 24 * 12 * test::kVocabulary * 4) << "the logits alone";
  EXPECT_NEAR(batch_bytes(on_device, 24, 12), bytes, bytes / 100.0);
  const BatchFitOptions options{.workspace_bytes = 1 << 20, .longest = 30, .most_rows = 1000};
  const BatchFit expected = fit_batches(on_cpu, options, alone);
  const BatchFit got = fit_batches(on_device, options, alone);
  ASSERT_EQ(got.rows.size(), expected.rows.size());
  for (size_t i = 0; i < got.rows.size(); ++i)
    EXPECT_NEAR(got.rows[i], expected.rows[i], 1 + expected.rows[i] / 100.0) << i;
  EXPECT_GT(expected.rows.front(), expected.rows.back());
}

}  // namespace batch_fit_device_test
}  // namespace cohort::translate
