// SPDX-License-Identifier: Apache-2.0
// Attention of one head of one sentence, forward and backward. Of loops.cpp alone, as arithmetic.h.
//
// Operands are widened to what sums run in, in scratch that fits the nearest caches, and products are those of float32 for bfloat16, too.
// VDPBF16PS was tried: where it has half the rate of a multiply-add (an Intel Xeon at 2.8 GHz) the whole took 1.1 to 1.4 times as long.
// Source of a backward that keeps no weights: Dao et al. 2022, arXiv:2205.14135, appendix B.
#pragma once
#include "cohort/nmt/kernels/cpu/arithmetic.h"
#include "cohort/nmt/kernels/cpu/loops.h"

namespace cohort::nmt {
namespace {

template <class T>
using AccOf = typename Math<T>::Acc;

// Rows of a block of scores: with four registers of columns the sums fill most of 32 registers, with two most of 16.
constexpr int64_t kBlockRows = 6;
constexpr int64_t kBlockRegisters = kRegisterBytes == 64 ? 4 : 2;
// Queries whose scores backward keeps together.
constexpr int64_t kChunkRows = 96;

constexpr int64_t divided_up(int64_t n, int64_t by) {
  return (n + by - 1) / by;
}
constexpr int64_t padded(int64_t n) {
  return divided_up(n, kScoresUnit) * kScoresUnit;
}

// Calls body<0>(), body<1>() and so on. Loops would be unrolled only after the compiler has decided which arrays become registers.
#define COHORT_INLINE __attribute__((always_inline))
template <int kCount, int kFirst = 0, class Body>
COHORT_INLINE inline void repeat(const Body& body) {
  if constexpr (kFirst < kCount) {
    body.template operator()<kFirst>();
    repeat<kCount, kFirst + 1>(body);
  }
}

// The left side of a product: its element (r, d) is at[r * row + d * depth].
template <class Acc>
struct Left {
  const Acc* at;
  int64_t row, depth;
};

// Of a product: `depth` elements are summed over; the rows of the right side and of the result are `pitch`es apart.
struct ProductShape {
  int64_t rows, depth, columns;  // rows: 1 to kBlockRows; columns: a multiple of kScoresUnit
  int64_t right_pitch, out_pitch;
};

template <int kRows, int kRegisters, class Acc>
inline void multiply_tile(const Left<Acc>& left, const Acc* right, int64_t right_pitch,
                          int64_t depth, bool add, Acc* out, int64_t out_pitch) {
  constexpr int64_t kLanes = Register<Acc>::kLanes;
  constexpr int kTiles = kRows * kRegisters;
  RegisterOf<Acc> sums[kTiles] = {};
  for (int64_t d = 0; d < depth; ++d) {
    RegisterOf<Acc> columns[kRegisters];
    repeat<kRegisters>([&]<int kAt>() COHORT_INLINE {
      columns[kAt] = anywhere(right + d * right_pitch + kAt * kLanes);
    });
    repeat<kRows>([&]<int kRow>() COHORT_INLINE {
      const Acc element = left.at[kRow * left.row + d * left.depth];
      repeat<kRegisters>([&]<int kAt>() COHORT_INLINE {
        sums[kRow * kRegisters + kAt] += element * columns[kAt];
      });
    });
  }
  repeat<kTiles>([&]<int kTile>() COHORT_INLINE {
    auto& to = anywhere(out + kTile / kRegisters * out_pitch + kTile % kRegisters * kLanes);
    to = add ? sums[kTile] + to : sums[kTile];
  });
}

template <int kRows, class Acc>
void multiply_rows(const Left<Acc>& left, const Acc* right, const ProductShape& shape, bool add,
                   Acc* out) {
  int64_t c = 0;
  const auto tiles = [&]<int kRegisters>() {
    constexpr int64_t kColumns = kRegisters * Register<Acc>::kLanes;
    for (; c + kColumns <= shape.columns; c += kColumns) {
      multiply_tile<kRows, kRegisters>(left, right + c, shape.right_pitch, shape.depth, add,
                                       out + c, shape.out_pitch);
    }
  };
  tiles.template operator()<kBlockRegisters>();
  if constexpr (kBlockRegisters > 2) tiles.template operator()<2>();
  tiles.template operator()<1>();
}

// out = (add ? out : 0) + left * right.
template <class Acc>
__attribute__((noinline)) void multiply(const Left<Acc>& left, const Acc* right,
                                        const ProductShape& shape, bool add, Acc* out) {
  switch (shape.rows) {
    case 1:
      return multiply_rows<1>(left, right, shape, add, out);
    case 2:
      return multiply_rows<2>(left, right, shape, add, out);
    case 3:
      return multiply_rows<3>(left, right, shape, add, out);
    case 4:
      return multiply_rows<4>(left, right, shape, add, out);
    case 5:
      return multiply_rows<5>(left, right, shape, add, out);
    default:
      return multiply_rows<kBlockRows>(left, right, shape, add, out);
  }
}

// Rows of `width` elements and the zeros behind them.
template <class T>
inline void widen_rows(const T* x, int64_t stride, int64_t rows, int64_t width, AccOf<T>* out,
                       int64_t pitch) {
  for (int64_t r = 0; r < rows; ++r) {
    AccOf<T>* to = out + r * pitch;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) to[i] = Math<T>::load(x[r * stride + i]);
    for (int64_t i = width; i < pitch; ++i) to[i] = 0;
  }
}

template <class T>
inline void store_rows(const AccOf<T>* x, int64_t pitch, int64_t rows, int64_t width, T* out,
                       int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) out[r * stride + i] = Math<T>::store(x[r * pitch + i]);
  }
}

