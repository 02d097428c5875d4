// SPDX-License-Identifier: Apache-2.0
// 8-bit products against sums of 64-bit whole numbers, bit for bit; and models that compute with them.
#include <ATen/Parallel.h>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/nmt/int8_matrix.h"
#include "cohort/nmt/kernels/cpu/loops.h"

namespace cohort::nmt {
namespace int8_test {

template <class Body>
void in_every_table(const Body& body) {
  for (const Loops* const* table = supported_loops(); *table != nullptr; ++table) {
    use_loops(**table);
    SCOPED_TRACE((*table)->name);
    torch::manual_seed(8);
    body();
  }
  use_loops(*supported_loops()[0]);
}

// What int8_matrix.h says, by operations of ATen.
Int8Rows plainly_quantized(const at::Tensor& rows) {
  const at::Tensor top = rows.abs().amax(1);
  return {at::round(rows * (127 / top).unsqueeze(1)).to(at::kChar), top / 127};
}

at::Tensor plain_product(const at::Tensor& x, const Int8Rows& w, const at::Tensor& bias) {
  const Int8Rows rows = plainly_quantized(x);
  // Sums of at most 2,048 products of 14 bits are exact in float64.
  const at::Tensor sums =
      at::mm(rows.values.to(at::kDouble), w.values.to(at::kDouble).t()).to(at::kFloat).contiguous();
  const at::Tensor scales = rows.scales.unsqueeze(1) * w.scales;
  if (!bias.defined()) return sums * scales;
  const at::Tensor out = at::empty_like(sums);
  for (int64_t i = 0; i < out.numel(); ++i) {
    out.mutable_data_ptr<float>()[i] =
        std::fma(sums.const_data_ptr<float>()[i], scales.const_data_ptr<float>()[i],
                 bias.const_data_ptr<float>()[i % bias.numel()]);
  }
  return out;
}

TEST(Int8MatrixTest, InEveryTableEqualsSumsOfWholeNumbers) {
  in_every_table([] {
    for (const int64_t in : {1, 3, 64, 65, 130, 2048}) {
      for (const int64_t out : {1, 15, 64, 200}) {
        const at::Tensor weight = at::randn({out, in});
        const Int8Rows rows = quantize_rows("w", weight);
        const Int8Rows expected = plainly_quantized(weight);
        EXPECT_TRUE(at::equal(rows.values, expected.values));
        EXPECT_TRUE(at::equal(rows.scales, expected.scales));
        const Int8Matrix matrix(rows);
        const at::Tensor bias = at::randn({out});
        for (const int64_t count : {1, 2, 17, 67}) {
          const at::Tensor x = 3 * at::randn({count, in});
          SCOPED_TRACE(std::to_string(count) + " rows, " + std::to_string(in) + " to " +
                       std::to_string(out));
          EXPECT_TRUE(at::equal(matrix.multiply(x, bias, 0, out), plain_product(x, rows, bias)));
          EXPECT_TRUE(at::equal(matrix.multiply(x, {}, 0, out), plain_product(x, rows, {})));
        }
      }
    }
  });
}

// Where every product is of the greatest numbers, kernels with 16-bit sums would overflow.
TEST(Int8MatrixTest, TheGreatestNumbersDoNotOverflow) {
  in_every_table([] {
    for (const int64_t in : {64, 4096, 65536}) {
      const Int8Matrix matrix(quantize_rows("w", at::cat({at::ones({1, in}), -at::ones({1, in})})));
      const at::Tensor y = matrix.multiply(at::ones({1, in}), {}, 0, 2);
      const float expected = static_cast<float>(127 * 127 * in) * ((1.0F / 127) * (1.0F / 127));
      EXPECT_EQ(y[0][0].item<float>(), expected);
      EXPECT_EQ(y[0][1].item<float>(), -expected);
    }
  });
}

TEST(Int8MatrixTest, ARowDependsOnNothingElse) {
  const int threads = at::get_num_threads();
  in_every_table([] {
    const Int8Matrix matrix(quantize_rows("w", at::randn({777, 520})));
    const at::Tensor bias = at::randn({777});
    const at::Tensor x = at::randn({10, 15, 520});
    const at::Tensor all = matrix.multiply(x, bias, 0, 777);
    ASSERT_EQ(all.sizes(), at::IntArrayRef({10, 15, 777}));
    const at::Tensor flat = x.view({150, 520}), all_flat = all.view({150, 777});
    for (const int used : {1, 3}) {
      at::set_num_threads(used);
      for (const int64_t rows : {1, 2, 3, 4, 31, 64, 65, 149}) {
        EXPECT_TRUE(at::equal(matrix.multiply(flat.narrow(0, 150 - rows, rows), bias, 0, 777),
                              all_flat.narrow(0, 150 - rows, rows)))
            << rows << " rows, " << used << " threads";
      }
      for (const auto& [first, count] :
           std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {63, 2}, {64, 64}, {100, 333}, {776, 1}})
        EXPECT_TRUE(at::equal(matrix.multiply(flat, bias.narrow(0, first, count), first, count),
                              all_flat.narrow(1, first, count)))
            << count << " from " << first;
    }
  });
  at::set_num_threads(threads);
}

TEST(Int8MatrixTest, RunsInGeneratedKernelsWhereTheProcessorHasThem) {
  if (!__builtin_cpu_supports("avx512vnni")) GTEST_SKIP() << "no AVX512-VNNI";
  EXPECT_TRUE(Int8Matrix::uses_brgemm());
}

TEST(Int8MatrixTest, RowsWithoutASizeAreNothingAndBadOnesAreNaN) {
  in_every_table([] {
    at::Tensor x = at::randn({4, 70});
    x[1] = 0;
    x[2][69] = 1e-37;
    x[2].narrow(0, 0, 69).zero_();
    x[3][33] = std::nan("");
    const Int8Matrix matrix(quantize_rows("w", at::randn({5, 70})));
    const at::Tensor y = matrix.multiply(x, {}, 0, 5);
    EXPECT_TRUE(at::isfinite(y[0]).all().item<bool>());
    EXPECT_EQ(y.narrow(0, 1, 2).count_nonzero().item<int64_t>(), 0);
    EXPECT_TRUE(at::isnan(y[3]).all().item<bool>());
    x[3][33] = -std::numeric_limits<float>::infinity();
    EXPECT_TRUE(at::isnan(matrix.multiply(x, {}, 0, 5)[3]).all().item<bool>());
  });
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return one_line(error);
  }
  return "";
}

