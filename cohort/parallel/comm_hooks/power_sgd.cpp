// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/comm_hooks/power_sgd.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "cohort/parallel/comm_hooks/all_reduce.h"

namespace cohort::parallel {
namespace {

// A gradient seen as a matrix; `offset` is its place in the bucket.
struct Block {
  int64_t offset = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t rank = 0;  // 0: sent whole
  int64_t numel() const { return rows * columns; }
};

// The bucket cut into blocks, and how much each message holds.
struct Cut {
  std::vector<Block> compressed;
  std::vector<Block> whole;
  int64_t numel_bases = 0;    // of all P
  int64_t numel_factors = 0;  // of all Q
  int64_t numel_whole = 0;
};

Block block_of(const at::Tensor& gradient, int64_t bucket_start, const PowerSgdOptions& options) {
  Block block;
  block.offset = gradient.storage_offset() - bucket_start;
  block.rows = gradient.dim() > 1 ? gradient.size(0) : 1;
  block.columns = block.rows > 0 ? gradient.numel() / block.rows : 0;
  const int64_t rank = std::min({block.rows, block.columns, options.matrix_approximation_rank});
  const auto sent = static_cast<double>((block.rows + block.columns) * rank);
  if (gradient.dim() > 1 &&
      sent * options.min_compression_rate < static_cast<double>(block.numel())) {
    block.rank = rank;
  }
  return block;
}

Cut cut_bucket(const Bucket& bucket, const PowerSgdOptions& options) {
  Cut result;
  for (const at::Tensor& gradient : bucket.gradients) {
    const Block block = block_of(gradient, bucket.buffer.storage_offset(), options);
    if (block.rank == 0) {
      result.whole.push_back(block);
      result.numel_whole += block.numel();
    } else {
      result.compressed.push_back(block);
      result.numel_bases += block.rows * block.rank;
      result.numel_factors += block.columns * block.rank;
    }
  }
  return result;
}

// Hands out consecutive matrices of one flat tensor.
class Slices {
 public:
  explicit Slices(at::Tensor flat) : flat_(std::move(flat)) {}
  at::Tensor next(int64_t rows, int64_t columns) {
    const int64_t start = std::exchange(offset_, offset_ + rows * columns);
    return flat_.narrow(0, start, rows * columns).view({rows, columns});
  }

 private:
  at::Tensor flat_;
  int64_t offset_ = 0;
};

at::Tensor view_of(const at::Tensor& buffer, const Block& block) {
  return buffer.narrow(0, block.offset, block.numel()).view({block.rows, block.columns});
}

at::Tensor orthogonal(const at::Tensor& matrix) {
  return std::get<0>(at::linalg_qr(matrix, "reduced"));
}

at::ScalarType factor_type(const at::Tensor& gradient) {
  return gradient.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// A function of (seed, iteration, bucket): nothing of a generator need be saved.
at::Tensor random_factor(int64_t numel, uint64_t seed, int64_t iteration, int64_t bucket,
                         const at::TensorOptions& options) {
  const uint64_t stream =
      (static_cast<uint64_t>(iteration) << 20) + static_cast<uint64_t>(bucket) + 1;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed * 0x9E3779B97F4A7C15ULL + stream);
  return at::randn({numel}, generator, options.device(at::kCPU)).to(options.device());
}

const at::Tensor& entry(const std::map<std::string, at::Tensor>& state, const std::string& name) {
  const auto found = state.find(name);
  TORCH_CHECK_VALUE(found != state.end(), "PowerSGD's state: expected an entry \"", name, "\"");
  return found->second;
}

// M of each compressed block, the last step's error included. A copy where that, or the type, asks
// for one.
std::vector<at::Tensor> matrices_of(const at::Tensor& buffer, const Cut& cut,
                                    const at::Tensor& error) {
  std::vector<at::Tensor> matrices;
  int64_t position = 0;
  for (const Block& block : cut.compressed) {
    at::Tensor matrix = view_of(buffer, block).to(factor_type(buffer));
    if (error.defined()) matrix = matrix + error.narrow(0, position, block.numel()).view_as(matrix);
    position += block.numel();
    matrices.push_back(std::move(matrix));
  }
  return matrices;
}

at::Tensor flat(const std::vector<at::Tensor>& matrices) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& matrix : matrices) parts.push_back(matrix.reshape({-1}));
  return at::cat(parts);
}

