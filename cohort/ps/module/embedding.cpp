// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/module/embedding.h"

#include <algorithm>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>
#include <torch/types.h>
#include <vector>

#include "cohort/ps/module/prefetched_rows.h"

namespace cohort::ps {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// One forward's way from a batch's rows to its output: groups of ids (one id each without pooling)
// are summed, and a mean divides.
struct LookUp : torch::CustomClassHolder {
  std::shared_ptr<PrefetchedRows> rows;
  std::shared_ptr<PrefetchedRows::Batch> batch;
  bool pinned = false;  // The output is, for its copy to a device.
  int64_t group = 1;    // Ids of an output row.
  Pooling pooling = Pooling::kNone;

  size_t width() const { return static_cast<size_t>(rows->table().width); }

  // What a group's sum is multiplied with.
  float factor(std::span<const int32_t> positions) const {
    if (pooling != Pooling::kMean) return 1;
    const auto count = std::count_if(positions.begin(), positions.end(),
                                     [](int32_t position) { return position >= 0; });
    return count > 0 ? 1 / static_cast<float>(count) : 0;
  }

  template <class Visit>
  void for_each_group(Visit visit) const {
    const auto positions = batch->distinct.positions();
    const auto size = static_cast<size_t>(group);
    for (size_t row = 0; row * size < positions.size(); ++row)
      visit(row, positions.subspan(row * size, size));
  }
};

struct LookUpFunction : torch::autograd::Function<LookUpFunction> {
  // `anchor` makes autograd record the call: rows are no tensors of the graph.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& anchor,
                            const c10::intrusive_ptr<LookUp>& look_up,
                            const std::vector<int64_t>& shape) {
    (void)anchor;
    context->saved_data["look_up"] = at::IValue::make_capsule(look_up);
    return values(*look_up, shape);
  }

  static at::Tensor values(const LookUp& look_up, const std::vector<int64_t>& shape) {
    const auto options = at::TensorOptions(at::kFloat).pinned_memory(look_up.pinned);
    // No id is visited of empty groups, whose sums are 0.
    at::Tensor output = look_up.group == 0 ? at::zeros(shape, options) : at::empty(shape, options);
    float* const out = output.mutable_data_ptr<float>();
    const float* const weights = look_up.batch->weights.data();
    const size_t width = look_up.width();
    look_up.for_each_group([&](size_t row, std::span<const int32_t> positions) {
      float* const sum = out + row * width;
      if (positions.size() == 1 && positions[0] >= 0) {
        std::copy_n(weights + static_cast<size_t>(positions[0]) * width, width, sum);
        return;
      }
      std::fill_n(sum, width, 0.0f);
      for (const int32_t position : positions) {
        if (position < 0) continue;
        const float* const one = weights + static_cast<size_t>(position) * width;
        for (size_t i = 0; i < width; ++i) sum[i] += one[i];
      }
      const float factor = look_up.factor(positions);
      if (factor != 1) {
        for (size_t i = 0; i < width; ++i) sum[i] *= factor;
      }
    });
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto capsule = context->saved_data["look_up"].toCapsule();
    const auto& look_up = static_cast<const LookUp&>(*capsule);
    PrefetchedRows::Batch& batch = *look_up.batch;
    if (batch.gradients.empty()) {
      batch.gradients.assign(batch.weights.size(), 0.0f);
      look_up.rows->used().push_back(look_up.batch);
    }
    const at::Tensor gradient = gradients[0].to(at::kFloat).contiguous();
    const float* const in = gradient.const_data_ptr<float>();
    const size_t width = look_up.width();
    look_up.for_each_group([&](size_t row, std::span<const int32_t> positions) {
      const float factor = look_up.factor(positions);
      const float* const one = in + row * width;
      for (const int32_t position : positions) {
        if (position < 0) continue;
        float* const sum = batch.gradients.data() + static_cast<size_t>(position) * width;
        for (size_t i = 0; i < width; ++i) sum[i] += factor * one[i];
      }
    });
    return {at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

EmbeddingImpl::EmbeddingImpl(std::shared_ptr<PrefetchedRows> rows, int64_t width,
                             const EmbeddingOptions& options)
    : rows_(std::move(rows)), width_(width), options_(options) {}

void EmbeddingImpl::prefetch(const at::Tensor& ids) {
  rows_->prefetch(ids, options_.padding_id ? &*options_.padding_id : nullptr);
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& ids) {
  TORCH_CHECK_VALUE(options_.pooling == Pooling::kNone || ids.dim() >= 1,
                    "embedding: pooling needs ids with a dimension to pool over");
  auto look_up = c10::make_intrusive<LookUp>();
  look_up->rows = rows_;
  look_up->batch =
      rows_->look_up(ids, options_.padding_id ? &*options_.padding_id : nullptr, !is_training());
  look_up->pooling = options_.pooling;
  const bool moves = !options_.device.is_cpu();
  look_up->pinned = moves;
  std::vector<int64_t> shape = ids.sizes().vec();
  if (options_.pooling != Pooling::kNone) {
    look_up->group = shape.back();
    shape.pop_back();
  }
  shape.push_back(width_);
  const bool learns = is_training() && at::GradMode::is_enabled();
  const at::Tensor rows =
      learns ? LookUpFunction::apply(at::empty({0}).requires_grad_(), look_up, shape)
             : LookUpFunction::values(*look_up, shape);
  return moves ? rows.to(options_.device, at::kFloat, /*non_blocking=*/true) : rows;
}

}  // namespace cohort::ps