TEST(Int8MatrixTest, BadNumbersAndShapesAreRefused) {
  at::Tensor weight = at::ones({3, 4});
  weight[2][1] = std::nan("");
  EXPECT_EQ(error_of([&] { quantize_rows("linear.weight", weight); }),
            "linear.weight: expected finite numbers, got NaN or infinity in row 2");
  const Int8Rows rows = quantize_rows("w", at::ones({3, 4}));
  EXPECT_THROW(Int8Matrix({rows.values, at::ones({4})}), c10::ValueError);
  EXPECT_THROW(Int8Matrix({rows.values.to(at::kInt), rows.scales}), c10::ValueError);
  EXPECT_THROW(Int8Matrix({at::zeros({1, 65537}, at::kChar), at::ones({1})}), c10::ValueError);
  const Int8Matrix matrix(rows);
  EXPECT_THROW(matrix.multiply(at::ones({1, 5}), {}, 0, 3), c10::ValueError);
  EXPECT_THROW(matrix.multiply(at::ones({1, 4}, at::kBFloat16), {}, 0, 3), c10::ValueError);
  EXPECT_THROW(matrix.multiply(at::ones({1, 4}), {}, 1, 3), c10::ValueError);
  EXPECT_THROW(matrix.multiply(at::ones({1, 4}), at::ones({2}), 0, 3), c10::ValueError);
}

}  // namespace int8_test
}  // namespace cohort::nmt
