// SPDX-License-Identifier: Apache-2.0
// Products of bfloat16 by AMX or AVX512-BF16. Of loops.cpp only, as arithmetic.h.
//
// A tile register holds 16 rows of 64 bytes. TDPBF16PS adds to a tile of 16 x 16 sums the product of 16 x 32 elements and
// 32 x 16 others, of which each two that follow along the sum lie together. A panel holds 32 rows or columns as such tiles:
// [depth / 32, 2 halves, 16, 32], so that loads are contiguous. VDPBF16PS adds to 16 sums the products of a pair of one row
// with the pairs of 16 columns, which are one line of such a tile.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18, and volume 2, VDPBF16PS.
#pragma once
#include <immintrin.h>

#include "cohort/nmt/kernels/cpu/loops.h"

namespace cohort::nmt {
namespace {

constexpr int64_t kHalf = kPanelWidth / 2;
constexpr int64_t kTileElements = kHalf * kPanelDepth;

inline __mmask32 first_of_32(int64_t count) {
  return count >= 32 ? 0xffffffffU : count <= 0 ? 0 : (1U << count) - 1;
}
inline __mmask16 first_of_16(int64_t count) {
  return static_cast<__mmask16>(first_of_32(count > 16 ? 16 : count));
}

// A matrix of 16 x 16 elements of 32 bits, in place.
inline void transpose(__m512i (&rows)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int half = 0; half < 2; ++half) {
      rows[i + 2 * half] = _mm512_unpacklo_epi64(t[i + half], t[i + half + 2]);
      rows[i + 2 * half + 1] = _mm512_unpackhi_epi64(t[i + half], t[i + half + 2]);
    }
  }
  for (int i = 0; i < 16; i += 8) {
    for (int j = i; j < i + 4; ++j) {
      t[j] = _mm512_shuffle_i32x4(rows[j], rows[j + 4], 0x88);
      t[j + 4] = _mm512_shuffle_i32x4(rows[j], rows[j + 4], 0xdd);
    }
  }
  for (int j = 0; j < 8; ++j) {
    rows[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    rows[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
}

// 16 rows x 32 elements along the sum, from (first, k) on; 0 outside of the matrix.
inline void load_rows(const MatrixBits& m, int64_t size, int64_t depth, int64_t first, int64_t k,
                      __m512i (&tile)[16]) {
  for (int i = 0; i < 16; ++i) {
    const BFloat16Bits* row = m.data + (first + i) * m.outer + k;
    tile[i] = _mm512_maskz_loadu_epi16(first + i < size ? first_of_32(depth - k) : 0, row);
  }
}

// 16 pairs along the sum x 16 columns, from (first, k) on; 0 outside of the matrix.
inline void load_pairs(const MatrixBits& m, int64_t size, int64_t depth, int64_t first, int64_t k,
                       __m512i (&tile)[16]) {
  const __mmask16 columns = first_of_16(size - first);
  for (int i = 0; i < 16; ++i) {
    const BFloat16Bits* pair = m.data + (k + 2 * i) * m.inner + first;
    const __m256i even = _mm256_maskz_loadu_epi16(k + 2 * i < depth ? columns : 0, pair);
    const __m256i odd =
        _mm256_maskz_loadu_epi16(k + 2 * i + 1 < depth ? columns : 0, pair + m.inner);
    tile[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                              _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
  }
}

// kOfRows: for tiles of the first operand, else for those of the second.
template <bool kOfRows>
void pack_panels(const MatrixBits& m, int64_t size, int64_t depth, BFloat16Bits* panels) {
  const bool contiguous = m.inner == 1;
  for (int64_t panel = 0; panel < size; panel += kPanelWidth) {
    for (int64_t k = 0; k < depth; k += kPanelDepth) {
      for (int64_t first = panel; first < panel + kPanelWidth; first += kHalf) {
        __m512i tile[16];
        if (contiguous) {
          load_rows(m, size, depth, first, k, tile);
        } else {
          load_pairs(m, size, depth, first, k, tile);
        }
        if (contiguous != kOfRows) transpose(tile);
        for (int i = 0; i < 16; ++i, panels += kPanelDepth) _mm512_storeu_si512(panels, tile[i]);
      }
    }
  }
}

#if defined(__AMX_BF16__)

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// While it lives, tile registers can be used.
struct TileRegisters {
  TileRegisters() {
    const TileConfig config;
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }
};

// Of 16 rows unless kTwo. The next panel of columns is on its way to the cache meanwhile.
template <bool kTwo>
inline void multiply_tiles(const BFloat16Bits* rows, const BFloat16Bits* columns, int64_t steps,
                           float* sums) {
  constexpr int64_t kAhead = 2 * 2 * kTileElements;
  constexpr int64_t kLine = 32;  // elements of 64 bytes
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const auto fetch = [&](int begin) {
    for (int i = begin; i < begin + 8; ++i)
      _mm_prefetch(reinterpret_cast<const char*>(columns + kAhead + i * kLine), _MM_HINT_T0);
  };
  for (int64_t s = 0; s < steps; ++s) {
    _tile_loadd(4, rows, 64);
    _tile_loadd(6, columns, 64);
    fetch(0);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwo) {
      _tile_loadd(5, rows + kTileElements, 64);
      fetch(8);
      _tile_dpbf16ps(2, 5, 6);
    }
    _tile_loadd(7, columns + kTileElements, 64);
    fetch(16);
    _tile_dpbf16ps(1, 4, 7);
    fetch(24);
    if constexpr (kTwo) _tile_dpbf16ps(3, 5, 7);
    rows += 2 * kTileElements;
    columns += 2 * kTileElements;
  }
  constexpr int64_t kStride = kPanelWidth * sizeof(float);
  _tile_stored(0, sums, kStride);
  _tile_stored(1, sums + kHalf, kStride);
  if constexpr (kTwo) {
    _tile_stored(2, sums + kHalf * kPanelWidth, kStride);
    _tile_stored(3, sums + kHalf * kPanelWidth + kHalf, kStride);
  }
}

// sums [32, 32] = a panel of rows times one of columns; of the first `num_rows` at least.
inline void multiply_panel(const BFloat16Bits* rows, int64_t num_rows, const BFloat16Bits* columns,
                           int64_t steps, float* sums) {
  if (num_rows > kHalf) {
    multiply_tiles<true>(rows, columns, steps, sums);
  } else {
    multiply_tiles<false>(rows, columns, steps, sums);
  }
}

#else

struct TileRegisters {
  TileRegisters() {}
};

inline __m512bh bf16_lanes(__m512i bits) {
  __m512bh lanes;
  __builtin_memcpy(&lanes, &bits, sizeof lanes);
  return lanes;
}

// Rows whose sums with 32 columns are in registers.
constexpr int64_t kRowsAtOnce = 8;

// sums [8, 32] = 8 rows of a panel times a panel of columns.
inline void multiply_rows(const BFloat16Bits* rows, const BFloat16Bits* columns, int64_t steps,
                          float* sums) {
  __m512 low[kRowsAtOnce], high[kRowsAtOnce];
  for (int i = 0; i < kRowsAtOnce; ++i) low[i] = high[i] = _mm512_setzero_ps();
  for (int64_t s = 0; s < steps; ++s) {
    for (int64_t pair = 0; pair < kPanelDepth / 2; ++pair) {
      const BFloat16Bits* line = columns + pair * kPanelDepth;
      const __m512bh low_columns = bf16_lanes(_mm512_loadu_si512(line));
      const __m512bh high_columns = bf16_lanes(_mm512_loadu_si512(line + kTileElements));
#pragma GCC unroll 8
      for (int i = 0; i < kRowsAtOnce; ++i) {
        int32_t bits;
        __builtin_memcpy(&bits, rows + i * kPanelDepth + 2 * pair, sizeof bits);
        const __m512bh of_row = bf16_lanes(_mm512_set1_epi32(bits));
        low[i] = _mm512_dpbf16_ps(low[i], low_columns, of_row);
        high[i] = _mm512_dpbf16_ps(high[i], high_columns, of_row);
      }
    }
    rows += 2 * kTileElements;
    columns += 2 * kTileElements;
  }
  for (int i = 0; i < kRowsAtOnce; ++i, sums += kPanelWidth) {
    _mm512_storeu_ps(sums, low[i]);
    _mm512_storeu_ps(sums + kHalf, high[i]);
  }
}

// sums [32, 32] = a panel of rows times one of columns; of the first `num_rows` at least.
inline void multiply_panel(const BFloat16Bits* rows, int64_t num_rows, const BFloat16Bits* columns,
                           int64_t steps, float* sums) {
  for (int64_t row = 0; row < num_rows && row < kPanelWidth; row += kRowsAtOnce) {
    const int64_t half = row / kHalf;
    multiply_rows(rows + half * kTileElements + (row - half * kHalf) * kPanelDepth, columns, steps,
                  sums + row * kPanelWidth);
  }
}

#endif

// The sums of the rows [row, ...) and columns [column, ...) on to where p says.
inline void finish_panel(const PanelProduct& p, int64_t row, int64_t column, const float* sums) {
  const __mmask16 low = first_of_16(p.columns - column);
  const __mmask16 high = first_of_16(p.columns - column - kHalf);
  __m512 low_bias = _mm512_setzero_ps(), high_bias = _mm512_setzero_ps();
  if (p.bias != nullptr) {
    low_bias = _mm512_maskz_loadu_ps(low, p.bias + column);
    high_bias = _mm512_maskz_loadu_ps(high, p.bias + column + kHalf);
  }
  for (int64_t i = 0; i < kPanelWidth && row + i < p.rows; ++i, sums += kPanelWidth) {
    __m512 x = _mm512_loadu_ps(sums), y = _mm512_loadu_ps(sums + kHalf);
    float* const wide = p.sums + (row + i) * p.sums_stride + column;
    if (p.add) {
      x = _mm512_add_ps(_mm512_maskz_loadu_ps(low, wide), x);
      y = _mm512_add_ps(_mm512_maskz_loadu_ps(high, wide + kHalf), y);
    }
    if (p.out == nullptr) {
      _mm512_mask_storeu_ps(wide, low, x);
      _mm512_mask_storeu_ps(wide + kHalf, high, y);
      continue;
    }
    const __m512bh rounded =
        _mm512_cvtne2ps_pbh(_mm512_add_ps(y, high_bias), _mm512_add_ps(x, low_bias));
    __m512i bits;
    __builtin_memcpy(&bits, &rounded, sizeof bits);
    _mm512_mask_storeu_epi16(p.out + (row + i) * p.out_stride + column,
                             first_of_32(p.columns - column), bits);
  }
}

void multiply_panels(const PanelProduct& p) {
  const TileRegisters registers;
  const int64_t steps = (p.depth + kPanelDepth - 1) / kPanelDepth;
  const int64_t panel = 2 * steps * kTileElements;
  alignas(64) float sums[kPanelWidth * kPanelWidth];
  for (int64_t column = 0; column < p.columns; column += kPanelWidth) {
    const BFloat16Bits* columns = p.column_panels + column / kPanelWidth * panel;
    for (int64_t row = 0; row < p.rows; row += kPanelWidth) {
      const BFloat16Bits* rows = p.row_panels + row / kPanelWidth * panel;
      multiply_panel(rows, p.rows - row, columns, steps, sums);
      finish_panel(p, row, column, sums);
    }
  }
}

}  // namespace
}  // namespace cohort::nmt
