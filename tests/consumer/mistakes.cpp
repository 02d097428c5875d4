// SPDX-License-Identifier: Apache-2.0
// Calls that do not compile. Before each stands what the compiler is to say of it, in a few lines; of a type it does so once.
#include <memory>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include "cohort/cohort.h"

using namespace cohort;  // NOLINT(google-build-using-namespace)
using Ddp = parallel::DistributedDataParallel<torch::nn::Linear>;
using torch::nn::Module;
using torch::optim::AdamW;

void plain_module(torch::nn::Linear& net, std::shared_ptr<Module> shared, AdamW& adamw) {
  // says: for a plain module call train::save_checkpoint(folder, *module, ...)
  checkpoint::save(net, "run");
  // says: for a plain module call train::save_checkpoint(folder, *module, ...)
  checkpoint::save(shared, adamw, "run", {.step = 3});
  // says: or train::load_checkpoint(folder, *module)
  checkpoint::load(*net, "run", {.strict = false});
}

void other_optimizer(Ddp& ddp, parallel::Muon& muon, std::unique_ptr<AdamW>& pointer) {
  // says: expected an optimizer second, no pointer: cohort::optim::Adam, torch::optim's SGD,
  checkpoint::save(ddp, muon, "run");
  // says: expected an optimizer second, no pointer: cohort::optim::Adam, torch::optim's SGD,
  auto saving = checkpoint::async_save(ddp, pointer, "run");
}

void other_order(Ddp& ddp, AdamW& adamw) {
  // says: expected (model, folder) or (model, optimizer, folder), then options
  checkpoint::save(ddp, "run", adamw);
  // says: expected (model, folder) or (model, optimizer, folder), then options
  auto saving = checkpoint::async_save(ddp, adamw);
  // says: expected a model in DistributedDataParallel, FullyShardedDataParallel or ParallelModel
  checkpoint::load("run", ddp);
}
