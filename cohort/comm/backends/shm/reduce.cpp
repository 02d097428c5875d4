// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backends/shm/reduce.h"

#include <algorithm>
#include <array>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>
#include <cmath>
#include <type_traits>

#include "cohort/base/instruction_set.h"

namespace cohort::comm {
namespace {

using Op = c10d::ReduceOp;

// Elements whose sums are in registers and in the first cache at a time.
constexpr int64_t kBlock = 512;

template <class T>
using Sum =
    std::conditional_t<std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>, float, T>;

// What becomes of a sum; none of integers.
struct Scale {
  double divisor = 1;
  double factor = 1;
  bool is_one() const { return divisor == 1 && factor == 1; }
};

template <class T>
T scaled(Sum<T> sum, Scale scale) {
  if constexpr (c10::is_complex<T>::value) {
    using Real = typename T::value_type;
    return sum * static_cast<Real>(scale.factor) / static_cast<Real>(scale.divisor);
  } else if constexpr (std::is_integral_v<T>) {
    return sum;
  } else {
    return static_cast<T>(sum * static_cast<Sum<T>>(scale.factor) /
                          static_cast<Sum<T>>(scale.divisor));
  }
}

// The sum of all inputs, scaled.
template <class T>
[[gnu::always_inline]] inline void sum_block(T* out, const std::byte* const* inputs, size_t count,
                                             int64_t begin, int64_t size, Scale scale) {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init): written before it is read
  std::array<Sum<T>, kBlock> sums;
  const T* first = reinterpret_cast<const T*>(inputs[0]) + begin;
  for (int64_t i = 0; i < size; ++i) sums[static_cast<size_t>(i)] = static_cast<Sum<T>>(first[i]);
  for (size_t rank = 1; rank < count; ++rank) {
    const T* next = reinterpret_cast<const T*>(inputs[rank]) + begin;
    for (int64_t i = 0; i < size; ++i)
      sums[static_cast<size_t>(i)] =
          static_cast<Sum<T>>(sums[static_cast<size_t>(i)] + static_cast<Sum<T>>(next[i]));
  }
  if (scale.is_one()) {
    for (int64_t i = 0; i < size; ++i)
      out[begin + i] = static_cast<T>(sums[static_cast<size_t>(i)]);
  } else {
    for (int64_t i = 0; i < size; ++i)
      out[begin + i] = scaled<T>(sums[static_cast<size_t>(i)], scale);
  }
}

template <class T>
[[gnu::always_inline]] inline void sum_all(T* out, const std::byte* const* inputs, size_t count,
                                           int64_t numel, Scale scale) {
  for (int64_t begin = 0; begin < numel; begin += kBlock)
    sum_block(out, inputs, count, begin, std::min(kBlock, numel - begin), scale);
}

#if defined(__x86_64__)
template <class T>
[[gnu::target("avx2")]] void sum_avx2(T* out, const std::byte* const* inputs, size_t count,
                                      int64_t numel, Scale scale) {
  sum_all(out, inputs, count, numel, scale);
}
#endif

template <class T>
void sum(T* out, const std::vector<const std::byte*>& inputs, int64_t numel, Scale scale) {
#if defined(__x86_64__)
  if (instruction_set() >= InstructionSet::kAvx2)
    return sum_avx2(out, inputs.data(), inputs.size(), numel, scale);
#endif
  sum_all(out, inputs.data(), inputs.size(), numel, scale);
}

template <class T>
bool is_nan(T value) {
  if constexpr (std::is_integral_v<T>) {
    return false;
  } else {
    return std::isnan(static_cast<double>(value));
  }
}

template <class T>
T combined(Op::RedOpType op, T a, T b) {
  switch (op) {
    case Op::PRODUCT:
      return static_cast<T>(a * b);
    case Op::MIN:
      return is_nan(a) || (!is_nan(b) && a < b) ? a : b;
    case Op::MAX:
      return is_nan(a) || (!is_nan(b) && b < a) ? a : b;
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == Op::BAND) return static_cast<T>(a & b);
    if (op == Op::BOR) return static_cast<T>(a | b);
    if (op == Op::BXOR) return static_cast<T>(a ^ b);
  }
  return a;
}

template <class T>
void combine(Op::RedOpType op, T* out, const std::vector<const std::byte*>& inputs, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    auto value = static_cast<Sum<T>>(reinterpret_cast<const T*>(inputs[0])[i]);
    for (size_t rank = 1; rank < inputs.size(); ++rank)
      value = combined<Sum<T>>(op, value,
                               static_cast<Sum<T>>(reinterpret_cast<const T*>(inputs[rank])[i]));
    out[i] = static_cast<T>(value);
  }
}

Scale scale_of(const Reduction& reduction) {
  return {.divisor = reduction.divisor, .factor = reduction.factor};
}

bool is_sum(Op::RedOpType op) {
  return op == Op::SUM || op == Op::AVG || op == Op::PREMUL_SUM;
}

