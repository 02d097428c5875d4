// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/layer_runner.h"

#include "cohort/parallel/activation_checkpoint.h"
#include "cohort/parallel/sharding/fully_sharded_data_parallel.h"

namespace cohort::translate {

// The unit is outside: backward gathers its parameters before the body runs again.
void set_up_layers(nmt::Transformer& model, bool gradient_checkpointing) {
  nmt::DropoutStream& dropout = model->dropout_stream();
  const parallel::RandomSource where_dropout_is = [&dropout] {
    return [&dropout, there = dropout] { dropout = there; };
  };
  model->set_layer_runner([=](const torch::nn::Module& layer, const std::vector<at::Tensor>& inputs,
                              const nmt::TransformerImpl::LayerBody& body) {
    return parallel::run_unit(layer, [&] {
      if (!gradient_checkpointing) return body(inputs);
      const parallel::ActivationCheckpointOptions options{.parameters = layer.parameters(),
                                                          .preserve_rng_state = false,
                                                          .random = {where_dropout_is}};
      const auto again = [body](const std::vector<at::Tensor>& given) {
        return std::vector<at::Tensor>{body(given)};
      };
      return parallel::activation_checkpoint(again, inputs, options).front();
    });
  });
}

}  // namespace cohort::translate
