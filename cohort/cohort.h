// SPDX-License-Identifier: Apache-2.0
// All of Cohort that a training program on libtorch uses: process groups, samplers, wrappers of models, optimizers,
// checkpoints. Needs the components parallel, train and data of find_package(cohort). It does without torch/torch.h, which
// takes long to read: include what your model needs of it. Parameter servers, images, text and the translator have
// headers of their own.
#pragma once
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/base/stop_request.h"
#include "cohort/comm/accelerator.h"
#include "cohort/comm/process_group.h"
#include "cohort/comm/profiler.h"
#include "cohort/data/distributed_sampler.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/exponential_average.h"
#include "cohort/optim/noam.h"
#include "cohort/parallel/activation_checkpoint.h"
#include "cohort/parallel/batch_norm_relu.h"
#include "cohort/parallel/clip_grad.h"
#include "cohort/parallel/comm_hooks/all_reduce.h"
#include "cohort/parallel/comm_hooks/compress.h"
#include "cohort/parallel/comm_hooks/local_sgd.h"
#include "cohort/parallel/comm_hooks/power_sgd.h"
#include "cohort/parallel/data_parallel.h"
#include "cohort/parallel/distributed_data_parallel.h"
#include "cohort/parallel/grad_scaler.h"
#include "cohort/parallel/join.h"
#include "cohort/parallel/mesh.h"
#include "cohort/parallel/muon.h"
#include "cohort/parallel/sharding/fully_sharded_data_parallel.h"
#include "cohort/parallel/strategy.h"
#include "cohort/parallel/sync_batch_norm.h"
#include "cohort/parallel/tensor_parallel.h"
#include "cohort/parallel/zero_redundancy_optimizer.h"
#include "cohort/train/batch_rules.h"
#include "cohort/train/checkpoint.h"
#include "cohort/train/data_loader_sampler.h"
#include "cohort/train/early_stopping.h"
#include "cohort/train/event_file.h"
#include "cohort/train/metrics.h"
#include "cohort/train/model_checkpoint.h"
#include "cohort/train/sharded_checkpoint.h"