template <class T>
void reduce_real(const Reduction& reduction, void* out, const std::vector<const std::byte*>& inputs,
                 int64_t numel) {
  if (is_sum(reduction.op)) return sum(static_cast<T*>(out), inputs, numel, scale_of(reduction));
  combine(reduction.op, static_cast<T*>(out), inputs, numel);
}

// Sums and products of complex numbers alone have a meaning.
template <class T>
void reduce_complex(const Reduction& reduction, void* out,
                    const std::vector<const std::byte*>& inputs, int64_t numel) {
  if (is_sum(reduction.op)) return sum(static_cast<T*>(out), inputs, numel, scale_of(reduction));
  for (int64_t i = 0; i < numel; ++i) {
    T value = reinterpret_cast<const T*>(inputs[0])[i];
    for (size_t rank = 1; rank < inputs.size(); ++rank)
      value *= reinterpret_cast<const T*>(inputs[rank])[i];
    static_cast<T*>(out)[i] = value;
  }
}

// "Or" and "and" of 0 and 1, as c10d has them.
Op::RedOpType of_bool(Op::RedOpType op) {
  return op == Op::SUM ? Op::BOR : op == Op::PRODUCT ? Op::BAND : op;
}

bool is_known(c10::ScalarType type) {
  constexpr std::array kKnown{
      c10::ScalarType::Float, c10::ScalarType::Double,       c10::ScalarType::BFloat16,
      c10::ScalarType::Half,  c10::ScalarType::Bool,         c10::ScalarType::Byte,
      c10::ScalarType::Char,  c10::ScalarType::Short,        c10::ScalarType::Int,
      c10::ScalarType::Long,  c10::ScalarType::ComplexFloat, c10::ScalarType::ComplexDouble};
  return std::ranges::find(kKnown, type) != kKnown.end();
}

void check_type(Op::RedOpType op, c10::ScalarType type) {
  const bool bitwise = op == Op::BAND || op == Op::BOR || op == Op::BXOR;
  const bool scales = op == Op::AVG || op == Op::PREMUL_SUM;
  const bool orders = op == Op::MIN || op == Op::MAX;
  const bool floating = c10::isFloatingType(type);
  const bool complex = c10::isComplexType(type);
  TORCH_CHECK_VALUE(is_known(type), "shm: ", type, " cannot be reduced");
  TORCH_CHECK_VALUE(op < Op::UNUSED, "shm: expected a known reduction, got ", int{op});
  TORCH_CHECK_VALUE(!bitwise || !(floating || complex),
                    "shm: expected integers or bool for a bitwise reduction, got ", type);
  TORCH_CHECK_VALUE(!scales || floating || complex,
                    "shm: expected a floating type for AVG and PREMUL_SUM, got ", type);
  TORCH_CHECK_VALUE(!orders || !complex, "shm: complex numbers have no minimum or maximum");
}

double factor_of(const c10d::ReduceOp& op) {
  if (op.op_ != Op::PREMUL_SUM) return 1;
  const auto* premul = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(premul != nullptr && !premul->tensor_factor.defined(),
                    "shm: expected a number as the factor of PREMUL_SUM");
  return premul->double_factor;
}

}  // namespace

Reduction reduction_of(const c10d::ReduceOp& op, c10::ScalarType type, int world_size) {
  check_type(op.op_, type);
  return {.op = type == c10::ScalarType::Bool ? of_bool(op.op_) : op.op_,
          .divisor = op.op_ == Op::AVG ? world_size : 1.0,
          .factor = factor_of(op),
          .type = type};
}

void reduce(const Reduction& reduction, void* out, const std::vector<const std::byte*>& inputs,
            int64_t numel) {
  switch (reduction.type) {
    case c10::ScalarType::Float:
      return reduce_real<float>(reduction, out, inputs, numel);
    case c10::ScalarType::Double:
      return reduce_real<double>(reduction, out, inputs, numel);
    case c10::ScalarType::BFloat16:
      return reduce_real<c10::BFloat16>(reduction, out, inputs, numel);
    case c10::ScalarType::Half:
      return reduce_real<c10::Half>(reduction, out, inputs, numel);
    case c10::ScalarType::Bool:
    case c10::ScalarType::Byte:
      return reduce_real<uint8_t>(reduction, out, inputs, numel);
    case c10::ScalarType::Char:
      return reduce_real<int8_t>(reduction, out, inputs, numel);
    case c10::ScalarType::Short:
      return reduce_real<int16_t>(reduction, out, inputs, numel);
    case c10::ScalarType::Int:
      return reduce_real<int32_t>(reduction, out, inputs, numel);
    case c10::ScalarType::Long:
      return reduce_real<int64_t>(reduction, out, inputs, numel);
    case c10::ScalarType::ComplexFloat:
      return reduce_complex<c10::complex<float>>(reduction, out, inputs, numel);
    case c10::ScalarType::ComplexDouble:
      return reduce_complex<c10::complex<double>>(reduction, out, inputs, numel);
    default:
      TORCH_CHECK_VALUE(false, "shm: ", reduction.type, " cannot be reduced");
  }
}

}  // namespace cohort::comm
