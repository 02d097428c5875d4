// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "cohort/nmt/kernels/kernels.h"

namespace cohort::test {

/// The kernels of other devices compute on the CPU, too, while this lives.
class AtenKernels {
 public:
  AtenKernels() {
    nmt::use_aten_kernels(true);
    EXPECT_FALSE(nmt::kernels_for(at::ones({1})).has_inference) << "these are the CPU's";
  }
  ~AtenKernels() { nmt::use_aten_kernels(false); }
  AtenKernels(const AtenKernels&) = delete;
  AtenKernels& operator=(const AtenKernels&) = delete;
};

}  // namespace cohort::test
