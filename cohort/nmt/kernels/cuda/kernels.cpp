// SPDX-License-Identifier: Apache-2.0
// By libcohort_cuda.so what it has, the rest by aten/ with its dropout. The same elements fall;
// results differ from aten/'s where a sum has another order, in the roundings of softmax and
// attention, and where cuBLAS gives a weight's gradient unrounded.
#include "cohort/nmt/kernels/kernels.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <torch/types.h>

#include "cohort/nmt/kernels/cuda/launches.h"

namespace cohort::nmt {

extern const Kernels kAtenKernels;

namespace {

// Of the object that comm::init_cuda() has loaded, if it found one.
const CudaLaunches* loaded_cuda_launches() {
  void* entry = dlsym(RTLD_DEFAULT, kCudaLaunchesEntry);
  if (entry == nullptr) return nullptr;
  const auto* found = reinterpret_cast<const CudaLaunches* (*)()>(entry)();
  TORCH_CHECK(found->version == kCudaLaunchesVersion, "libcohort_cuda.so has kernels of version ",
              found->version, ": expected version ", kCudaLaunchesVersion,
              ", that of this program; both come from one build");
  return found;
}

struct CudaLaunchesInTest {
  const CudaLaunches* launches = nullptr;
  c10::DeviceType device = c10::DeviceType::CPU;
};
CudaLaunchesInTest cuda_launches_in_test;

// Memory of x's device, and the stream there.
struct CudaPlace {
  explicit CudaPlace(const at::Tensor& x)
      : guard(x.device()), launches(*cuda_launches_for(x.device().type())) {
    if (x.is_cpu()) return;  // In a test: no stream.
    const auto* impl = c10::impl::getDeviceGuardImpl(x.device().type());
    stream = impl->getStream(x.device()).native_handle();
  }
  c10::DeviceGuard guard;
  const CudaLaunches& launches;
  void* stream = nullptr;
};

void check_launch(const char* error) {
  TORCH_CHECK(
      error == nullptr,
      "a kernel of libcohort_cuda.so was not launched, or one before it has failed: ", error);
}

ElementType element_type(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return ElementType::kFloat32;
    case at::kDouble:
      return ElementType::kFloat64;
    case at::kBFloat16:
      return ElementType::kBFloat16;
    default:
      TORCH_CHECK_VALUE(false, "expected float32, float64 or bfloat16, got ", x.dtype());
  }
}

NumberedRule numbered(const Dropping& dropping) {
  NumberedRule result{.rule = dropping.rule};
  TORCH_CHECK_NOT_IMPLEMENTED(!dropping.part.rows_N.defined(),
                              "dropout: expected all rows of the whole on CUDA, got some");
  if (dropping.part.size != dropping.part.whole) {
    result.rule.first = dropping.part.first;
    result.part_size = dropping.part.size;
    result.part_whole = dropping.part.whole;
  }
  return result;
}

// Whether there is a kernel from the one type to the other; from bfloat16 to float32 it adds.
bool has_drop(at::ScalarType from, at::ScalarType to) {
  return from == to || (from == at::kFloat && to == at::kBFloat16) ||
         (from == at::kBFloat16 && to == at::kFloat);
}

at::Tensor cuda_drop(const at::Tensor& x, at::ScalarType type, const Dropping& dropping,
                     bool relu = false, const at::Tensor& added = {}) {
  TORCH_INTERNAL_ASSERT(has_drop(x.scalar_type(), type));
  const CudaPlace place(x);
  at::Tensor out = at::empty(x.sizes(), x.options().dtype(type));
  check_launch(place.launches.drop({.in = x.const_data_ptr(),
                                    .added = added.defined() ? added.const_data_ptr() : nullptr,
                                    .out = out.mutable_data_ptr(),
                                    .in_type = element_type(x),
                                    .out_type = element_type(out),
                                    .count = x.numel(),
                                    .dropout = numbered(dropping),
                                    .relu = relu},
                                   place.stream));
  return out;
}

at::Tensor cuda_dropout(const at::Tensor& x, const Dropping& dropping) {
  return cuda_drop(x, x.scalar_type(), dropping);
}

at::Tensor cuda_add_dropout(const at::Tensor& x, const at::Tensor& y, const Dropping& dropping) {
  if (!has_drop(y.scalar_type(), x.scalar_type())) return x + cuda_dropout(y, dropping);
  return cuda_drop(y, x.scalar_type(), dropping, /*relu=*/false, x);
}

at::Tensor cuda_add_dropout_backward(const at::Tensor& grad, at::ScalarType type,
                                     const Dropping& dropping) {
  if (!has_drop(grad.scalar_type(), type)) return cuda_dropout(grad, dropping).to(type);
  return cuda_drop(grad, type, dropping);
}

at::Tensor cuda_relu_dropout(const at::Tensor& x, const Dropping& dropping) {
  return cuda_drop(x, x.scalar_type(), dropping, /*relu=*/true);
}

at::Tensor cuda_wide(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
}

// aten's of wide operands without a dropout, then the dropout with the one rounding.
template <ActivationKernels Kernels::*kActivation>
constexpr ActivationKernels kCudaActivation = {
    .forward =
        [](const at::Tensor& x, const Dropping& dropping) {
          const at::Tensor values = (kAtenKernels.*kActivation).forward(cuda_wide(x), {});
          return cuda_drop(values, x.scalar_type(), dropping);
        },
    .backward =
        [](const at::Tensor& x, const at::Tensor& grad, const Dropping& dropping) {
          const at::Tensor slopes =
              (kAtenKernels.*kActivation).backward(cuda_wide(x), cuda_wide(grad), {});
          return cuda_drop(slopes, x.scalar_type(), dropping);
        }};

at::Tensor cuda_relu_dropout_backward(const at::Tensor& out, const at::Tensor& grad, float scale) {
  const CudaPlace place(out);
  at::Tensor to = at::empty_like(grad);
  check_launch(place.launches.relu_backward({.out = out.const_data_ptr(),
                                             .grad = grad.const_data_ptr(),
                                             .to = to.mutable_data_ptr(),
                                             .type = element_type(out),
                                             .count = out.numel(),
                                             .scale = scale},
                                            place.stream));
  return to;
}

std::pair<at::Tensor, at::Tensor> cuda_softmax(const at::Tensor& scores, const SoftmaxMask& mask,
                                               const Dropping& dropping) {
  const CudaPlace place(scores);
  const at::Tensor probs = at::empty_like(scores);
  const at::Tensor dropped = dropping.rule.threshold == 0 ? at::Tensor() : at::empty_like(scores);
  check_launch(
      place.launches.softmax({.scores = scores.const_data_ptr(),
                              .probs = probs.mutable_data_ptr(),
                              .dropped = dropped.defined() ? dropped.mutable_data_ptr() : nullptr,
                              .type = element_type(scores),
                              .shape = {.batch = scores.size(0),
                                        .heads = scores.size(1),
                                        .queries = scores.size(2),
                                        .keys = scores.size(3),
                                        .key_lengths = mask.key_lengths_B.const_data_ptr<int64_t>(),
                                        .causal = mask.causal,
                                        .scale = mask.scale},
                              .dropout = numbered(dropping)},
                             place.stream));
  return {probs, dropped};
}

at::Tensor cuda_softmax_backward(const at::Tensor& probs, const at::Tensor& grad,
                                 const SoftmaxMask& mask, const Dropping& dropping) {
  const CudaPlace place(probs);
  const at::Tensor to = at::empty_like(probs);
  const int64_t keys = probs.size(-1);
  check_launch(place.launches.softmax_backward({.probs = probs.const_data_ptr(),
                                                .grad = grad.const_data_ptr(),
                                                .to = to.mutable_data_ptr(),
                                                .type = element_type(probs),
                                                .rows = keys == 0 ? 0 : probs.numel() / keys,
                                                .keys = keys,
                                                .scale = mask.scale,
                                                .dropout = numbered(dropping)},
                                               place.stream));
  return to;
}

// The kernels load two elements at once.
bool is_pair_aligned(const at::Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % sizeof(BFloat16Bits[2]) == 0;
}

bool cuda_takes_attention(const at::Tensor& x, const at::Tensor& kv, int64_t head_width) {
  return x.scalar_type() == at::kBFloat16 && head_width == kAttentionHeadWidth &&
         is_pair_aligned(x) && (!kv.defined() || is_pair_aligned(kv)) &&
         CudaPlace(x).launches.has_attention();
}

// [B, rows, D]
HeadRows head_rows(const at::Tensor& x) {
  // The stride of a dimension of one is any number.
  const int64_t stride = x.size(1) == 1 ? x.stride(0) : x.stride(1);
  TORCH_INTERNAL_ASSERT(x.stride(2) == 1 &&
                        (x.size(0) <= 1 || x.size(1) == 0 || x.stride(0) == x.size(1) * stride));
  return {.data = x.mutable_data_ptr(), .rows = x.size(1), .stride = stride};
}

SoftmaxShape shape_of(const AttentionOperands& operands, const SoftmaxMask& mask) {
  return {.batch = operands.q_BQD.size(0),
          .heads = operands.heads,
          .queries = operands.q_BQD.size(1),
          .keys = operands.k_BKD.size(1),
          .key_lengths = mask.key_lengths_B.const_data_ptr<int64_t>(),
          .causal = mask.causal,
          .scale = mask.scale};
}

std::pair<at::Tensor, at::Tensor> cuda_attention(const AttentionOperands& operands,
                                                 const SoftmaxMask& mask,
                                                 const Dropping& dropping) {
  const at::Tensor& q = operands.q_BQD;
  const CudaPlace place(q);
  const SoftmaxShape shape = shape_of(operands, mask);
  const at::Tensor out = at::empty(q.sizes(), q.options());
  const at::Tensor log_sums =
      at::empty({shape.batch, shape.heads, shape.queries}, q.options().dtype(at::kFloat));
  check_launch(place.launches.attention({.q = head_rows(q),
                                         .k = head_rows(operands.k_BKD),
                                         .v = head_rows(operands.v_BKD),
                                         .out = head_rows(out),
                                         .log_sums_BHQ = log_sums.mutable_data_ptr<float>(),
                                         .shape = shape,
                                         .dropout = numbered(dropping)},
                                        place.stream));
  return {out, log_sums};
}

void cuda_attention_backward(const AttentionOperands& operands, const at::Tensor& out,
                             const at::Tensor& log_sums, const at::Tensor& grad,
                             const SoftmaxMask& mask, const Dropping& dropping,
                             const AttentionOperands& grads) {
  const CudaPlace place(out);
  const at::Tensor dots = at::empty_like(log_sums);
  const at::Tensor grad_out = is_pair_aligned(grad) ? grad : grad.clone();
  check_launch(place.launches.attention_backward({.q = head_rows(operands.q_BQD),
                                                  .k = head_rows(operands.k_BKD),
                                                  .v = head_rows(operands.v_BKD),
                                                  .out = head_rows(out),
                                                  .grad_out = head_rows(grad_out),
                                                  .log_sums_BHQ = log_sums.const_data_ptr<float>(),
                                                  .dots_BHQ = dots.mutable_data_ptr<float>(),
                                                  .grad_q = head_rows(grads.q_BQD),
                                                  .grad_k = head_rows(grads.k_BKD),
                                                  .grad_v = head_rows(grads.v_BKD),
                                                  .shape = shape_of(operands, mask),
                                                  .dropout = numbered(dropping)},
                                                 place.stream));
}

// Unrounded where cuBLAS gives it: float32 of half types.
void cuda_product(const at::Tensor& a, const at::Tensor& b, const ProductOptions& options,
                  at::Tensor& out) {
  if (!a.is_cuda() || out.scalar_type() != at::kFloat || a.scalar_type() != at::kBFloat16)
    return kAtenKernels.product(a, b, options, out);
  if (options.add) {
    out.add_(at::mm(a, b, at::kFloat));
  } else {
    at::mm_out(out, a, b, at::kFloat);
  }
}

void cuda_cross_entropy(const at::Tensor& logits, const at::Tensor& labels, double smoothing,
                        bool with_gradient, const at::Tensor& sums) {
  const CudaPlace place(logits);
  const at::Tensor losses = at::empty({logits.size(0), 2}, sums.options());
  check_launch(place.launches.cross_entropy({.logits_NV = logits.mutable_data_ptr(),
                                             .labels_N = labels.const_data_ptr<int64_t>(),
                                             .losses_N2 = losses.mutable_data_ptr<double>(),
                                             .type = element_type(logits),
                                             .rows = logits.size(0),
                                             .columns = logits.size(1),
                                             .smoothing = smoothing,
                                             .with_gradient = with_gradient},
                                            place.stream));
  sums.add_(losses.sum(0));
}

}  // namespace

