// SPDX-License-Identifier: Apache-2.0
// Products of a step, whatever computes them here, against float64.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <limits>
#include <torch/types.h>

#include "cohort/nmt/kernels/cpu/loops.h"
#include "cohort/nmt/kernels/cpu/tile_product.h"
#include "cohort/nmt/kernels/kernels.h"

namespace cohort::nmt {
namespace product_test {

at::Tensor random_matrix(int64_t rows, int64_t columns, bool transposed) {
  return transposed ? at::randn({columns, rows}).to(at::kBFloat16).t()
                    : at::randn({rows, columns}).to(at::kBFloat16);
}

struct Shape {
  int64_t rows, columns, depth;
};
const std::vector<Shape> kShapes{{1, 1, 1},       {5, 40, 31},     {16, 32, 32},   {17, 33, 33},
                                 {70, 100, 65},   {33, 64, 1100},  {64, 20, 2200}, {3, 9000, 64},
                                 {1030, 48, 100}, {40, 1000, 1000}};

template <class Body>
void in_every_layout(const Body& body) {
  for (const auto& [rows, columns, depth] : kShapes) {
    for (const bool a_transposed : {false, true}) {
      for (const bool b_transposed : {false, true}) {
        torch::manual_seed(rows + columns + depth);
        SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(depth) + " x " +
                     std::to_string(columns) + (a_transposed ? ", a transposed" : "") +
                     (b_transposed ? ", b transposed" : ""));
        body(random_matrix(rows, depth, a_transposed), random_matrix(depth, columns, b_transposed));
      }
    }
  }
}

// `found` is rounded to bfloat16 once or twice (2^-8), of sums in float32 that add their rounding.
void expect_near(const at::Tensor& found, const at::Tensor& expected, const at::Tensor& a,
                 const at::Tensor& b) {
  const at::Tensor bound = 0x1p-7 * expected.abs() +
                           1e-6 * at::mm(a.to(at::kDouble).abs(), b.to(at::kDouble).abs()) + 1e-30;
  EXPECT_TRUE((found.to(at::kDouble) - expected).abs().le(bound).all().item<bool>())
      << (found.to(at::kDouble) - expected).abs().max().item<double>();
}

TEST(ProductTest, EveryLayoutIsFloat64s) {
  in_every_layout([](const at::Tensor& a, const at::Tensor& b) {
    const at::Tensor exact = at::mm(a.to(at::kDouble), b.to(at::kDouble));
    const Kernels& kernels = kernels_for(a);
    at::Tensor out = at::full({a.size(0), b.size(1)}, 7, at::kBFloat16);
    kernels.product(a, b, {}, out);
    expect_near(out, exact, a, b);
    const at::Tensor bias = at::randn({b.size(1)}).to(at::kBFloat16);
    kernels.product(a, b, {.bias_M = bias}, out);
    expect_near(out, exact + bias.to(at::kDouble), a, b);
    at::Tensor wide = at::full(exact.sizes(), 7, at::kFloat);
    kernels.product(a, b, {}, wide);
    expect_near(wide, exact, a, b);
    const at::Tensor before = at::randn(exact.sizes(), at::kFloat);
    wide.copy_(before);
    kernels.product(a, b, {.add = true}, wide);
    expect_near(wide - before, exact, a, b);
  });
}

// What is on either side of a row's sums reaches no other row.
TEST(ProductTest, WhatIsNotFiniteStaysInItsRowAndColumn) {
  for (const double bad :
       {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    const at::Tensor a = random_matrix(37, 50, false), b = random_matrix(50, 41, true);
    a[20][3] = bad;
    b[4][40] = bad;
    for (const at::ScalarType type : {at::kBFloat16, at::kFloat}) {
      at::Tensor out = at::empty({37, 41}, type);
      kernels_for(a).product(a, b, {}, out);
      const at::Tensor finite = out.isfinite();
      EXPECT_FALSE(finite.select(0, 20).any().item<bool>());
      EXPECT_FALSE(finite.select(1, 40).any().item<bool>());
      EXPECT_EQ(finite.sum().item<int64_t>(), 36 * 40);
    }
  }
}

TEST(ProductTest, ResultsMayLieInPartOfATensor) {
  const at::Tensor a = random_matrix(20, 64, false), b = random_matrix(64, 40, false);
  at::Tensor whole = at::full({60, 40}, 7, at::kBFloat16), alone = at::empty({20, 40}, a.options());
  at::Tensor part = whole.narrow(0, 20, 20);
  kernels_for(a).product(a, b, {}, part);
  kernels_for(a).product(a, b, {}, alone);
  EXPECT_TRUE(at::equal(part, alone));
  EXPECT_TRUE(whole.narrow(0, 0, 20).eq(7).all().item<bool>());
  EXPECT_TRUE(whole.narrow(0, 40, 20).eq(7).all().item<bool>());
}

// oneDNN's depend on both.
TEST(ProductTest, TilesGiveAnElementTheSameBitsWhateverIsBesideItAndHoweverManyThreads) {
  if (supported_loops()[0]->panels.multiply == nullptr) {
    in_every_layout([](const at::Tensor& a, const at::Tensor& b) {
      at::Tensor all = at::empty({a.size(0), b.size(1)}, at::kFloat);
      EXPECT_FALSE(multiply_by_tiles(a, b, {}, false, all));
    });
    GTEST_SKIP() << "this processor has no products of bfloat16";
  }
  const int threads = at::get_num_threads();
  in_every_layout([](const at::Tensor& a, const at::Tensor& b) {
    at::set_num_threads(1);
    at::Tensor all = at::empty({a.size(0), b.size(1)}, at::kFloat), again = at::zeros_like(all);
    const bool done = multiply_by_tiles(a, b, {}, false, all);
    ASSERT_TRUE(done);
    const at::Tensor wide_a = a.to(at::kDouble), wide_b = b.to(at::kDouble);
    const at::Tensor bound = 1e-6 * at::mm(wide_a.abs(), wide_b.abs()) + 1e-30;
    EXPECT_TRUE((all - at::mm(wide_a, wide_b)).abs().le(bound).all().item<bool>());
    at::set_num_threads(3);
    multiply_by_tiles(a, b, {}, false, again);
    EXPECT_TRUE(at::equal(again, all));
    for (const int64_t rows : {int64_t{1}, a.size(0) / 2}) {
      if (rows == 0) continue;
      at::Tensor some = at::empty({rows, b.size(1)}, at::kFloat);
      multiply_by_tiles(a.narrow(0, a.size(0) - rows, rows), b, {}, false, some);
      EXPECT_TRUE(at::equal(some, all.narrow(0, a.size(0) - rows, rows)));
    }
  });
  at::set_num_threads(threads);
}

// Of each instruction set that has them: the best one's alone are in use.
TEST(ProductTest, PanelsOfEveryTableAreFloat64s) {
  constexpr int64_t kRows = 77, kColumns = 45, kDepth = 70;
  const auto padded = [](int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; };
  const at::Tensor a = random_matrix(kRows, kDepth, false),
                   b = random_matrix(kColumns, kDepth, false);
  const auto matrix = [](const at::Tensor& m) {
    return MatrixBits{static_cast<const BFloat16Bits*>(m.const_data_ptr()), m.stride(0),
                      m.stride(1)};
  };
  const at::Tensor wide_a = a.to(at::kDouble), wide_b = b.to(at::kDouble);
  const at::Tensor bound = 1e-6 * at::mm(wide_a.abs(), wide_b.abs().t()) + 1e-30;
  for (const Loops* const* table = supported_loops(); *table != nullptr; ++table) {
    const PanelLoops& panels = (*table)->panels;
    if (panels.multiply == nullptr) continue;
    const int64_t depth = padded(kDepth, kPanelDepth);
    std::vector<BFloat16Bits> rows(static_cast<size_t>(padded(kRows, kPanelWidth) * depth));
    std::vector<BFloat16Bits> columns(static_cast<size_t>(padded(kColumns, kPanelWidth) * depth));
    panels.pack_rows(matrix(a), kRows, kDepth, rows.data());
    panels.pack_columns(matrix(b), kColumns, kDepth, columns.data());
    at::Tensor out = at::full({kRows, kColumns}, 7, at::kFloat);
    for (const double before : {0.0, 3.0}) {
      if (before != 0) out.fill_(before);
      panels.multiply({.row_panels = rows.data(),
                       .column_panels = columns.data(),
                       .rows = kRows,
                       .columns = kColumns,
                       .depth = kDepth,
                       .add = before != 0,
                       .sums = out.mutable_data_ptr<float>(),
                       .sums_stride = kColumns});
      const at::Tensor error = (out - before - at::mm(wide_a, wide_b.t())).abs();
      EXPECT_TRUE(error.le(bound + 1e-6 * before).all().item<bool>()) << (*table)->name << before;
    }
  }
}

TEST(ProductTest, AmxIsLeftOutWhereOneDnnLeavesItOut) {
  for (const char* value : {"", "DEFAULT", "all", "AVX512_CORE_AMX", "avx10_1_512_amx"})
    EXPECT_TRUE(allow_amx(value, nullptr)) << value;
  for (const char* value : {"AVX512_CORE_FP16", "avx2", "SSE41"}) {
    EXPECT_FALSE(allow_amx(value, nullptr)) << value;
    EXPECT_FALSE(allow_amx(nullptr, value)) << value;
    EXPECT_FALSE(allow_amx("", value)) << value;
    EXPECT_TRUE(allow_amx("AVX512_CORE_AMX", value)) << value;
  }
  EXPECT_TRUE(allow_amx(nullptr, nullptr));
}

}  // namespace product_test
}  // namespace cohort::nmt