// The lanes of two registers, one from each in turn: those of the lower halves or of the upper ones.
template <bool kUpper, class Element>
inline void interleave(const RegisterOf<Element>& x, const RegisterOf<Element>& y,
                       RegisterOf<Element>& out) {
  constexpr int64_t kLanes = Register<Element>::kLanes;
  if constexpr (kLanes == 16) {
    out = kUpper ? __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14,
                                           30, 15, 31)
                 : __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7,
                                           23);
  } else if constexpr (kLanes == 8) {
    out = kUpper ? __builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15)
                 : __builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11);
  } else if constexpr (kLanes == 4) {
    out = kUpper ? __builtin_shufflevector(x, y, 2, 6, 3, 7)
                 : __builtin_shufflevector(x, y, 0, 4, 1, 5);
  } else {
    out = kUpper ? __builtin_shufflevector(x, y, 1, 3) : __builtin_shufflevector(x, y, 0, 2);
  }
}

// As many steps as transpose a square of kLanes registers: each doubles how far neighbours in a column stand together.
template <class Element, int64_t kSteps>
inline void transpose_square(RegisterOf<Element>* square) {
  if constexpr (kSteps > 1) {
    constexpr int64_t kHalf = Register<Element>::kLanes / 2;
    RegisterOf<Element> next[2 * kHalf];
#pragma GCC unroll 8
    for (int64_t i = 0; i < kHalf; ++i) {
      interleave<false, Element>(square[i], square[i + kHalf], next[2 * i]);
      interleave<true, Element>(square[i], square[i + kHalf], next[2 * i + 1]);
    }
    transpose_square<Element, kSteps / 2>(next);
    __builtin_memcpy(square, next, sizeof next);
  }
}

// out[c * out_pitch + r] = x[r * pitch + c], of whole squares.
template <class Element>
__attribute__((noinline)) void transpose(const Element* x, int64_t pitch, int64_t rows,
                                         int64_t columns, Element* out, int64_t out_pitch) {
  constexpr int64_t kLanes = Register<Element>::kLanes;
  for (int64_t r = 0; r < rows; r += kLanes) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      RegisterOf<Element> square[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) square[i] = anywhere(x + (r + i) * pitch + c);
      transpose_square<Element, kLanes>(square);
      for (int64_t i = 0; i < kLanes; ++i) anywhere(out + (c + i) * out_pitch + r) = square[i];
    }
  }
}