const CudaLaunches* cuda_launches_for(c10::DeviceType device) {
  const auto& [in_test, its_device] = cuda_launches_in_test;
  if (in_test != nullptr && device == its_device) return in_test;
  if (device != c10::DeviceType::CUDA) return nullptr;
  static const CudaLaunches* const loaded = loaded_cuda_launches();
  return loaded;
}

void use_cuda_launches(const CudaLaunches* launches, c10::DeviceType device) {
  cuda_launches_in_test = {launches, device};
}

extern const Kernels kCudaKernels;
const Kernels kCudaKernels = {.dropout = cuda_dropout,
                              .add_dropout = cuda_add_dropout,
                              .add_dropout_backward = cuda_add_dropout_backward,
                              .relu_dropout = cuda_relu_dropout,
                              .relu_dropout_backward = cuda_relu_dropout_backward,
                              .gelu = kCudaActivation<&Kernels::gelu>,
                              .swish = kCudaActivation<&Kernels::swish>,
                              .softmax = cuda_softmax,
                              .softmax_backward = cuda_softmax_backward,
                              .attention = {.takes = cuda_takes_attention,
                                            .forward = cuda_attention,
                                            .backward = cuda_attention_backward},
                              .product = cuda_product,
                              .cross_entropy = cuda_cross_entropy};

}  // namespace cohort::nmt
