// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backends/mpi/mpi_types.h"

#include <algorithm>
#include <array>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include "cohort/comm/backends/mpi/mpi_thread.h"

namespace cohort::comm {
namespace {

using Op = c10d::ReduceOp::RedOpType;

struct NarrowOperations {
  MPI_Op sum = MPI_OP_NULL;
  MPI_Op product = MPI_OP_NULL;
  MPI_Op min = MPI_OP_NULL;
  MPI_Op max = MPI_OP_NULL;
};

// MPI's handles are the process's, as MPI is.
NarrowOperations half_operations;
NarrowOperations bfloat16_operations;

struct Sum {
  float operator()(float a, float b) const { return a + b; }
};
struct Product {
  float operator()(float a, float b) const { return a * b; }
};
struct Min {
  float operator()(float a, float b) const { return std::min(a, b); }
};
struct Max {
  float operator()(float a, float b) const { return std::max(a, b); }
};

template <typename Narrow, typename Combine>
void reduce_narrow(void* in, void* in_out, int* count, MPI_Datatype* /*type*/) {
  const auto* a = static_cast<const Narrow*>(in);
  auto* b = static_cast<Narrow*>(in_out);
  for (int i = 0; i < *count; ++i) b[i] = Combine{}(a[i], b[i]);
}

template <typename Narrow>
NarrowOperations make_operations() {
  constexpr int kCommutes = 1;
  NarrowOperations made;
  check_mpi(MPI_Op_create(reduce_narrow<Narrow, Sum>, kCommutes, &made.sum), "MPI_Op_create");
  check_mpi(MPI_Op_create(reduce_narrow<Narrow, Product>, kCommutes, &made.product),
            "MPI_Op_create");
  check_mpi(MPI_Op_create(reduce_narrow<Narrow, Min>, kCommutes, &made.min), "MPI_Op_create");
  check_mpi(MPI_Op_create(reduce_narrow<Narrow, Max>, kCommutes, &made.max), "MPI_Op_create");
  return made;
}

MPI_Op narrow_operation(const NarrowOperations& made, Op op) {
  switch (op) {
    case Op::SUM:
    case Op::AVG:
      return made.sum;
    case Op::PRODUCT:
      return made.product;
    case Op::MIN:
      return made.min;
    case Op::MAX:
      return made.max;
    default:
      return MPI_OP_NULL;
  }
}

MPI_Op bool_operation(Op op) {
  switch (op) {
    case Op::SUM:
    case Op::MAX:
    case Op::BOR:
      return MPI_LOR;
    case Op::PRODUCT:
    case Op::MIN:
    case Op::BAND:
      return MPI_LAND;
    case Op::BXOR:
      return MPI_LXOR;
    default:
      return MPI_OP_NULL;
  }
}

MPI_Op number_operation(Op op, bool floating) {
  switch (op) {
    case Op::SUM:
      return MPI_SUM;
    case Op::AVG:
      return floating ? MPI_SUM : MPI_OP_NULL;
    case Op::PRODUCT:
      return MPI_PROD;
    case Op::MIN:
      return MPI_MIN;
    case Op::MAX:
      return MPI_MAX;
    case Op::BAND:
      return floating ? MPI_OP_NULL : MPI_BAND;
    case Op::BOR:
      return floating ? MPI_OP_NULL : MPI_BOR;
    case Op::BXOR:
      return floating ? MPI_OP_NULL : MPI_BXOR;
    default:
      return MPI_OP_NULL;
  }
}

MpiReduction find(at::ScalarType dtype, Op op) {
  switch (dtype) {
    case at::kFloat:
      return {MPI_FLOAT, number_operation(op, true)};
    case at::kDouble:
      return {MPI_DOUBLE, number_operation(op, true)};
    case at::kHalf:
      return {MPI_UINT16_T, narrow_operation(half_operations, op)};
    case at::kBFloat16:
      return {MPI_UINT16_T, narrow_operation(bfloat16_operations, op)};
    case at::kBool:
      return {MPI_C_BOOL, bool_operation(op)};
    case at::kByte:
      return {MPI_UINT8_T, number_operation(op, false)};
    case at::kChar:
      return {MPI_INT8_T, number_operation(op, false)};
    case at::kShort:
      return {MPI_INT16_T, number_operation(op, false)};
    case at::kInt:
      return {MPI_INT32_T, number_operation(op, false)};
    case at::kLong:
      return {MPI_INT64_T, number_operation(op, false)};
    default:
      return {MPI_DATATYPE_NULL, MPI_OP_NULL};
  }
}

const char* op_name(Op op) {
  static constexpr std::array<const char*, 9> kNames{"sum",  "avg", "product", "min",       "max",
                                                     "band", "bor", "bxor",    "premul_sum"};
  return op < kNames.size() ? kNames[op] : "unknown";
}

}  // namespace

void create_narrow_operations() {
  half_operations = make_operations<c10::Half>();
  bfloat16_operations = make_operations<c10::BFloat16>();
}

MpiReduction mpi_reduction(at::ScalarType dtype, Op op) {
  const MpiReduction found = find(dtype, op);
  TORCH_CHECK_VALUE(found.type != MPI_DATATYPE_NULL,
                    "backend mpi reduces float, double, half, bfloat16, bool, uint8, int8, int16, "
                    "int32 and int64, got ",
                    c10::toString(dtype));
  TORCH_CHECK_VALUE(found.op != MPI_OP_NULL, "backend mpi has no reduction ", op_name(op), " of ",
                    c10::toString(dtype));
  return found;
}

}  // namespace cohort::comm
