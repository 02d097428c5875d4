// SPDX-License-Identifier: Apache-2.0
// Attention of a training step in bfloat16, in functions that the host's compiler takes, too
// (arithmetic.h). No matrix of scores is stored: backward computes them again from the logarithm of
// each row's sum, as in Dao et al. 2022, arXiv:2205.14135.
//
// A warp owns 16 rows of a head, of queries or of keys, and passes over the others in tiles of 32.
// Its products are those of the instruction mma.m16n8k16: A [16, 16] times B [16, 8] is added to
// C [16, 8]. Lane 4 g + t holds of A the columns 2 t, 2 t + 1 of rows g and g + 8 and the columns
// 8 further of both; of B the rows 2 t, 2 t + 1 and those 8 further of column g; of C the columns 2 t,
// 2 t + 1 of rows g and g + 8. So two neighbouring C of scores are an A of the product with values.
#pragma once
#include "cohort/nmt/kernels/cuda/arithmetic.h"

namespace cohort::nmt {

inline constexpr int kAttentionRows = 16;  ///< Of a warp.
inline constexpr int kAttentionTile = 32;

inline constexpr int kHeadWidth = kAttentionHeadWidth;
inline constexpr int kHeadSteps = kHeadWidth / 16;   ///< Products that a row of a head takes.
inline constexpr int kHeadColumns = kHeadWidth / 8;  ///< C fragments of rows of a head.
inline constexpr int kTileSteps = kAttentionTile / 16;
inline constexpr int kTileColumns = kAttentionTile / 8;

/// Two neighbouring elements.
using BFloat16Pair = uint32_t;

COHORT_DEVICE inline BFloat16Pair pair_of(BFloat16Bits low, BFloat16Bits high) {
  return low.bits | static_cast<uint32_t>(high.bits) << 16;
}
COHORT_DEVICE inline BFloat16Pair pair_of(float low, float high) {
#ifdef __CUDA_ARCH__
#if __CUDA_ARCH__ >= 800
  BFloat16Pair pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
#endif
  BFloat16Bits bits[2];
  store(low, bits[0]);
  store(high, bits[1]);
  return pair_of(bits[0], bits[1]);
}
COHORT_DEVICE inline float low_of(BFloat16Pair pair) {
  return __builtin_bit_cast(float, pair << 16);
}
COHORT_DEVICE inline float high_of(BFloat16Pair pair) {
  return __builtin_bit_cast(float, pair & 0xffff0000U);
}

/// What a lane keeps: fragments, by the letters above. Members with two of a kind hold queries and
/// the gradient of their outputs, or keys and values, or the like.
struct AttentionLane {
  BFloat16Pair own[2][kHeadSteps][4];      ///< A
  BFloat16Pair other[2];                   ///< B
  float scores[2][kTileColumns][4];        ///< C
  BFloat16Pair weights[2][kTileSteps][4];  ///< A
  float sums[2][kHeadColumns][4];          ///< C
  float top[2], total[2], before[2];       ///< Of rows g and g + 8; before: top until this tile.
};

/// Operands of a product.
struct AttentionProduct {
  float (&c)[4];
  const BFloat16Pair (&a)[4];
  const BFloat16Pair (&b)[2];
};

/// Where a warp stands: rows from `first` on of head `head` of sentence `sentence`.
struct AttentionPlace {
  int64_t sentence, head, first;