// The scratch of a head, laid out from `at` on. Null: for the size alone.
template <class Acc>
struct AttentionScratch {
  AttentionScratch(Acc* at, int64_t num_keys, int64_t width)
      : key_pitch(padded(num_keys)), width_pitch(padded(width)), at_(at) {
    keys = take(key_pitch * width_pitch);
    keys_transposed = take(key_pitch * width_pitch);
    values = take(key_pitch * width_pitch);
    mixed = take(kBlockRows * width_pitch);
    random = reinterpret_cast<uint64_t*>(take(key_pitch));
    queries = take(kChunkRows * width_pitch);
    scores = take(kChunkRows * key_pitch);
    values_transposed = take(key_pitch * width_pitch);
    grads = take(kChunkRows * width_pitch);
    weights = take(kChunkRows * key_pitch);
    key_grads = take(key_pitch * width_pitch);
    value_grads = take(key_pitch * width_pitch);
  }
  int64_t size() const { return taken_; }

  int64_t key_pitch, width_pitch;
  Acc *keys, *keys_transposed, *values, *mixed;
  uint64_t* random;
  Acc *queries, *scores, *values_transposed, *grads, *weights, *key_grads, *value_grads;

 private:
  Acc* take(int64_t count) {
    const int64_t first = taken_;
    taken_ += count;
    return at_ == nullptr ? nullptr : at_ + first;
  }
  Acc* at_;
  int64_t taken_ = 0;
};

// Four 16-bit random numbers from each hashed counter, as dropout takes them: those of a row's elements, from `first` on.
// Null: none falls.
using Random __attribute__((may_alias)) = uint16_t;
inline const Random* random_row(const DropoutRule& rule, int64_t first, int64_t count,
                                uint64_t* words) {
  if (rule.threshold == 0) return nullptr;
  const int64_t begin = rule.first + first;
  const int64_t num_words = divided_up(begin % 4 + count, 32) * 8;  // whole registers
#pragma omp simd
  for (int64_t w = 0; w < num_words; ++w) words[w] = random_word(rule.key, begin / 4 + w);
  return reinterpret_cast<const Random*>(words) + begin % 4;
}

inline int64_t visible_keys(int64_t length, bool causal, int64_t query) {
  return causal && query + 1 < length ? query + 1 : length;
}

// A row is worked on by whole registers, so behind the last visible key as well. Whole numbers as wide as Acc:
template <class Acc>
struct WholeOf {
  using Type = int32_t;
};
template <>
struct WholeOf<double> {
  using Type = int64_t;
};
template <class Acc>
using Whole = typename WholeOf<Acc>::Type;
template <class Acc>
using Mask = RegisterOf<Whole<Acc>>;

// Lanes of the elements from `first` on that stand before `end`.
template <class Acc>
inline void lanes_before(int64_t first, int64_t end, Mask<Acc>& mask) {
  Mask<Acc> lanes;
  for (int64_t i = 0; i < Register<Acc>::kLanes; ++i) lanes[i] = static_cast<Whole<Acc>>(i);
  mask = lanes < static_cast<Whole<Acc>>(end - first);
}

// Lanes of the elements that fall.
template <class Acc>
inline void falling_lanes(const Random* random, const DropoutRule& rule, Mask<Acc>& mask) {
  typename Register<uint16_t, Register<Acc>::kLanes * 2>::Type numbers;
  __builtin_memcpy(&numbers, random, sizeof numbers);
  mask = __builtin_convertvector(numbers, Mask<Acc>) < static_cast<Whole<Acc>>(rule.threshold);
}

