// SPDX-License-Identifier: Apache-2.0
// Batch normalisation with what follows it in a ResNet: a residual that is added, and ReLU.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/nn/modules/batchnorm.h>

namespace cohort::parallel {

/// Returns relu(norm(x) + residual), as norm->forward(x).add_(residual).relu_() does; without `residual`, relu(norm(x)).
/// Parameters, running statistics and their names stay those of `norm`, also if convert_sync_batchnorm has made it span ranks.
///
/// x, residual: [B, C, H, W], of one shape, type and memory format.
/// Fused:       on the CPU in training, for float32 or bfloat16 x with torch::MemoryFormat::ChannelsLast, and a float32 `norm`
///              with parameters, running statistics and a momentum: two passes over memory in forward and two in backward,
///              where separate operations need seven or eight. Everything else uses the separate operations.
/// Collective:  as SyncBatchNorm, with the same messages whether it is fused or not.
/// Numerics:    fused, elements are computed in float32 and rounded to x's type once. Sums over the batch are float32 over 64
///              pixels and float64 over these. They do not depend on the number of threads.
/// Threads:     as `norm`: one caller at a time.
/// Errors:      as norm->forward and SyncBatchNorm; c10::ValueError from a backward with create_graph through the fused one.
/// Source:      Ioffe and Szegedy 2015, arXiv:1502.03167, algorithm 1 and section 3.
at::Tensor batch_norm_relu(torch::nn::BatchNorm2d& norm, const at::Tensor& x,
                           const at::Tensor& residual = {});

}  // namespace cohort::parallel
