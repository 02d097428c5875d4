// SPDX-License-Identifier: Apache-2.0
// Products with float32 weights that are packed in blocks of columns. Of loops.cpp alone, as arithmetic.h.
#pragma once
#include "cohort/nmt/kernels/cpu/loops.h"

namespace cohort::nmt {
namespace {

// A tile's sums stay in registers: `kTileRows` rows of two. Two more hold a row of the block, one an element of x.
#if defined(__AVX512F__)
constexpr int64_t kFloatLanes = 16;
constexpr int kTileRows = 12;
#elif defined(__AVX2__)
constexpr int64_t kFloatLanes = 8;
constexpr int kTileRows = 6;
#else
constexpr int64_t kFloatLanes = 4;
constexpr int kTileRows = 6;
#endif
constexpr int kVectors = 2;
constexpr int64_t kTileColumns = kVectors * kFloatLanes;
static_assert(kPackedColumns % kTileColumns == 0);

using Floats __attribute__((vector_size(kFloatLanes * sizeof(float)))) = float;

// The rows [first_row, first_row + kRows) of x, the block's columns [first, first + kTileColumns). Each sum adds its
// products one by one in the order of depth, whatever kRows is.
template <int kRows>
void product_tile(const PackedProduct& p, int64_t first_row, int64_t first) {
  Floats sums[kRows][kVectors] = {};
  const float* x = p.x + first_row * p.depth;
  const float* block = p.block + first;
  for (int64_t k = 0; k < p.depth; ++k) {
    __builtin_prefetch(block + (p.depth + k) * kPackedColumns, 0, 2);
    if constexpr (kTileColumns == 32)
      __builtin_prefetch(block + (p.depth + k) * kPackedColumns + 16, 0, 2);
    Floats w[kVectors];
    for (int v = 0; v < kVectors; ++v)
      __builtin_memcpy(&w[v], block + k * kPackedColumns + v * kFloatLanes, sizeof w[v]);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Floats element = x[r * p.depth + k] - Floats{};
      for (int v = 0; v < kVectors; ++v) sums[r][v] += element * w[v];
    }
  }
  const int64_t columns = p.columns - first < kTileColumns ? p.columns - first : kTileColumns;
  Floats bias[kVectors] = {};
  if (p.bias != nullptr)
    __builtin_memcpy(bias, p.bias + first, static_cast<uint64_t>(columns) * sizeof(float));
  for (int r = 0; r < kRows; ++r) {
    Floats row[kVectors];
    for (int v = 0; v < kVectors; ++v) row[v] = sums[r][v] + bias[v];
    __builtin_memcpy(p.out + (first_row + r) * p.out_stride + first, row,
                     static_cast<uint64_t>(columns) * sizeof(float));
  }
}

// Calls product_tile<rows>.
template <int kRows = kTileRows>
inline void product_tile_of(int64_t rows, const PackedProduct& p, int64_t first_row,
                            int64_t first) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return product_tile_of<kRows - 1>(rows, p, first_row, first);
  }
  product_tile<kRows>(p, first_row, first);
}

inline void packed_product(const PackedProduct& p) {
  // Tiles of nearly equal heights: a tile of few rows takes nearly as long as a full one.
  const int64_t tiles = (p.rows + kTileRows - 1) / kTileRows;
  for (int64_t first = 0; first < p.columns; first += kTileColumns) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t begin = tile * p.rows / tiles;
      product_tile_of((tile + 1) * p.rows / tiles - begin, p, begin, first);
    }
  }
}

}  // namespace
}  // namespace cohort::nmt
