// SPDX-License-Identifier: Apache-2.0
// Attention of a training step, in functions that the host's compiler takes, too (arithmetic.h). No
// matrix of scores is stored: backward computes them again from the logarithm of each row's sum.
// A block of threads owns rows (queries or keys) of a head and passes over the others in tiles.
//
// The scores of a warp's rows with a tile have a row of the tile on each lane, and the rows of what
// they sum up to have two columns on each: registers hold both, shared memory carries the scores
// from the one to the other.
#pragma once
#include "cohort/nmt/kernels/cuda/arithmetic.h"

namespace cohort::nmt {

inline constexpr int kAttentionWarps = 4;
inline constexpr int kAttentionOwn = 8;  ///< Rows of a warp.
inline constexpr int kAttentionRows = kAttentionWarps * kAttentionOwn;
inline constexpr int kAttentionTile = 32;  ///< Rows of a tile: a lane for each.
inline constexpr int kHeadWidth = kAttentionHeadWidth;
inline constexpr int kHeadColumns = kHeadWidth / kAttentionTile;  ///< Of a lane.

/// Numbers of a warp's rows with a tile's, the rows of one lane's together.
struct AttentionScores {
  alignas(16) float of[kAttentionTile][kAttentionOwn];
};

/// What the threads of a block share.
struct AttentionShared {
  alignas(16) float tile[2][kAttentionTile]
                        [kHeadWidth + 1];  // A column more: no two lanes in one bank.
  struct Warp {
    alignas(16) float rows[2][kHeadWidth][kAttentionOwn];  // Its own, by columns.
    AttentionScores scores[2];
    float top[kAttentionOwn], factor[kAttentionOwn], sum[kAttentionOwn];
  } warps[kAttentionWarps];
};

/// What a thread keeps.
struct AttentionThread {
  float scores[kAttentionOwn];
  float sums[2][kAttentionOwn][kHeadColumns];
};

/// Where a block stands: rows from `first` on of head `head` of sentence `sentence`.
struct AttentionPlace {
  int64_t sentence, head, first;

