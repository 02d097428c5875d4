// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/parameters.h"

#include <ATen/CPUGeneratorImpl.h>
#include <cmath>
#include <torch/types.h>
#include <utility>

namespace cohort::nmt {

TensorPart part_of(const std::string& name, const std::vector<int64_t>& part_shape,
                   const TransformerOptions& options,
                   const TensorParallelContext& tensor_parallel) {
  const auto is = [&](const char* word) { return name.find(word) != std::string::npos; };
  TensorPart part{.shape = part_shape};
  // `blocks` of equal length, each cut on its own.
  const auto cut = [&](int64_t dim, int64_t size, int64_t blocks = 1) {
    part.dim = dim;
    part.shape[static_cast<size_t>(dim)] = size * blocks;
    const auto [begin, end] = tensor_parallel.shard_range(size);
    for (int64_t i = 0; i < blocks; ++i) part.pieces.push_back({i * size + begin, i * size + end});
  };
  if (is("in_proj")) {
    cut(0, options.dim_emb, 3);
  } else if (is("out_proj")) {
    cut(1, options.dim_emb);
  } else if (is("linear1")) {
    cut(0, options.dim_ffn);
  } else if (is("linear2.weight")) {
    cut(1, options.dim_ffn);
  } else if (is("embedding") || is("generator")) {
    cut(0, is("source") ? options.dim_vocab_source : options.dim_vocab_target);
  } else {
    part.pieces.push_back({0, part_shape.front()});
  }
  return part;
}

Initialiser::Initialiser(const TransformerOptions& options, uint64_t seed,
                         std::shared_ptr<const TensorParallelContext> tensor_parallel)
    : options_(options),
      generator_(at::detail::createCPUGenerator(seed)),
      tensor_parallel_(std::move(tensor_parallel)) {}

void Initialiser::operator()(const std::string& name, at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  const TensorPart part = part_of(name, parameter.sizes().vec(), options_, *tensor_parallel_);
  if (part.is_whole() && parameter.is_cpu()) return draw(name, parameter);
  // On the CPU, whose generator gives the same numbers for every device.
  at::Tensor whole =
      at::empty(part.shape, parameter.options().device(at::kCPU).requires_grad(false));
  draw(name, whole);
  std::vector<at::Tensor> pieces;
  for (const auto& [begin, end] : part.pieces)
    pieces.push_back(whole.narrow(part.dim, begin, end - begin));
  parameter.copy_(at::cat(pieces, part.dim));
}

void Initialiser::draw(const std::string& name, at::Tensor& whole) {
  const auto width = static_cast<double>(options_.dim_emb);
  if (name.find("embedding") != std::string::npos) {
    whole.normal_(0, 1 / std::sqrt(width), generator_);
  } else if (name.find("in_proj") != std::string::npos) {
    const double bound = std::sqrt(6 / (2 * width));  // three square matrices, one above the other
    whole.uniform_(-bound, bound, generator_);
  } else if (whole.dim() == 2) {  // Glorot and Bengio 2010, equation 16
    const double bound = std::sqrt(6.0 / static_cast<double>(whole.size(0) + whole.size(1)));
    whole.uniform_(-bound, bound, generator_);
  } else {  // biases, and the norms' factors
    whole.fill_(name.find("norm") != std::string::npos && name.ends_with("weight") ? 1 : 0);
  }
}

}  // namespace cohort::nmt
