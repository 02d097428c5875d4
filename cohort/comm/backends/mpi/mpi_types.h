// SPDX-License-Identifier: Apache-2.0
// Which MPI type and operation reduce tensors of a dtype. MPI knows no half and no bfloat16: their
// operations are our own.
#pragma once
#include <c10/core/ScalarType.h>
#include <mpi.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace cohort::comm {

struct MpiReduction {
  MPI_Datatype type;
  MPI_Op op;
};

/// Makes the operations on half and bfloat16. Once, on the thread that initialised MPI, before
/// mpi_reduction.
void create_narrow_operations();

/// Returns how MPI reduces `dtype` by `op`; AVG is the sum (the caller divides).
///
/// Numerics: in the dtype itself; half and bfloat16 are added in float32 and rounded after every
///           addition. bool: SUM, MAX and BOR are "or", PRODUCT, MIN and BAND are "and".
/// Threads:  any.
/// Errors:   c10::ValueError for a dtype or an operation on it that there is not.
MpiReduction mpi_reduction(at::ScalarType dtype, c10d::ReduceOp::RedOpType op);

}  // namespace cohort::comm