  COHORT_DEVICE AttentionPlace(int64_t warp, int64_t heads, int64_t rows) {
    const int64_t warps = (rows + kAttentionRows - 1) / kAttentionRows;
    first = warp % warps * kAttentionRows;
    head = warp / warps % heads;
    sentence = warp / warps / heads;
  }
};

/// Row `row` of a head of a sentence, from column `column` on.
COHORT_DEVICE inline BFloat16Bits* row_of(const HeadRows& rows, const AttentionPlace& place,
                                          int64_t row, int column) {
  return static_cast<BFloat16Bits*>(rows.data) +
         ((place.sentence * rows.rows + row) * rows.stride + place.head * kHeadWidth + column);
}

/// Zeros from row `end` on.
COHORT_DEVICE inline BFloat16Pair load_pair(const HeadRows& rows, const AttentionPlace& place,
                                            int64_t end, int64_t row, int column) {
  if (row >= end) return 0;
  return *reinterpret_cast<const BFloat16Pair*>(row_of(rows, place, row, column));
}

/// Element `column` of two neighbouring rows; zeros from row `end` on.
COHORT_DEVICE inline BFloat16Pair load_column(const HeadRows& rows, const AttentionPlace& place,
                                              int64_t end, int64_t row, int column) {
  const BFloat16Bits zero{0};
  return pair_of(row < end ? *row_of(rows, place, row, column) : zero,
                 row + 1 < end ? *row_of(rows, place, row + 1, column) : zero);
}

/// How many keys query `query` sees of the `length` that its sentence has.
COHORT_DEVICE inline int64_t keys_seen(const SoftmaxShape& shape, int64_t length, int64_t query) {
  if (query >= shape.queries) return 0;
  return shape.causal && query + 1 < length ? query + 1 : length;
}

/// Keys of a place's sentence.
COHORT_DEVICE inline int64_t length_of(const SoftmaxShape& shape, const AttentionPlace& place) {
  const int64_t length = shape.key_lengths[place.sentence];
  return length < shape.keys ? length : shape.keys;
}

/// Keys that any query of a place sees.
COHORT_DEVICE inline int64_t end_of_keys(const SoftmaxShape& shape, const AttentionPlace& place) {
  const int64_t last = place.first + kAttentionRows - 1;
  return keys_seen(shape, length_of(shape, place), last < shape.queries ? last : shape.queries - 1);
}

/// Number of row (sentence, head, query) among those of the matrices of scores.
COHORT_DEVICE inline int64_t score_row(const SoftmaxShape& shape, const AttentionPlace& place,
                                       int64_t query) {
  return (place.sentence * shape.heads + place.head) * shape.queries + query;
}

/// A Warp has
///   each(body):       body(lane, AttentionLane&) for each lane; lanes exchange nothing in it;
///   multiply(select): the product of what select(AttentionLane&) names;
///   of_row(member, join): joins [2] numbers of the four lanes that share a row, on all of them.
template <class Warp>
COHORT_DEVICE inline void load_own(Warp& warp, int index, const HeadRows& rows,
                                   const AttentionPlace& place) {
  warp.each([&](int lane, AttentionLane& at) {
    const int64_t row = place.first + lane / 4;
    for (int step = 0; step < kHeadSteps; ++step) {
      const int column = 16 * step + lane % 4 * 2;
      at.own[index][step][0] = load_pair(rows, place, rows.rows, row, column);
      at.own[index][step][1] = load_pair(rows, place, rows.rows, row + 8, column);
      at.own[index][step][2] = load_pair(rows, place, rows.rows, row, column + 8);
      at.own[index][step][3] = load_pair(rows, place, rows.rows, row + 8, column + 8);
    }
  });
}

/// scores[index] = own[index] times the tile's rows before `end`, transposed.
template <class Warp>
COHORT_DEVICE inline void multiply_tile(Warp& warp, int index, const HeadRows& rows,
                                        const AttentionPlace& place, int64_t first, int64_t end) {
  for (int n = 0; n < kTileColumns; ++n) {
    warp.each([&](int, AttentionLane& at) {
      for (float& score : at.scores[index][n]) score = 0;
    });
    for (int step = 0; step < kHeadSteps; ++step) {
      warp.each([&](int lane, AttentionLane& at) {
        const int64_t row = first + 8 * n + lane / 4;
        const int column = 16 * step + lane % 4 * 2;
        at.other[0] = load_pair(rows, place, end, row, column);
        at.other[1] = load_pair(rows, place, end, row, column + 8);
      });
      warp.multiply([&](AttentionLane& at) {
        return AttentionProduct{at.scores[index][n], at.own[index][step], at.other};
      });
    }
  }
}

/// sums[index] += weights[from] times the tile's rows before `end`.
template <class Warp>
COHORT_DEVICE inline void add_tile(Warp& warp, int index, int from, const HeadRows& rows,
                                   const AttentionPlace& place, int64_t first, int64_t end) {
  for (int step = 0; step < kTileSteps; ++step) {
    for (int n = 0; n < kHeadColumns; ++n) {
      warp.each([&](int lane, AttentionLane& at) {
        const int64_t row = first + 16 * step + lane % 4 * 2;
        const int column = 8 * n + lane / 4;
        at.other[0] = load_column(rows, place, end, row, column);
        at.other[1] = load_column(rows, place, end, row + 8, column);
      });
      warp.multiply([&](AttentionLane& at) {
        return AttentionProduct{at.sums[index][n], at.weights[from][step], at.other};
      });
    }
  }
}

/// body(n, i, half, column) for a lane's scores of a tile: number i of C fragment n is of row
/// g + 8 half of the warp's and of column `column` of the tile.
template <class Body>
COHORT_DEVICE inline void for_scores(int lane, const Body& body) {
  for (int n = 0; n < kTileColumns; ++n)
    for (int i = 0; i < 4; ++i) body(n, i, i / 2, 8 * n + lane % 4 * 2 + i % 2);
}

/// Of a lane's two rows of queries in the tile of keys from `first` on: how many keys each sees there,
/// and the numbers of its first element among all scores.
struct AttentionTileRows {
  int64_t seen[2], element[2];

