// SPDX-License-Identifier: Apache-2.0
// Attention of one head of one sentence, forward and backward. Of loops.cpp alone, as arithmetic.h.
//
// Products are those of float32 for bfloat16, too, whose operands are widened in scratch that fits the nearest caches. Operands that
// are what sums run in, and whole registers wide, stay where they are. Rows of the next head are fetched while this one is computed.
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

template <class Element>
struct Rows {
  Element* at;
  int64_t pitch;  // elements from one row to the next
  Rows from(int64_t row) const { return {at + row * pitch, pitch}; }
};

// The left side of a product: its element (r, d) is at[r * row + d * depth].
template <class Acc>
struct Left {
  const Acc* at;
  int64_t row, depth;
};

// Of a product: `depth` elements are summed over.
struct ProductShape {
  int64_t rows, depth, columns;  // rows: 1 to kBlockRows; columns: a multiple of kScoresUnit
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
void multiply_rows(const Left<Acc>& left, const Rows<const Acc>& right, const ProductShape& shape,
                   bool add, const Rows<Acc>& out) {
  int64_t c = 0;
  const auto tiles = [&]<int kRegisters>() {
    constexpr int64_t kColumns = kRegisters * Register<Acc>::kLanes;
    for (; c + kColumns <= shape.columns; c += kColumns) {
      multiply_tile<kRows, kRegisters>(left, right.at + c, right.pitch, shape.depth, add,
                                       out.at + c, out.pitch);
    }
  };
  tiles.template operator()<kBlockRegisters>();
  if constexpr (kBlockRegisters > 2) {
    tiles.template operator()<3>();
    tiles.template operator()<2>();
  }
  tiles.template operator()<1>();
}

// out = (add ? out : 0) + left * right.
template <class Acc>
__attribute__((noinline)) void multiply(const Left<Acc>& left, const Rows<const Acc>& right,
                                        const ProductShape& shape, bool add, const Rows<Acc>& out) {
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

// Whether products take and leave rows of `width` elements where they are.
template <class T>
constexpr bool in_place(int64_t width) {
  return sizeof(T) == sizeof(AccOf<T>) && width % kScoresUnit == 0;
}

// Rows as products take them: in place, which only types allow that sums run in, or widened in `scratch`, with zeros behind.
template <class T>
inline Rows<const AccOf<T>> take_rows(const Rows<const T>& x, int64_t rows, int64_t width,
                                      const Rows<AccOf<T>>& scratch) {
  if constexpr (in_place<T>(kScoresUnit)) {
    if (in_place<T>(width)) return x;
  }
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = x.from(r).at;
    AccOf<T>* to = scratch.from(r).at;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) to[i] = Math<T>::load(from[i]);
    for (int64_t i = width; i < scratch.pitch; ++i) to[i] = 0;
  }
  return {scratch.at, scratch.pitch};
}

// Where products leave rows for `out`: there, or in `scratch`, from which store_rows rounds them.
template <class T>
inline Rows<AccOf<T>> place_for(const Rows<T>& out, int64_t width, const Rows<AccOf<T>>& scratch) {
  if constexpr (in_place<T>(kScoresUnit)) {
    if (in_place<T>(width)) return out;
  }
  return scratch;
}

template <class T>
inline void store_rows(const Rows<AccOf<T>>& scratch, int64_t rows, int64_t width,
                       const Rows<T>& out) {
  if (in_place<T>(width)) return;
  for (int64_t r = 0; r < rows; ++r) {
    const AccOf<T>* from = scratch.from(r).at;
    T* to = out.from(r).at;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) to[i] = Math<T>::store(from[i]);
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

// out[c][r] = x[r][c]; `columns` are whole registers, and so are rows of `out`: zeros stand behind the last of x.
template <class Element>
__attribute__((noinline)) void transpose(const Rows<const Element>& x, int64_t rows,
                                         int64_t columns, const Rows<Element>& out) {
  constexpr int64_t kLanes = Register<Element>::kLanes;
  for (int64_t r = 0; r < out.pitch; r += kLanes) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      RegisterOf<Element> square[kLanes] = {};
      for (int64_t i = 0; i < kLanes && r + i < rows; ++i)
        square[i] = anywhere(x.from(r + i).at + c);
      transpose_square<Element, kLanes>(square);
      for (int64_t i = 0; i < kLanes; ++i) anywhere(out.from(c + i).at + r) = square[i];
    }
  }
}