// Orthogonal bases P of the mean over ranks of M Q. All NaN, on every rank, where that is not
// finite.
std::vector<at::Tensor> reduced_bases(const comm::ProcessGroup& group,
                                      const std::vector<at::Tensor>& matrices,
                                      const at::Tensor& factor, const Cut& cut,
                                      at::ScalarType wire_type) {
  Slices factors(factor);
  std::vector<at::Tensor> products;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const Block& block = cut.compressed[i];
    products.push_back(
        at::matmul(matrices[i], orthogonal(factors.next(block.columns, block.rank))));
  }
  const at::Tensor message = flat(products).mul_(1.0 / group.size()).to(wire_type);
  const at::Tensor mean = wait_tensor(start_all_reduce(group, message)).to(factor.dtype());
  const bool finite = mean.isfinite().all().item<bool>();
  Slices means(mean);
  for (size_t i = 0; i < matrices.size(); ++i) {
    const Block& block = cut.compressed[i];
    const at::Tensor product = means.next(block.rows, block.rank);
    products[i] = finite ? orthogonal(product)
                         : at::full_like(product, std::numeric_limits<double>::quiet_NaN());
  }
  return products;
}

// What compression loses of this rank's M: M - P transpose(own Q), flat.
at::Tensor lost(const std::vector<at::Tensor>& matrices, const std::vector<at::Tensor>& bases,
                const std::vector<at::Tensor>& factors) {
  std::vector<at::Tensor> errors;
  for (size_t i = 0; i < matrices.size(); ++i) {
    errors.push_back(at::addmm(matrices[i], bases[i], factors[i].t(), 1, -1));
  }
  return flat(errors);
}

// [all own Q | whole gradients] / W
at::Tensor second_message(std::vector<at::Tensor> factors, const at::Tensor& buffer, const Cut& cut,
                          int world_size) {
  for (at::Tensor& factor : factors) factor = factor.mul(1.0 / world_size).to(buffer.dtype());
  for (const Block& block : cut.whole)
    factors.push_back(view_of(buffer, block).mul(1.0 / world_size));
  return flat(factors);
}

// Writes what the second message's sum says into the bucket.
void decode(at::Tensor buffer, const Cut& cut, const std::vector<at::Tensor>& bases,
            const at::Tensor& sum) {
  Slices parts(sum);
  for (size_t i = 0; i < bases.size(); ++i) {
    const Block& block = cut.compressed[i];
    const at::Tensor factor = parts.next(block.columns, block.rank).to(bases[i].dtype());
    view_of(buffer, block).copy_(at::matmul(bases[i], factor.t()));
  }
  for (const Block& block : cut.whole)
    view_of(buffer, block).copy_(parts.next(block.rows, block.columns));
}

}  // namespace

struct PowerSgdState::Impl {
  struct Memory {
    int64_t numel = 0;  // of the bucket
    at::Tensor factor;  // all Q, flat
    at::Tensor error;   // of all compressed blocks, flat
  };

  PowerSgdOptions options;
  int64_t iteration = 0;
  int64_t elements_before = 0;
  int64_t elements_after = 0;
  std::map<int64_t, Memory> memories;  // by bucket; a node stays where it is

  Memory& memory_of(const Bucket& bucket);
  at::Tensor start_factor(const Bucket& bucket, const Memory& memory, const Cut& cut) const;
};

PowerSgdState::Impl::Memory& PowerSgdState::Impl::memory_of(const Bucket& bucket) {
  Memory& memory = memories[bucket.index];
  const int64_t numel = bucket.buffer.numel();
  TORCH_CHECK_VALUE(memory.numel == 0 || memory.numel == numel, "PowerSGD: expected bucket ",
                    bucket.index, " to keep its ", memory.numel, " elements, got ", numel);
  memory.numel = numel;
  return memory;
}

at::Tensor PowerSgdState::Impl::start_factor(const Bucket& bucket, const Memory& memory,
                                             const Cut& cut) const {
  if (options.warm_start && memory.factor.defined()) return memory.factor;
  return random_factor(cut.numel_factors, options.random_seed, iteration, bucket.index,
                       bucket.buffer.options().dtype(factor_type(bucket.buffer)));
}