// exp(scale (score - top)). What a hidden key gets is no number of use.
template <class Acc>
inline void exponentials(Acc* scores, int64_t n, Acc top, float scale) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) scores[i] = exponential((scores[i] - top) * scale);
}

// Scores become weights, dropped; stats: the greatest score, and the reciprocal of the sum of exponentials.
template <class Acc>
inline void weigh(Acc* scores, int64_t visible, int64_t n, float scale, const DropoutRule& rule,
                  const Random* random, Acc* stats) {
  constexpr int64_t kLanes = Register<Acc>::kLanes;
  Mask<Acc> seen, falls;
  const RegisterOf<Acc> first = RegisterOf<Acc>{} + scores[0];
  RegisterOf<Acc> tops = first;
  for (int64_t i = 0; i < n; i += kLanes) {
    lanes_before<Acc>(i, visible, seen);
    const RegisterOf<Acc> row = seen ? anywhere(scores + i) : first;
    tops = row > tops ? row : tops;
  }
  const Acc top = greatest_of<Acc>(tops);
  exponentials(scores, n, top, scale);
  RegisterOf<Acc> sums = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    lanes_before<Acc>(i, visible, seen);
    const RegisterOf<Acc> row = seen ? anywhere(scores + i) : RegisterOf<Acc>{};
    anywhere(scores + i) = row;
    sums += row;
  }
  stats[0] = top;
  stats[1] = 1 / sum_of<Acc>(sums);
  const Acc factor = stats[1] * rule.scale;
  for (int64_t i = 0; i < n; i += kLanes) {
    RegisterOf<Acc> row = anywhere(scores + i) * factor;
    if (random != nullptr) {
      falling_lanes<Acc>(random + i, rule, falls);
      row = falls ? RegisterOf<Acc>{} : row;
    }
    anywhere(scores + i) = row;
  }
}

// Scores become their gradients, and the gradients of what dropout left of the weights become that.
template <class Acc>
inline void weigh_backward(Acc* scores, Acc* grads, int64_t visible, int64_t n, float scale,
                           const DropoutRule& rule, const Random* random, const Acc* stats) {
  constexpr int64_t kLanes = Register<Acc>::kLanes;
  constexpr RegisterOf<Acc> kNone = {};
  const Acc inverse = stats[1], kept = rule.scale, wide_scale = scale;
  exponentials(scores, n, stats[0], scale);
  Mask<Acc> seen, falls = {};
  RegisterOf<Acc> dots = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    lanes_before<Acc>(i, visible, seen);
    RegisterOf<Acc> weight = anywhere(scores + i) * inverse;
    RegisterOf<Acc> grad = anywhere(grads + i) * kept;
    weight = seen ? weight : kNone;
    grad = seen ? grad : kNone;
    if (random != nullptr) {
      falling_lanes<Acc>(random + i, rule, falls);
      grad = falls ? kNone : grad;
    }
    anywhere(scores + i) = weight;
    anywhere(grads + i) = grad;
    dots += weight * grad;
  }
  const Acc dot = sum_of<Acc>(dots);
  for (int64_t i = 0; i < n; i += kLanes) {
    const RegisterOf<Acc> weight = anywhere(scores + i);
    anywhere(scores + i) = weight * (anywhere(grads + i) - dot) * wide_scale;
    RegisterOf<Acc> left = weight * kept;
    if (random != nullptr) {
      falling_lanes<Acc>(random + i, rule, falls);
      left = falls ? kNone : left;
    }
    anywhere(grads + i) = left;
  }
}

// Some of the queries, and the keys up to the last that one of them sees.
template <class T>
struct AttentionBlock {
  using Acc = AccOf<T>;
  int64_t first, rows, last_visible, columns;

  AttentionBlock(const AttentionHead<T>& head, int64_t begin, int64_t count)
      : first(begin),
        rows(count),
        last_visible(visible_keys(head.num_keys, head.causal, begin + count - 1)),
        columns(padded(last_visible)) {}