// The scratch of a head, laid out from `at` on. Null: for the size alone.
template <class Acc>
struct AttentionScratch {
  AttentionScratch(Acc* at, int64_t num_keys, int64_t width) : at_(at) {
    const int64_t keys_padded = padded(num_keys), width_padded = padded(width);
    keys = take(num_keys, width_padded);
    keys_transposed = take(width_padded, keys_padded);
    values = take(num_keys, width_padded);
    mixed = take(kBlockRows, width_padded);
    random = reinterpret_cast<uint64_t*>(take(1, keys_padded).at);
    queries = take(kChunkRows, width_padded);
    scores = take(kChunkRows, keys_padded);
    values_transposed = take(width_padded, keys_padded);
    grads = take(kChunkRows, width_padded);
    weights = take(kChunkRows, keys_padded);
    key_grads = take(num_keys, width_padded);
    value_grads = take(num_keys, width_padded);
  }
  int64_t size() const { return taken_; }

  Rows<Acc> keys, keys_transposed, values, mixed;
  uint64_t* random;
  Rows<Acc> queries, scores, values_transposed, grads, weights, key_grads, value_grads;

 private:
  Rows<Acc> take(int64_t rows, int64_t pitch) {
    const int64_t first = taken_;
    taken_ += rows * pitch;
    return {at_ == nullptr ? nullptr : at_ + first, pitch};
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
  void score(const Rows<const Acc>& x, int64_t width, const Rows<Acc>& right,
             const Rows<Acc>& out) const {
    multiply<Acc>({x.at, x.pitch, 1}, {right.at, right.pitch},
                  {.rows = rows, .depth = width, .columns = columns}, /*add=*/false, out);
  }

  // out's rows = x [rows, keys] times `right` [keys, width].
  void mix(const Rows<Acc>& x, const Rows<const Acc>& right, int64_t width,
           const AttentionScratch<Acc>& s, const Rows<T>& out) const {
    multiply<Acc>({x.at, x.pitch, 1}, right,
                  {.rows = rows, .depth = last_visible, .columns = s.mixed.pitch},
                  /*add=*/false, place_for<T>(out.from(first), width, s.mixed));
    store_rows<T>(s.mixed, rows, width, out.from(first));
  }
};

// Calls body(first, how many) for blocks of about the same size.
template <class Body>
inline void for_blocks(int64_t begin, int64_t end, const Body& body) {
  int64_t blocks = divided_up(end - begin, kBlockRows);
  for (int64_t first = begin; first < end; --blocks) {
    const int64_t rows = divided_up(end - first, blocks);
    body(first, rows);
    first += rows;
  }
}

// Fetches a row of the next head, which lies behind this one's, into the second cache.
template <class T>
inline void fetch_behind(const T* row, int64_t width) {
  constexpr auto kOfALine = static_cast<int64_t>(64 / sizeof(T));
  for (int64_t i = width; i < 2 * width; i += kOfALine)
    __builtin_prefetch(row + i, /*rw=*/0, /*locality=*/2);
}

// Of the keys and values, the share of one query.
template <class T>
inline void fetch_keys_behind(const AttentionHead<T>& head, const T* keys, const T* values,
                              int64_t query) {
  for (int64_t key = query; key < head.num_keys; key += head.num_queries) {
    fetch_behind(keys + key * head.key_stride, head.width);
    fetch_behind(values + key * head.key_stride, head.width);
  }
}

template <class T>
void attention_forward(const AttentionHead<T>& head, DropoutRule rule, AccOf<T>* scratch, T* out,
                       int64_t out_stride, AccOf<T>* stats) {
  using Acc = AccOf<T>;
  const AttentionScratch<Acc> s(scratch, head.num_keys, head.width);
  const int64_t width = head.width;
  const auto keys = take_rows<T>({head.keys, head.key_stride}, head.num_keys, width, s.keys);
  const auto values = take_rows<T>({head.values, head.key_stride}, head.num_keys, width, s.values);
  transpose(keys, head.num_keys, s.keys.pitch, s.keys_transposed);
  for_blocks(0, head.num_queries, [&](int64_t first, int64_t rows) {
    const AttentionBlock<T> block(head, first, rows);
    const Rows<const T> queries{head.queries + first * head.query_stride, head.query_stride};
    block.score(take_rows<T>(queries, rows, width, s.queries), width, s.keys_transposed, s.scores);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t query = first + r;
      const int64_t visible = visible_keys(head.num_keys, head.causal, query);
      const Random* random = random_row(rule, query * head.all_keys, visible, s.random);
      weigh(s.scores.from(r).at, visible, block.columns, head.scale, rule, random,
            stats + 2 * query);
      if (head.next_behind) {
        fetch_behind(queries.from(r).at, width);
        fetch_behind(out + query * out_stride, width);
        fetch_keys_behind(head, head.keys, head.values, query);
      }
    }
    block.mix(s.scores, values, width, s, {out, out_stride});
  });
}

// What queries give to the gradients of keys and values: added to what earlier ones, if any, gave.
template <class T>
struct KeyGrads {
  using Acc = AccOf<T>;
  const AttentionScratch<Acc>& s;
  Rows<Acc> of_keys, of_values;