PowerSgdState::PowerSgdState(const PowerSgdOptions& options) : impl_(std::make_unique<Impl>()) {
  TORCH_CHECK_VALUE(options.matrix_approximation_rank >= 1,
                    "matrix_approximation_rank: expected 1 or more, got ",
                    options.matrix_approximation_rank);
  TORCH_CHECK_VALUE(options.min_compression_rate > 0,
                    "min_compression_rate: expected more than 0, got ",
                    options.min_compression_rate);
  const int64_t least = options.use_error_feedback || options.warm_start ? 2 : 0;
  TORCH_CHECK_VALUE(options.start_power_sgd_iter >= least, "start_power_sgd_iter: expected ", least,
                    " or more, got ", options.start_power_sgd_iter);
  impl_->options = options;
}

PowerSgdState::~PowerSgdState() = default;

int64_t PowerSgdState::iteration() const {
  return impl_->iteration;
}
int64_t PowerSgdState::num_elements_before() const {
  return impl_->elements_before;
}
int64_t PowerSgdState::num_elements_after() const {
  return impl_->elements_after;
}

std::map<std::string, at::Tensor> PowerSgdState::state_dict() const {
  std::map<std::string, at::Tensor> state{{"iteration", at::tensor({impl_->iteration})}};
  for (const auto& [index, memory] : impl_->memories) {
    if (!memory.factor.defined()) continue;  // its first step was not finite
    const std::string suffix = "." + std::to_string(index);
    state["numel" + suffix] = at::tensor({memory.numel});
    state["factor" + suffix] = memory.factor.clone();
    if (memory.error.defined()) state["error" + suffix] = memory.error.clone();
  }
  return state;
}

void PowerSgdState::load_state_dict(const std::map<std::string, at::Tensor>& state) {
  const int64_t iteration = entry(state, "iteration").item<int64_t>();
  std::map<int64_t, Impl::Memory> memories;
  for (const auto& [name, value] : state) {
    if (!name.starts_with("numel.")) continue;
    const std::string index = name.substr(std::string("numel.").size());
    Impl::Memory& memory = memories[std::stoll(index)];
    memory.numel = value.item<int64_t>();
    memory.factor = entry(state, "factor." + index).clone();
    if (impl_->options.use_error_feedback) memory.error = entry(state, "error." + index).clone();
  }
  impl_->iteration = iteration;
  impl_->memories = std::move(memories);
}

TensorFuture PowerSgdState::compress(const comm::ProcessGroup& group, const Bucket& bucket) {
  const Cut cut = cut_bucket(bucket, impl_->options);
  if (cut.compressed.empty()) return all_reduce_hook()(group, bucket);
  Impl::Memory& memory = impl_->memory_of(bucket);
  const at::Tensor& buffer = bucket.buffer;
  const auto matrices = matrices_of(buffer, cut, memory.error);
  const auto bases = reduced_bases(group, matrices, impl_->start_factor(bucket, memory, cut), cut,
                                   buffer.scalar_type());
  std::vector<at::Tensor> factors;
  for (size_t i = 0; i < bases.size(); ++i)
    factors.push_back(at::matmul(matrices[i].t(), bases[i]));
  impl_->elements_before += buffer.numel();
  impl_->elements_after += cut.numel_bases + cut.numel_factors + cut.numel_whole;
  at::Tensor error;
  if (impl_->options.use_error_feedback) error = lost(matrices, bases, factors);
  const at::Tensor message = second_message(std::move(factors), buffer, cut, group.size());
  return then(start_all_reduce(group, message), [buffer, cut, bases, error, &memory,
                                                 self = shared_from_this()](const at::Tensor& sum) {
    decode(buffer, cut, bases, sum);
    // Bases that are not finite make sums that are not; and these are the same on every rank.
    if (!sum.isfinite().all().item<bool>()) return buffer;
    memory.factor = sum.narrow(0, 0, cut.numel_factors).to(bases[0].dtype(), false, /*copy=*/true);
    memory.error = error;
    return buffer;
  });
}

CommHook power_sgd_hook(std::shared_ptr<PowerSgdState> state) {
  return [state = std::move(state)](const comm::ProcessGroup& group, const Bucket& bucket) {
    const at::NoGradGuard no_grad;
    TORCH_CHECK_VALUE(!bucket.buffer.is_sparse(), "PowerSGD: expected dense gradients, bucket ",
                      bucket.index, " is sparse");
    int64_t& iteration = state->impl_->iteration;
    const bool whole = iteration < state->impl_->options.start_power_sgd_iter;
    TensorFuture result = whole ? all_reduce_hook()(group, bucket) : state->compress(group, bucket);
    if (bucket.is_last) ++iteration;
    return result;
  };
}

}  // namespace cohort::parallel