  COHORT_DEVICE AttentionPlace(int64_t block, int64_t heads, int64_t rows) {
    const int64_t blocks = (rows + kAttentionRows - 1) / kAttentionRows;
    first = block % blocks * kAttentionRows;
    head = block / blocks % heads;
    sentence = block / blocks / heads;
  }
};

/// Row `row` of a head of a sentence.
template <class T>
COHORT_DEVICE inline T* row_of(const HeadRows& rows, const AttentionPlace& place, int64_t row) {
  return static_cast<T*>(rows.data) +
         ((place.sentence * rows.rows + row) * rows.stride + place.head * kHeadWidth);
}

/// How many keys query `query` sees.
COHORT_DEVICE inline int64_t keys_seen(const SoftmaxShape& shape, int64_t sentence, int64_t query) {
  int64_t seen = shape.key_lengths[sentence];
  if (seen > shape.keys) seen = shape.keys;
  if (shape.causal && query + 1 < seen) seen = query + 1;
  return query < shape.queries ? seen : 0;
}

/// A block has
///   shared():        AttentionShared of the block;
///   all(body):       body(warp, lane, AttentionThread&) on each thread; all have ended before
///                    anything that follows begins;
///   of_warps(body):  likewise, but what follows on a warp waits for that warp alone.
template <class T, class Block>
COHORT_DEVICE inline void load_tile(Block& block, int index, const HeadRows& rows,
                                    const AttentionPlace& place, int64_t first) {
  block.all([&](int warp, int lane, AttentionThread&) {
    for (int row = warp; row < kAttentionTile; row += kAttentionWarps) {
      const bool there = first + row < rows.rows;
      const T* from = there ? row_of<const T>(rows, place, first + row) : nullptr;
      for (int column = lane; column < kHeadWidth; column += kAttentionTile)
        block.shared().tile[index][row][column] = there ? wide(from[column]) : 0;
    }
  });
}

/// The block's own rows, each warp's to itself.
template <class T, class Block>
COHORT_DEVICE inline void load_own(Block& block, int index, const HeadRows& rows,
                                   const AttentionPlace& place) {
  block.of_warps([&](int warp, int lane, AttentionThread&) {
    for (int i = 0; i < kAttentionOwn; ++i) {
      const int64_t row = place.first + warp * kAttentionOwn + i;
      const bool there = row < rows.rows;
      const T* from = there ? row_of<const T>(rows, place, row) : nullptr;
      for (int column = lane; column < kHeadWidth; column += kAttentionTile)
        block.shared().warps[warp].rows[index][column][i] = there ? wide(from[column]) : 0;
    }
  });
}

/// Products of the warp's own rows with this lane's row of the tile.
COHORT_DEVICE inline void multiply(const AttentionShared& shared, int index, int warp, int lane,
                                   float (&products)[kAttentionOwn]) {
  for (float& product : products) product = 0;
  for (int column = 0; column < kHeadWidth; ++column) {
    const float other = shared.tile[index][lane][column];
    for (int i = 0; i < kAttentionOwn; ++i)
      products[i] += shared.warps[warp].rows[index][column][i] * other;
  }
}

/// sums += scores times the tile, in this lane's columns.
COHORT_DEVICE inline void add_weighted(const AttentionShared& shared, int index, int lane,
                                       const AttentionScores& scores,
                                       float (&sums)[kAttentionOwn][kHeadColumns]) {
  for (int row = 0; row < kAttentionTile; ++row) {
    for (int c = 0; c < kHeadColumns; ++c) {
      const float other = shared.tile[index][row][lane + c * kAttentionTile];
      for (int i = 0; i < kAttentionOwn; ++i) sums[i][c] += scores.of[row][i] * other;
    }
  }
}

/// Stores sums[i] / divisors[i], or the sums, as the block's own rows.
template <class T, class Block>
COHORT_DEVICE inline void store_own(Block& block, int index, const HeadRows& rows,
                                    const AttentionPlace& place, bool divide) {
  block.of_warps([&](int warp, int lane, AttentionThread& thread) {
    for (int i = 0; i < kAttentionOwn; ++i) {
      const int64_t row = place.first + warp * kAttentionOwn + i;
      if (row >= rows.rows) continue;
      const float divisor = divide ? block.shared().warps[warp].sum[i] : 1;
      for (int c = 0; c < kHeadColumns; ++c) {
        store(thread.sums[index][i][c] / divisor,
              row_of<T>(rows, place, row)[lane + c * kAttentionTile]);
      }
    }
  });
}

COHORT_DEVICE inline void clear(AttentionThread& thread) {
  for (auto& of_index : thread.sums)
    for (auto& of_row : of_index)
      for (float& sum : of_row) sum = 0;
}

/// Number of row (sentence, head, query) among those of the matrices of scores.
COHORT_DEVICE inline int64_t score_row(const SoftmaxShape& shape, const AttentionPlace& place,
                                       int64_t query) {
  return (place.sentence * shape.heads + place.head) * shape.queries + query;
}

/// Computes the outputs of block `index`: some queries of a head.
template <class T, class Block>
COHORT_DEVICE inline void attention_block(Block& block, const AttentionLaunch& launch,
                                          int64_t index) {
  const SoftmaxShape& shape = launch.shape;
  const AttentionPlace place(index, shape.heads, shape.queries);
  load_own<T>(block, 0, launch.q, place);
  block.of_warps([&](int warp, int lane, AttentionThread& thread) {
    clear(thread);
    if (lane >= kAttentionOwn) return;
    block.shared().warps[warp].top[lane] = -INFINITY;
    block.shared().warps[warp].sum[lane] = 0;
  });
  const int64_t end =
      keys_seen(shape, place.sentence,
                place.first + kAttentionRows < shape.queries ? place.first + kAttentionRows - 1
                                                             : shape.queries - 1);
  for (int64_t first = 0; first < end; first += kAttentionTile) {
    load_tile<T>(block, 0, launch.k, place, first);
    load_tile<T>(block, 1, launch.v, place, first);
    block.of_warps([&](int warp, int lane, AttentionThread& thread) {
      multiply(block.shared(), 0, warp, lane, thread.scores);
      for (int i = 0; i < kAttentionOwn; ++i) {
        const int64_t query = place.first + warp * kAttentionOwn + i;
        const bool seen = first + lane < keys_seen(shape, place.sentence, query);
        thread.scores[i] = seen ? thread.scores[i] * shape.scale : -INFINITY;
        block.shared().warps[warp].scores[0].of[lane][i] = thread.scores[i];
      }
    });
    block.of_warps([&](int warp, int lane, AttentionThread&) {
      if (lane >= kAttentionOwn) return;
      auto& own = block.shared().warps[warp];
      float top = own.top[lane];
      for (const auto& row : own.scores[0].of)
        top = row[lane] > top || row[lane] != row[lane] ? row[lane] : top;
      const bool none = top == -INFINITY;
      own.factor[lane] = none ? 1 : exponential(own.top[lane] - top);
      own.top[lane] = top;
    });
    block.of_warps([&](int warp, int lane, AttentionThread& thread) {
      auto& own = block.shared().warps[warp];
      for (int i = 0; i < kAttentionOwn; ++i) {
        const bool seen = thread.scores[i] != -INFINITY;
        const float weight = seen ? exponential(thread.scores[i] - own.top[i]) : 0;
        own.scores[0].of[lane][i] = weight;
        Dropper drop(launch.dropout);
        const int64_t row = score_row(shape, place, place.first + warp * kAttentionOwn + i);
        own.scores[1].of[lane][i] = launch.dropout.rule.threshold == 0
                                        ? weight
                                        : drop(weight, row * shape.keys + first + lane);
      }
    });
    block.all([&](int warp, int lane, AttentionThread& thread) {
      auto& own = block.shared().warps[warp];
      if (lane < kAttentionOwn) {
        float sum = own.sum[lane] * own.factor[lane];
        for (const auto& row : own.scores[0].of) sum += row[lane];
        own.sum[lane] = sum;
      }
      for (int i = 0; i < kAttentionOwn; ++i)
        for (float& sum : thread.sums[0][i]) sum *= own.factor[i];
      add_weighted(block.shared(), 1, lane, own.scores[1], thread.sums[0]);
    });
  }
  store_own<T>(block, 0, launch.out, place, /*divide=*/true);
  block.of_warps([&](int warp, int lane, AttentionThread&) {
    const int64_t query = place.first + warp * kAttentionOwn + lane;
    if (lane >= kAttentionOwn || query >= shape.queries) return;
    const auto& own = block.shared().warps[warp];
    launch.log_sums_BHQ[score_row(shape, place, query)] = own.top[lane] + ::logf(own.sum[lane]);
  });
}

/// Computes the gradients of the queries of block `index`, and their rows' share of the slopes of the
/// keys' scores, into launch.dots_BHQ.
template <class T, class Block>
COHORT_DEVICE inline void attention_queries_backward_block(Block& block,
                                                           const AttentionBackwardLaunch& launch,
                                                           int64_t index) {
  const SoftmaxShape& shape = launch.shape;
  const AttentionPlace place(index, shape.heads, shape.queries);
  load_own<T>(block, 0, launch.q, place);
  load_own<T>(block, 1, launch.grad_out, place);
  block.of_warps([&](int warp, int lane, AttentionThread& thread) {
    clear(thread);
    auto& own = block.shared().warps[warp];
    for (int i = 0; i < kAttentionOwn; ++i) {
      const int64_t query = place.first + warp * kAttentionOwn + i;
      float dot = 0;
      for (int column = lane; column < kHeadWidth && query < shape.queries;
           column += kAttentionTile) {
        dot += own.rows[1][column][i] * wide(row_of<const T>(launch.out, place, query)[column]);
      }
      own.scores[0].of[lane][i] = dot;
    }
  });
  block.of_warps([&](int warp, int lane, AttentionThread&) {
    const int64_t query = place.first + warp * kAttentionOwn + lane;
    if (lane >= kAttentionOwn) return;
    auto& own = block.shared().warps[warp];
    own.top[lane] = own.sum[lane] = 0;
    if (query >= shape.queries) return;
    for (const auto& row : own.scores[0].of) own.sum[lane] += row[lane];
    own.top[lane] = launch.log_sums_BHQ[score_row(shape, place, query)];
    launch.dots_BHQ[score_row(shape, place, query)] = own.sum[lane];
  });
  const int64_t end =
      keys_seen(shape, place.sentence,
                place.first + kAttentionRows < shape.queries ? place.first + kAttentionRows - 1
                                                             : shape.queries - 1);
  for (int64_t first = 0; first < end; first += kAttentionTile) {
    load_tile<T>(block, 0, launch.k, place, first);
    load_tile<T>(block, 1, launch.v, place, first);
    block.of_warps([&](int warp, int lane, AttentionThread& thread) {
      auto& own = block.shared().warps[warp];
      float slopes[kAttentionOwn];
      multiply(block.shared(), 0, warp, lane, thread.scores);
      multiply(block.shared(), 1, warp, lane, slopes);
      for (int i = 0; i < kAttentionOwn; ++i) {
        const int64_t query = place.first + warp * kAttentionOwn + i;
        const bool seen = first + lane < keys_seen(shape, place.sentence, query);
        const float weight = seen ? exponential(thread.scores[i] * shape.scale - own.top[i]) : 0;
        Dropper drop(launch.dropout);
        const float slope =
            launch.dropout.rule.threshold == 0
                ? slopes[i]
                : drop(slopes[i], score_row(shape, place, query) * shape.keys + first + lane);
        own.scores[0].of[lane][i] = weight * (slope - own.sum[i]) * shape.scale;
      }
    });
    block.all([&](int warp, int lane, AttentionThread& thread) {
      add_weighted(block.shared(), 0, lane, block.shared().warps[warp].scores[0], thread.sums[0]);
    });
  }
  store_own<T>(block, 0, launch.grad_q, place, /*divide=*/false);
}

/// Computes the gradients of the keys and values of block `index`, after all queries'.
template <class T, class Block>
COHORT_DEVICE inline void attention_keys_backward_block(Block& block,
                                                        const AttentionBackwardLaunch& launch,
                                                        int64_t index) {
  const SoftmaxShape& shape = launch.shape;
  const AttentionPlace place(index, shape.heads, shape.keys);
  load_own<T>(block, 0, launch.k, place);
  load_own<T>(block, 1, launch.v, place);
  block.of_warps([&](int, int, AttentionThread& thread) { clear(thread); });
  const bool seen_by_any = place.first < keys_seen(shape, place.sentence, shape.queries - 1);
  const int64_t begin = shape.causal ? place.first / kAttentionTile * kAttentionTile : int64_t{0};
  const int64_t end = seen_by_any ? shape.queries : 0;
  for (int64_t first = begin; first < end; first += kAttentionTile) {
    load_tile<T>(block, 0, launch.q, place, first);
    load_tile<T>(block, 1, launch.grad_out, place, first);
    block.of_warps([&](int warp, int lane, AttentionThread& thread) {
      auto& own = block.shared().warps[warp];
      float slopes[kAttentionOwn];
      multiply(block.shared(), 0, warp, lane, thread.scores);
      multiply(block.shared(), 1, warp, lane, slopes);
      const int64_t query = first + lane;
      const int64_t seen = keys_seen(shape, place.sentence, query);
      const int64_t row = query < shape.queries ? score_row(shape, place, query) : 0;
      const float log_sum = launch.log_sums_BHQ[row], dot = launch.dots_BHQ[row];
      Dropper drop_weight(launch.dropout), drop_slope(launch.dropout);
      for (int i = 0; i < kAttentionOwn; ++i) {
        const int64_t key = place.first + warp * kAttentionOwn + i;
        const float weight = key < seen ? exponential(thread.scores[i] * shape.scale - log_sum) : 0;
        const bool drops = launch.dropout.rule.threshold != 0;
        const float slope = drops ? drop_slope(slopes[i], row * shape.keys + key) : slopes[i];
        own.scores[0].of[lane][i] = weight * (slope - dot) * shape.scale;
        own.scores[1].of[lane][i] = drops ? drop_weight(weight, row * shape.keys + key) : weight;
      }
    });
    block.all([&](int warp, int lane, AttentionThread& thread) {
      const auto& own = block.shared().warps[warp];
      add_weighted(block.shared(), 0, lane, own.scores[0], thread.sums[0]);
      add_weighted(block.shared(), 1, lane, own.scores[1], thread.sums[1]);
    });
  }
  store_own<T>(block, 0, launch.grad_k, place, /*divide=*/false);
  store_own<T>(block, 1, launch.grad_v, place, /*divide=*/false);
}

}  // namespace cohort::nmt