  void add(const AttentionHead<T>& head, int64_t begin, int64_t end, const Rows<const Acc>& queries,
           const Rows<const Acc>& grads) const {
    for_blocks(0, head.num_keys, [&](int64_t key, int64_t rows) {
      // No query before its own number sees a key.
      const int64_t before = head.causal && key > begin ? key - begin : 0;
      const int64_t blind = before < end - begin ? before : end - begin;
      const ProductShape shape{.rows = rows, .depth = end - begin - blind, .columns = s.keys.pitch};
      const auto multiply_by = [&](const Rows<Acc>& x, const Rows<const Acc>& right,
                                   const Rows<Acc>& out) {
        multiply<Acc>({x.from(blind).at + key, 1, x.pitch}, right.from(blind), shape,
                      /*add=*/begin > 0, out.from(key));
      };
      multiply_by(s.scores, queries, of_keys);
      multiply_by(s.weights, grads, of_values);
    });
  }
};

template <class T>
void attention_backward(const AttentionHead<T>& head, DropoutRule rule, const AccOf<T>* stats,
                        const T* grad, int64_t grad_stride, AccOf<T>* scratch,
                        AttentionHeadGrads<T> out) {
  using Acc = AccOf<T>;
  const AttentionScratch<Acc> s(scratch, head.num_keys, head.width);
  const int64_t width = head.width;
  const Rows<T> out_queries{out.queries, head.query_stride}, out_keys{out.keys, head.key_stride},
      out_values{out.values, head.key_stride};
  const auto keys = take_rows<T>({head.keys, head.key_stride}, head.num_keys, width, s.keys);
  transpose(keys, head.num_keys, s.keys.pitch, s.keys_transposed);
  transpose(take_rows<T>({head.values, head.key_stride}, head.num_keys, width, s.values),
            head.num_keys, s.keys.pitch, s.values_transposed);
  const KeyGrads<T> key_grads{s, place_for<T>(out_keys, width, s.key_grads),
                              place_for<T>(out_values, width, s.value_grads)};
  int64_t begin = 0;
  do {  // of no queries, too: keys get gradients of 0
    const int64_t left = head.num_queries - begin;
    const int64_t end = begin + (left < kChunkRows ? left : kChunkRows);
    const auto queries = take_rows<T>({head.queries + begin * head.query_stride, head.query_stride},
                                      end - begin, width, s.queries);
    const auto grads =
        take_rows<T>({grad + begin * grad_stride, grad_stride}, end - begin, width, s.grads);
    for_blocks(begin, end, [&](int64_t first, int64_t rows) {
      const AttentionBlock<T> block(head, first, rows);
      const Rows<Acc> scores = s.scores.from(first - begin);
      const Rows<Acc> weights = s.weights.from(first - begin);
      block.score(queries.from(first - begin), width, s.keys_transposed, scores);
      block.score(grads.from(first - begin), width, s.values_transposed, weights);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t query = first + r;
        Acc *const scores_r = scores.from(r).at, *const weights_r = weights.from(r).at;
        const int64_t visible = visible_keys(head.num_keys, head.causal, query);
        const Random* random = random_row(rule, query * head.all_keys, visible, s.random);
        weigh_backward(scores_r, weights_r, visible, block.columns, head.scale, rule, random,
                       stats + 2 * query);
        // A block of keys may reach as far.
        if (block.columns < scores.pitch) {
          for (int64_t i = block.columns; i < block.columns + kScoresUnit; ++i)
            scores_r[i] = weights_r[i] = 0;
        }
        if (head.next_behind) {
          fetch_behind(head.queries + query * head.query_stride, width);
          fetch_behind(out_queries.from(query).at, width);
          fetch_behind(grad + query * grad_stride, width);
          fetch_keys_behind(head, head.keys, head.values, query);
          fetch_keys_behind<T>(head, out.keys, out.values, query);
        }
      }
      block.mix(scores, keys, width, s, out_queries);
    });
    key_grads.add(head, begin, end, queries, grads);
    begin = end;
  } while (begin < head.num_queries);
  store_rows<T>(s.key_grads, head.num_keys, width, out_keys);
  store_rows<T>(s.value_grads, head.num_keys, width, out_values);
  for (int64_t key = head.num_keys; key < head.key_rows; ++key) {
    for (int64_t i = 0; i < width; ++i)
      out_keys.from(key).at[i] = out_values.from(key).at[i] = Math<T>::store(0);
  }
}

template <class T>
int64_t attention_scratch(int64_t keys, int64_t width) {
  return AttentionScratch<AccOf<T>>(nullptr, keys, width).size();
}

}  // namespace
}  // namespace cohort::nmt