  // out [rows, keys] = x [rows, width] times all of `right`.
  void score(const Acc* x, int64_t width, const Acc* right, const AttentionScratch<Acc>& s,
             Acc* out) const {
    multiply<Acc>({x, s.width_pitch, 1}, right,
                  {.rows = rows,
                   .depth = width,
                   .columns = columns,
                   .right_pitch = s.key_pitch,
                   .out_pitch = s.key_pitch},
                  /*add=*/false, out);
  }

  // out's rows = x [rows, keys] times `right` [keys, width].
  void mix(const Acc* x, const Acc* right, int64_t width, const AttentionScratch<Acc>& s, T* out,
           int64_t stride) const {
    multiply<Acc>({x, s.key_pitch, 1}, right,
                  {.rows = rows,
                   .depth = last_visible,
                   .columns = s.width_pitch,
                   .right_pitch = s.width_pitch,
                   .out_pitch = s.width_pitch},
                  /*add=*/false, s.mixed);
    store_rows<T>(s.mixed, s.width_pitch, rows, width, out + first * stride, stride);
  }
};

// Calls body(AttentionBlock) for blocks of about the same size.
template <class T, class Body>
inline void for_blocks(const AttentionHead<T>& head, int64_t begin, int64_t end, const Body& body) {
  const int64_t blocks = divided_up(end - begin, kBlockRows);
  const int64_t rows = blocks == 0 ? 0 : divided_up(end - begin, blocks);
  for (int64_t first = begin; first < end; first += rows)
    body(AttentionBlock<T>(head, first, end - first < rows ? end - first : rows));
}

// Widens keys or values; what is behind the last in `wide` stays as it is, but zeros in `transposed`, unless that is null.
template <class T>
inline void take_rows(const AttentionHead<T>& head, const T* x, const AttentionScratch<AccOf<T>>& s,
                      AccOf<T>* wide, AccOf<T>* transposed) {
  widen_rows<T>(x, head.key_stride, head.num_keys, head.width, wide, s.width_pitch);
  if (transposed == nullptr) return;
  for (int64_t i = head.num_keys * s.width_pitch; i < s.key_pitch * s.width_pitch; ++i) wide[i] = 0;
  transpose(wide, s.width_pitch, s.key_pitch, s.width_pitch, transposed, s.key_pitch);
}

template <class T>
void attention_forward(const AttentionHead<T>& head, DropoutRule rule, AccOf<T>* scratch, T* out,
                       int64_t out_stride, AccOf<T>* stats) {
  using Acc = AccOf<T>;
  const AttentionScratch<Acc> s(scratch, head.num_keys, head.width);
  take_rows(head, head.keys, s, s.keys, s.keys_transposed);
  take_rows(head, head.values, s, s.values, nullptr);
  for_blocks(head, 0, head.num_queries, [&](const AttentionBlock<T>& block) {
    widen_rows<T>(head.queries + block.first * head.query_stride, head.query_stride, block.rows,
                  head.width, s.queries, s.width_pitch);
    block.score(s.queries, head.width, s.keys_transposed, s, s.scores);
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t query = block.first + r;
      const int64_t visible = visible_keys(head.num_keys, head.causal, query);
      const Random* random = random_row(rule, query * head.all_keys, visible, s.random);
      weigh(s.scores + r * s.key_pitch, visible, block.columns, head.scale, rule, random,
            stats + 2 * query);
    }
    block.mix(s.scores, s.values, head.width, s, out, out_stride);
  });
}