  COHORT_DEVICE AttentionTileRows(const SoftmaxShape& shape, const AttentionPlace& place,
                                  int64_t length, int lane, int64_t first) {
    for (int half = 0; half < 2; ++half) {
      const int64_t query = place.first + lane / 4 + 8 * half;
      seen[half] = keys_seen(shape, length, query) - first;
      element[half] = score_row(shape, place, query) * shape.keys + first;
    }
  }
};

/// A fragments of weights[index] from C fragments.
COHORT_DEVICE inline void set_weights(AttentionLane& at, int index,
                                      const float (&values)[kTileColumns][4]) {
  for (int step = 0; step < kTileSteps; ++step) {
    for (int i = 0; i < 4; ++i) {
      const float(&of)[4] = values[2 * step + i / 2];
      at.weights[index][step][i] = pair_of(of[i % 2 * 2], of[i % 2 * 2 + 1]);
    }
  }
}

COHORT_DEVICE inline void clear(float (&sums)[kHeadColumns][4]) {
  for (auto& of : sums)
    for (float& sum : of) sum = 0;
}

/// Stores sums[index] * factors(row) as the warp's own rows.
template <class Warp, class Factors>
COHORT_DEVICE inline void store_own(Warp& warp, int index, const HeadRows& rows,
                                    const AttentionPlace& place, const Factors& factors) {
  warp.each([&](int lane, AttentionLane& at) {
    for (int half = 0; half < 2; ++half) {
      const int64_t row = place.first + lane / 4 + 8 * half;
      if (row >= rows.rows) continue;
      const float factor = factors(at, half);
      for (int n = 0; n < kHeadColumns; ++n) {
        const float(&of)[4] = at.sums[index][n];
        *reinterpret_cast<BFloat16Pair*>(row_of(rows, place, row, 8 * n + lane % 4 * 2)) =
            pair_of(of[2 * half] * factor, of[2 * half + 1] * factor);
      }
    }
  });
}

/// Computes the outputs of warp `number`: some queries of a head.
template <class Warp>
COHORT_DEVICE inline void attention_warp(Warp& warp, const AttentionLaunch& launch,
                                         int64_t number) {
  const SoftmaxShape& shape = launch.shape;
  const AttentionPlace place(number, shape.heads, shape.queries);
  const int64_t length = length_of(shape, place);
  load_own(warp, 0, launch.q, place);
  warp.each([&](int, AttentionLane& at) {
    clear(at.sums[0]);
    for (int half = 0; half < 2; ++half) {
      at.top[half] = -INFINITY;
      at.total[half] = 0;
    }
  });
  const int64_t end = end_of_keys(shape, place);
  for (int64_t first = 0; first < end; first += kAttentionTile) {
    multiply_tile(warp, 0, launch.k, place, first, length);
    warp.each([&](int lane, AttentionLane& at) {
      const AttentionTileRows rows(shape, place, length, lane, first);
      at.before[0] = at.top[0];
      at.before[1] = at.top[1];
      for_scores(lane, [&](int n, int i, int half, int column) {
        float& score = at.scores[0][n][i];
        score = column < rows.seen[half] ? score * shape.scale : -INFINITY;
        at.top[half] = score > at.top[half] || score != score ? score : at.top[half];
      });
    });
    warp.of_row(&AttentionLane::top, [](float a, float b) { return b > a || b != b ? b : a; });
    warp.each([&](int lane, AttentionLane& at) {
      float factors[2];
      for (int half = 0; half < 2; ++half) {
        const bool none = at.top[half] == -INFINITY;
        factors[half] = none ? 1 : exponential(at.before[half] - at.top[half]);
        at.total[half] *= factors[half];
      }
      for (auto& of : at.sums[0])
        for (int i = 0; i < 4; ++i) of[i] *= factors[i / 2];
      const AttentionTileRows rows(shape, place, length, lane, first);
      Dropper drop(launch.dropout);  // A hash serves the two neighbours in a row.
      for_scores(lane, [&](int n, int i, int half, int column) {
        float& score = at.scores[0][n][i];
        const float weight = score == -INFINITY ? 0 : exponential(score - at.top[half]);
        at.total[half] += weight;
        score =
            launch.dropout.rule.threshold == 0 ? weight : drop(weight, rows.element[half] + column);
      });
      set_weights(at, 0, at.scores[0]);
    });
    add_tile(warp, 0, 0, launch.v, place, first, length);
  }
  warp.of_row(&AttentionLane::total, [](float a, float b) { return a + b; });
  store_own(warp, 0, launch.out, place,
            [](const AttentionLane& at, int half) { return 1 / at.total[half]; });
  warp.each([&](int lane, AttentionLane& at) {
    for (int half = 0; half < 2; ++half) {
      const int64_t query = place.first + lane / 4 + 8 * half;
      if (lane % 4 != 0 || query >= shape.queries) continue;
      launch.log_sums_BHQ[score_row(shape, place, query)] = at.top[half] + ::logf(at.total[half]);
    }
  });
}

/// Computes the gradients of the queries of warp `number`, and into launch.dots_BHQ what the keys'
/// need: the sums of grad_out times out of each row.
template <class Warp>
COHORT_DEVICE inline void attention_queries_backward_warp(Warp& warp,
                                                          const AttentionBackwardLaunch& launch,
                                                          int64_t number) {
  const SoftmaxShape& shape = launch.shape;
  const AttentionPlace place(number, shape.heads, shape.queries);
  const int64_t length = length_of(shape, place);
  load_own(warp, 0, launch.out, place);
  load_own(warp, 1, launch.grad_out, place);
  warp.each([&](int, AttentionLane& at) {
    clear(at.sums[0]);
    at.total[0] = at.total[1] = 0;
    for (int step = 0; step < kHeadSteps; ++step) {
      for (int i = 0; i < 4; ++i) {
        const BFloat16Pair a = at.own[0][step][i], b = at.own[1][step][i];
        at.total[i % 2] += low_of(a) * low_of(b) + high_of(a) * high_of(b);
      }
    }
  });
  warp.of_row(&AttentionLane::total, [](float a, float b) { return a + b; });
  load_own(warp, 0, launch.q, place);
  warp.each([&](int lane, AttentionLane& at) {
    for (int half = 0; half < 2; ++half) {
      const int64_t query = place.first + lane / 4 + 8 * half;
      const bool there = query < shape.queries;
      const int64_t row = score_row(shape, place, query);
      at.top[half] = there ? launch.log_sums_BHQ[row] : 0;
      if (there && lane % 4 == 0) launch.dots_BHQ[row] = at.total[half];
    }
  });
  const int64_t end = end_of_keys(shape, place);
  for (int64_t first = 0; first < end; first += kAttentionTile) {
    multiply_tile(warp, 0, launch.k, place, first, length);
    multiply_tile(warp, 1, launch.v, place, first, length);
    warp.each([&](int lane, AttentionLane& at) {
      const AttentionTileRows rows(shape, place, length, lane, first);
      Dropper drop(launch.dropout);
      for_scores(lane, [&](int n, int i, int half, int column) {
        float& score = at.scores[0][n][i];
        if (column >= rows.seen[half]) {
          score = 0;
          return;
        }
        const float weight = exponential(score * shape.scale - at.top[half]);
        const float slope = launch.dropout.rule.threshold == 0
                                ? at.scores[1][n][i]
                                : drop(at.scores[1][n][i], rows.element[half] + column);
        score = weight * (slope - at.total[half]);
      });
      set_weights(at, 0, at.scores[0]);
    });
    add_tile(warp, 0, 0, launch.k, place, first, length);
  }
  store_own(warp, 0, launch.grad_q, place, [&](const AttentionLane&, int) { return shape.scale; });
}

/// Computes the gradients of the keys and values of warp `number`, after all queries'.
template <class Warp>
COHORT_DEVICE inline void attention_keys_backward_warp(Warp& warp,
                                                       const AttentionBackwardLaunch& launch,
                                                       int64_t number) {
  const SoftmaxShape& shape = launch.shape;
  const AttentionPlace place(number, shape.heads, shape.keys);
  const int64_t length = length_of(shape, place);
  load_own(warp, 0, launch.k, place);
  load_own(warp, 1, launch.v, place);
  warp.each([&](int, AttentionLane& at) {
    clear(at.sums[0]);
    clear(at.sums[1]);
  });
  const int64_t begin = shape.causal ? place.first / kAttentionTile * kAttentionTile : 0;
  const int64_t end = place.first < length ? shape.queries : 0;
  for (int64_t first = begin; first < end; first += kAttentionTile) {
    multiply_tile(warp, 0, launch.q, place, first, shape.queries);
    multiply_tile(warp, 1, launch.grad_out, place, first, shape.queries);
    warp.each([&](int lane, AttentionLane& at) {
      const int64_t key = place.first + lane / 4;
      const bool drops = launch.dropout.rule.threshold != 0;
      for_scores(lane, [&](int n, int i, int half, int column) {
        const int64_t query = first + column;
        float &score = at.scores[0][n][i], &slope = at.scores[1][n][i];
        if (key + 8 * half >= keys_seen(shape, length, query)) {
          score = slope = 0;
          return;
        }
        const int64_t row = score_row(shape, place, query);
        const float weight = exponential(score * shape.scale - launch.log_sums_BHQ[row]);
        const float kept =
            drops ? Dropper(launch.dropout)(1.0F, row * shape.keys + key + 8 * half) : 1;
        score = weight * (slope * kept - launch.dots_BHQ[row]);
        slope = weight * kept;
      });
      set_weights(at, 0, at.scores[0]);
      set_weights(at, 1, at.scores[1]);
    });
    add_tile(warp, 0, 0, launch.q, place, first, shape.queries);
    add_tile(warp, 1, 1, launch.grad_out, place, first, shape.queries);
  }
  store_own(warp, 0, launch.grad_k, place, [&](const AttentionLane&, int) { return shape.scale; });
  store_own(warp, 1, launch.grad_v, place, [](const AttentionLane&, int) { return 1.0F; });
}

}  // namespace cohort::nmt
