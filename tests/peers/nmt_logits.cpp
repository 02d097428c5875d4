// SPDX-License-Identifier: Apache-2.0
// The scores that a trained model gives to every next token of a batch, for nmt_parity.py to
// compare. Usage: nmt_logits MODEL_DIR RESULT.safetensors: "source" [B, S] and "input" [B, T] are
// ids, "logits" is [B, T, V].
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/base/safetensors.h"

#include "apps/nmt/trained_model.h"
#include "tests/support/logits.h"
#include "tests/support/sentences.h"

namespace {

using namespace cohort;

TensorView view_of(const char* name, DType type, const at::Tensor& tensor) {
  return {name,
          type,
          tensor.sizes().vec(),
          {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()}};
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("nmt_logits", [&] {
    if (argc != 3) throw ConfigError("usage: nmt_logits MODEL_DIR RESULT");
    auto [model, tokenizers] = cli::load_trained(argv[1], {}, nmt::Precision::kFloat32);
    const auto batch = test::make_test_batch(test::make_sentences(12, 1));
    const at::Tensor logits =
        test::logits_of(model, batch.source_BS, batch.source_lengths_B, batch.input_BT);
    write_safetensors(argv[2], std::vector{view_of("source", DType::kI64, batch.source_BS),
                                           view_of("input", DType::kI64, batch.input_BT),
                                           view_of("logits", DType::kF32, logits)});
    return 0;
  });
}