// Adds what the queries [begin, end) give to the gradients of keys and values.
template <class T>
inline void add_key_grads(const AttentionHead<T>& head, int64_t begin, int64_t end,
                          const AttentionScratch<AccOf<T>>& s) {
  for (int64_t key = 0; key < head.num_keys; key += kBlockRows) {
    // No query before its own number sees a key.
    const int64_t blind = head.causal && key > begin ? key - begin : 0;
    if (blind >= end - begin) break;
    const int64_t left = head.num_keys - key;
    const ProductShape shape{.rows = left < kBlockRows ? left : kBlockRows,
                             .depth = end - begin - blind,
                             .columns = s.width_pitch,
                             .right_pitch = s.width_pitch,
                             .out_pitch = s.width_pitch};
    const int64_t at = blind * s.key_pitch + key;
    multiply<AccOf<T>>({s.scores + at, 1, s.key_pitch}, s.queries + blind * s.width_pitch, shape,
                       /*add=*/true, s.key_grads + key * s.width_pitch);
    multiply<AccOf<T>>({s.weights + at, 1, s.key_pitch}, s.grads + blind * s.width_pitch, shape,
                       /*add=*/true, s.value_grads + key * s.width_pitch);
  }
}

template <class T>
void attention_backward(const AttentionHead<T>& head, DropoutRule rule, const AccOf<T>* stats,
                        const T* grad, int64_t grad_stride, AccOf<T>* scratch,
                        AttentionHeadGrads<T> out) {
  using Acc = AccOf<T>;
  const AttentionScratch<Acc> s(scratch, head.num_keys, head.width);
  take_rows(head, head.keys, s, s.keys, s.keys_transposed);
  take_rows(head, head.values, s, s.values, s.values_transposed);
  for (int64_t i = 0; i < s.key_pitch * s.width_pitch; ++i) s.key_grads[i] = 0;
  for (int64_t i = 0; i < s.key_pitch * s.width_pitch; ++i) s.value_grads[i] = 0;
  for (int64_t begin = 0; begin < head.num_queries; begin += kChunkRows) {
    const int64_t left = head.num_queries - begin;
    const int64_t end = begin + (left < kChunkRows ? left : kChunkRows);
    widen_rows<T>(head.queries + begin * head.query_stride, head.query_stride, end - begin,
                  head.width, s.queries, s.width_pitch);
    widen_rows<T>(grad + begin * grad_stride, grad_stride, end - begin, head.width, s.grads,
                  s.width_pitch);
    for_blocks(head, begin, end, [&](const AttentionBlock<T>& block) {
      const int64_t row = block.first - begin;
      Acc* const scores = s.scores + row * s.key_pitch;
      Acc* const weights = s.weights + row * s.key_pitch;
      block.score(s.queries + row * s.width_pitch, head.width, s.keys_transposed, s, scores);
      block.score(s.grads + row * s.width_pitch, head.width, s.values_transposed, s, weights);
      for (int64_t r = 0; r < block.rows; ++r) {
        const int64_t query = block.first + r, at = r * s.key_pitch;
        const int64_t visible = visible_keys(head.num_keys, head.causal, query);
        const Random* random = random_row(rule, query * head.all_keys, visible, s.random);
        weigh_backward(scores + at, weights + at, visible, block.columns, head.scale, rule, random,
                       stats + 2 * query);
        for (int64_t i = block.columns; i < s.key_pitch; ++i) scores[at + i] = weights[at + i] = 0;
      }
      block.mix(scores, s.keys, head.width, s, out.queries, head.query_stride);
    });
    add_key_grads(head, begin, end, s);
  }
  for (int64_t key = head.num_keys; key < head.key_rows; ++key) {
    for (int64_t i = 0; i < head.width; ++i)
      out.keys[key * head.key_stride + i] = out.values[key * head.key_stride + i] =
          Math<T>::store(0);
  }
  store_rows<T>(s.key_grads, s.width_pitch, head.num_keys, head.width, out.keys, head.key_stride);
  store_rows<T>(s.value_grads, s.width_pitch, head.num_keys, head.width, out.values,
                head.key_stride);
}

template <class T>
int64_t attention_scratch(int64_t keys, int64_t width) {
  return AttentionScratch<AccOf<T>>(nullptr, keys, width).size();
}

}  // namespace
}  // namespace cohort::nmt
