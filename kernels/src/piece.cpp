// One task of attention, compiled for every instruction set and chosen at run time.
#include "piece.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

// Scalable vectors are excluded, because vectors of unknown length cannot be array elements, as register tiles here are.
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "piece.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h.
#include "hwy/highway.h"
#include "rows-inl.h"
#include "sequence.h"
#include "weights-inl.h"
#include "whole-inl.h"

HWY_BEFORE_NAMESPACE();
namespace exportable_cache::kernels {
namespace HWY_NAMESPACE {

// State of a piece's rows while the keys are read; all of it is scratch memory.
struct Running {
  float* query;   // [rows, padded(key_dim)], scaled
  float* scores;  // [rows, kBlock]; weights after `weigh`
  float* sums;    // [rows, padded(value_dim)]
  float* keys;    // [padded(key_dim), kBlock], or [kBlock, padded(key_dim)]
  float* values;  // [kBlock, padded(value_dim)]; large enough for keys as well
  float* top;     // [rows]
  float* total;   // [rows]
  const Range* seen;  // [rows]
  bool by_pairs;  // true if many rows are multiplied as pairs of 16 bits
  // Rows in 16 bits:
  int16_t* whole_query;    // [rows, padded(key_dim)]
  int16_t* whole_weights;  // [rows, kBlock]
  float* query_factors;    // [rows]
  float* weight_factors;   // [rows]
};

// Keys of a contiguous part that a piece reads.
struct Part {
  const Stretch& stretch;
  int64_t base;   // index of the part's first key
  int64_t first;  // index of the first key to read
  int64_t end;
  bool kept;
};

template <class T>
HWY_INLINE const T* at(const View& view, const Piece& piece, int64_t head, int64_t token) {
  return static_cast<const T*>(view.data) + piece.batch * view.batch_stride + head * view.head_stride +
         token * view.token_stride;
}

template <int number>
using Number = std::integral_constant<int, number>;

// Calls `work(Number<R>, r)` for R rows from r on, four at a time while there are that many.
template <class Work>
HWY_INLINE void by_fours(int64_t rows, const Work& work) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) work(Number<4>(), r);
  switch (rows - r) {
    case 1: work(Number<1>(), r); break;
    case 2: work(Number<2>(), r); break;
    case 3: work(Number<3>(), r); break;
    default: break;
  }
}

// Prefetch the next rows with the first rows only, because once is enough.
template <class Next>
HWY_INLINE Ahead<Next> with_first(int64_t r, const Ahead<Next>& next) {
  return r ? Ahead<Next>() : next;
}

// Scores of `rows` rows over n stored keys.
template <class T, class Next>
HWY_INLINE void scores_of_few(const Running& run, int64_t rows, const Rows<T>& keys, int64_t dim, int64_t query_stride,
                              const Ahead<Next>& next) {
  by_fours(rows, [&](auto number, int64_t r) HWY_ATTR {
    few_scores<number.value>(run.query + r * query_stride, query_stride, keys, dim, with_first(r, next),
                             run.scores + r * kBlock);
  });
}

// A short range of slots at a time, because memory is then read nearly in order.
template <class T, class Next>
HWY_INLINE void sums_of_few(const Running& run, int64_t rows, const Rows<T>& values, int64_t dim, int64_t sum_stride,
                            const Ahead<Next>& next) {
  constexpr int64_t stretch = 16;
  by_fours(rows, [&](auto number, int64_t r) HWY_ATTR {
    add_weighted<number.value>(run.scores + r * kBlock, values, dim, stretch, with_first(r, next),
                               run.sums + r * sum_stride, sum_stride);
  });
}

// For 8-bit values, and 4-bit values widened to 8.
template <class T>
constexpr bool kWhole = false;
template <>
constexpr bool kWhole<int8_t> = true;
template <>
constexpr bool kWhole<Int4Pair> = true;

HWY_INLINE Rows<int8_t> whole_rows(const Rows<int8_t>& rows, int64_t, float*) { return rows; }
HWY_INLINE Rows<int8_t> whole_rows(const Rows<Int4Pair>& rows, int64_t dim, float* memory) {
  int8_t* to = reinterpret_cast<int8_t*>(memory);
  for (int64_t t = 0; t < rows.count; ++t) unpack(rows.first + t * rows.stride, dim, to + t * dim);
  return {to, dim, rows.count};
}

template <class Next>
void whole_scores_of_few(const Running& run, int64_t rows, const Rows<int8_t>& keys, int64_t dim,
                         const Ahead<Next>& next) {
  const int64_t stride = padded(dim);
  by_fours(rows, [&](auto number, int64_t r) HWY_ATTR {
    few_whole_scores<number.value>(run.whole_query + r * stride, stride, run.query_factors + r, keys, dim,
                                   with_first(r, next), run.scores + r * kBlock);
  });
}

template <class Next>
void whole_sums_of_few(const Running& run, int64_t rows, const Rows<int8_t>& values, int64_t dim,
                       const Ahead<Next>& next) {
  const int64_t stride = padded(dim);
  for (int64_t r = 0; r < rows; ++r) {
    run.weight_factors[r] =
        round_to_whole(run.scores + r * kBlock, kBlock, 32767.0f, run.whole_weights + r * kBlock);
  }
  by_fours(rows, [&](auto number, int64_t r) HWY_ATTR {
    add_whole<number.value>(run.whole_weights + r * kBlock, run.weight_factors + r, values, dim, with_first(r, next),
                            run.sums + r * stride, stride);
  });
}

// Rows of a tile, and the first slots of a block, after which none of its rows sees any.
template <int R>
HWY_INLINE void scores_of_tile(const Running& run, int64_t row, int64_t seen, int64_t stride, int64_t dim) {
  tile_scores<R>(run.query + row * stride, stride, run.keys, dim, seen, run.scores + row * kBlock);
}

template <int R>
HWY_INLINE void sums_of_tile(const Running& run, int64_t row, int64_t seen, const Rows<float>& values, int64_t dim) {
  const Rows<float> first{values.first, values.stride, seen};
  add_weighted<R>(run.scores + row * kBlock, first, dim, kBlock, Ahead<float>(), run.sums + row * dim, dim);
}

// Calls `work(Number<R>, r)` for the tiles of many rows.
template <class Work>
HWY_INLINE void by_tiles(int64_t rows, const Work& work) {
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows) work(Number<kTileRows>(), r);
  for (; r + 2 <= rows; r += 2) work(Number<2>(), r);
  for (; r < rows; ++r) work(Number<1>(), r);
}

// `seen(r)` slots of the block are seen by row r or an earlier one.
template <class Seen>
void scores_of_many(const Running& run, int64_t rows, const Seen& seen, int64_t stride, int64_t dim) {
  by_tiles(rows, [&](auto number, int64_t r) HWY_ATTR {
    scores_of_tile<number.value>(run, r, seen(r + number.value - 1), stride, dim);
  });
}

template <class Seen>
void sums_of_many(const Running& run, int64_t rows, const Seen& seen, const Rows<float>& values, int64_t dim) {
  by_tiles(rows, [&](auto number, int64_t r) HWY_ATTR {
    sums_of_tile<number.value>(run, r, seen(r + number.value - 1), values, dim);
  });
}

// Factors of a block's slots for many rows by pairs: of scores, and of weights before they are rounded.
struct Factors {
  HWY_ALIGN float of_scores[kBlock];
  HWY_ALIGN float of_weights[kBlock];
  float of_sums = 1.0f;
};

// A factor that is not finite makes the total of each row that sees its slot NaN.
template <class Seen>
void set_factors(const Running& run, int64_t rows, const Seen& seen, const float* key_scales, int64_t key_stride,
                 const float* value_scales, int64_t value_stride, int64_t n, Factors& factors) {
  float most = 0.0f;
  for (int64_t t = 0; t < kBlock; ++t) {
    factors.of_scores[t] = t < n ? key_scales[t * key_stride] : 0.0f;
    factors.of_weights[t] = t < n ? value_scales[t * value_stride] : 0.0f;
    if (!std::isfinite(factors.of_weights[t])) {
      for (int64_t r = 0; r < rows; ++r) {
        if (t < seen(r)) run.total[r] = std::numeric_limits<float>::quiet_NaN();
      }
      factors.of_weights[t] = 0.0f;
    }
    most = std::max(most, std::fabs(factors.of_weights[t]));
  }
  // Weights are at most one.
  const float by = most > 0.0f ? 32767.0f / most : 0.0f;
  for (float& factor : factors.of_weights) factor *= by;
  factors.of_sums = most / 32767.0f;
}

// Scores of many rows by pairs; `memory` is free.
template <class Pairs, class T, class Seen>
void scores_by_pairs(const Running& run, int64_t rows, const Seen& seen, const Rows<T>& keys, int64_t dim, const Factors& factors,
                     float* memory) {
  columns_of_keys<Pairs>(keys, dim, memory, run.keys);
  const int64_t stride = padded(dim) / 2;
  const auto* const query = reinterpret_cast<const int32_t*>(run.whole_query);
  const auto* const columns = reinterpret_cast<const int32_t*>(run.keys);
  by_tiles(rows, [&](auto number, int64_t r) HWY_ATTR {
    constexpr int R = number.value, wide = kAccumulators / R >= 4 ? 4 : 2;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(F())), end = seen(r + R - 1);
    for (int64_t t = 0; t < end; t += wide * lanes) {
      float* const scores = run.scores + r * kBlock + t;
      tile_of_pairs<Pairs, R, wide>(query + r * stride, stride, columns + t, kBlock, (dim + 1) / 2,
                                    [&](int one, int64_t at, V sums) HWY_ATTR {
                                      if constexpr (std::is_base_of_v<WholePairs, Pairs>) {
                                        sums = hn::Mul(sums, hn::Set(F(), run.query_factors[r + one]));
                                        sums = hn::Mul(sums, hn::Load(F(), factors.of_scores + t + at));
                                      }
                                      hn::Store(sums, F(), scores + one * kBlock + at);
                                    });
    }
  });
}

template <class Pairs, int R, int wide>
HWY_INLINE void add_pairs(const Running& run, int64_t row, int64_t steps, int64_t column, int64_t dim, float of_sums) {
  float* const to = run.sums + row * dim + column;
  const auto* const weights = reinterpret_cast<const int32_t*>(run.whole_weights + row * kBlock);
  tile_of_pairs<Pairs, R, wide>(weights, kBlock / 2, reinterpret_cast<const int32_t*>(run.values) + column, dim, steps,
                                [&](int one, int64_t at, V sums) HWY_ATTR {
                                  const V factor = hn::Set(F(), of_sums);
                                  float* const sum = to + one * dim + at;
                                  hn::Store(hn::MulAdd(sums, factor, hn::Load(F(), sum)), F(), sum);
                                });
}

// Sums of many rows by pairs; `dim` is padded.
template <class Pairs, class T, class Seen>
void sums_by_pairs(const Running& run, int64_t rows, const Seen& seen, const Rows<T>& values, int64_t value_dim, float of_sums) {
  columns_of_values<Pairs>(values, value_dim, reinterpret_cast<int32_t*>(run.values));
  by_tiles(rows, [&](auto number, int64_t r) HWY_ATTR {
    constexpr int R = number.value, wide = kAccumulators / R >= 4 ? 4 : 2;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(F())), dim = padded(value_dim);
    const int64_t steps = (seen(r + R - 1) + 1) / 2;
    int64_t i = 0;
    for (; i + wide * lanes <= dim; i += wide * lanes) add_pairs<Pairs, R, wide>(run, r, steps, i, dim, of_sums);
    for (; i < dim; i += lanes) add_pairs<Pairs, R, 1>(run, r, steps, i, dim, of_sums);
  });
}

// A block's rows as float32, padded.
template <class T>
HWY_INLINE void widen_rows(const Rows<T>& rows, int64_t dim, float* to) {
  for (int64_t t = 0; t < rows.count; ++t) widen(rows.first + t * rows.stride, dim, 1.0f, to + t * padded(dim));
}

// The same, or the rows themselves if they are float32 and padded.
template <class T>
HWY_INLINE Rows<float> float_rows(const Rows<T>& rows, int64_t dim, float* memory) {
  if constexpr (std::is_same_v<T, float>) {
    if (dim == padded(dim)) return rows;
  }
  widen_rows(rows, dim, memory);
  return {memory, padded(dim), rows.count};
}

// Converts the scores of a block to weights, stored by `store(row, slot, weights)`. Each step is done for all rows, so that the
// latencies of reductions across lanes overlap. Keys and values are scaled here or, if `are_scaled`, by the caller.
template <bool are_scaled, class Store>
void weigh_rows(const Attention& a, const Piece& piece, const Running& run, const Part& part, int64_t first, int64_t n,
                const Store& store) {
  const Stored& from = *part.stretch.from;
  const int64_t offset = first - part.base, value_dim = padded(a.value_dim);
  const int64_t stored = part.stretch.first_row + offset;
  const auto seen_end = [&](int64_t r) { return std::clamp<int64_t>(run.seen[r].end - first, 0, n); };
  float greatest[kRows];
  for (int64_t r = 0; r < piece.rows; ++r) {
    float* scores = run.scores + r * kBlock;
    const int64_t row = piece.first_row + r;
    const Range seen{part.kept ? 0 : std::clamp<int64_t>(run.seen[r].begin - first, 0, n), seen_end(r)};
    if (!are_scaled && from.key_scale.data) {
      scale_slots(scores, at<float>(from.key_scale, piece, piece.kv_head, stored), from.key_scale.token_stride,
                  seen.end);
    }
    if (a.softcap > 0.0f) cap(scores, a.softcap);
    if (a.bias.data) {
      const int64_t head = piece.kv_head * a.groups + row % a.groups;
      add_bias(scores, a.bias.at(piece.batch, head, row / a.groups) + part.stretch.position + offset, seen);
    }
    greatest[r] = greatest_of(scores, seen, run.top[r]);
  }
  for (int64_t r = 0; r < piece.rows; ++r) {
    weigh(run.scores + r * kBlock, greatest[r], run.top + r, run.total + r, run.sums + r * value_dim, value_dim,
          [&](int64_t t, V weights) HWY_ATTR { store(r, t, weights); });
  }
  if (are_scaled || !from.value_scale.data) return;
  const float* scales = at<float>(from.value_scale, piece, piece.kv_head, stored);
  for (int64_t r = 0; r < piece.rows; ++r) {
    scale_slots(run.scores + r * kBlock, scales, from.value_scale.token_stride, seen_end(r));
  }
}

// Rows whose pairs are taken.
template <class T>
HWY_INLINE const Rows<T>& rows_of_pairs(const Rows<T>& rows, int64_t, float*) {
  return rows;
}
HWY_INLINE Rows<int8_t> rows_of_pairs(const Rows<Int4Pair>& rows, int64_t dim, float* memory) {
  return whole_rows(rows, dim, memory);
}

// Calls `work` with the best instructions for rows of T.
template <class T, class Work>
HWY_INLINE void with_pairs(const Work& work) {
  if constexpr (kWhole<T>) {
#ifdef EC_WHOLE_IN_ONE
    if (WholePairsInOne::is_there()) return work(WholePairsInOne());
#endif
    work(WholePairs());
  } else {
#ifdef EC_PAIRS
    work(BFloat16Pairs());
#endif
  }
}

// True if many rows of this call are multiplied as pairs.
bool takes_pairs(const Attention& a) {
  // NEON multiplies as many floats in the same time.
  if (is_whole(a.stored_dtype)) return HWY_ARCH_X86;
#ifdef EC_PAIRS
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(F()));
  return a.rounded && a.key_dim % lanes == 0 && a.value_dim % lanes == 0 && BFloat16Pairs::is_there();
#else
  return false;
#endif
}

template <class T>
void attend_part(const Attention& a, const Piece& piece, const Running& run, const Part& part) {
  const Stored& from = *part.stretch.from;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(F()));
  const int64_t key_dim = padded(a.key_dim), value_dim = padded(a.value_dim);
  const bool few = piece.rows <= kFewRows, keys_fit = a.key_dim % lanes == 0, values_fit = a.value_dim % lanes == 0;
  for (int64_t first = part.first; first < part.end; first += kBlock) {
    const int64_t n = std::min(kBlock, part.end - first), stored = part.stretch.first_row + first - part.base;
    const Rows<T> keys{at<T>(from.key, piece, piece.kv_head, stored), from.key.token_stride, n};
    const Rows<T> values{at<T>(from.value, piece, piece.kv_head, stored), from.value.token_stride, n};
    const Rows<T> next{keys.first + n * keys.stride, keys.stride, std::min(kBlock, part.end - first - n)};
    const auto values_ahead = Ahead<T>::of(values, a.value_dim), keys_ahead = Ahead<T>::of(next, a.key_dim);
    const auto seen = [&](int64_t r) { return std::clamp<int64_t>(run.seen[r].end - first, 0, n); };
    if (run.by_pairs) {
      with_pairs<T>([&](auto pairs) HWY_ATTR {
        using Pairs = decltype(pairs);
        Factors factors;
        if constexpr (kWhole<T>) {
          set_factors(run, piece.rows, seen, at<float>(from.key_scale, piece, piece.kv_head, stored),
                      from.key_scale.token_stride, at<float>(from.value_scale, piece, piece.kv_head, stored),
                      from.value_scale.token_stride, n, factors);
        }
        const auto rows = rows_of_pairs(keys, a.key_dim, run.keys);
        scores_by_pairs<Pairs>(run, piece.rows, seen, rows, a.key_dim, factors, run.values);
        weigh_rows<true>(a, piece, run, part, first, n, [&](int64_t r, int64_t t, V weights) HWY_ATTR {
          store_weights(Pairs(), weights, factors.of_weights + t, run.whole_weights + r * kBlock + t);
        });
        sums_by_pairs<Pairs>(run, piece.rows, seen, rows_of_pairs(values, a.value_dim, run.keys), a.value_dim, factors.of_sums);
      });
      continue;
    }
    bool scored = false;
    if constexpr (kWhole<T>) {
      scored = few && fits_whole(a.key_dim);
      if (scored) {
        const Rows<int8_t> whole = whole_rows(keys, a.key_dim, run.keys);
        whole_scores_of_few(run, piece.rows, whole, a.key_dim, values_ahead);
      }
    }
    if constexpr (kLoads<T>) {
      if (!scored && few && keys_fit) scores_of_few(run, piece.rows, keys, a.key_dim, key_dim, values_ahead), scored = true;
    }
    if (!scored && few) {
      widen_rows(keys, a.key_dim, run.keys);
      scores_of_few(run, piece.rows, Rows<float>{run.keys, key_dim, n}, key_dim, key_dim, values_ahead);
    } else if (!scored) {
      // The memory of the values is free until the weights are known.
      const Rows<float> wide = float_rows(keys, a.key_dim, run.values);
      transpose(wide.first, wide.stride, n, key_dim, run.keys);
      scores_of_many(run, piece.rows, seen, key_dim, a.key_dim);
    }
    weigh_rows<false>(a, piece, run, part, first, n, [&](int64_t r, int64_t t, V weights) HWY_ATTR {
      hn::Store(weights, F(), run.scores + r * kBlock + t);
    });
    bool summed = false;
    if constexpr (kWhole<T>) {
      summed = few && fits_whole(a.value_dim);
      if (summed) {
        const Rows<int8_t> whole = whole_rows(values, a.value_dim, run.values);
        whole_sums_of_few(run, piece.rows, whole, a.value_dim, keys_ahead);
      }
    }
    if constexpr (kLoads<T>) {
      if (!summed && few && values_fit) {
        sums_of_few(run, piece.rows, values, a.value_dim, value_dim, keys_ahead), summed = true;
      }
    }
    if (!summed) {
      const Rows<float> wide = float_rows(values, a.value_dim, run.values);
      if (few) {
        sums_of_few(run, piece.rows, wide, value_dim, value_dim, keys_ahead);
      } else {
        sums_of_many(run, piece.rows, seen, wide, value_dim);
      }
    }
  }
}

template <class T>
void attend_stored(const Attention& a, const Piece& piece, const Sequence& sequence, const Running& run) {
  // The first row sees the oldest key, the last row the newest.
  const int64_t oldest = run.seen[0].begin, end = std::min(piece.end_key, run.seen[piece.rows - 1].end);
  int64_t base = 0;
  for (const Stretch& stretch : sequence.stretches) {
    if (stretch.count == 0) continue;
    const bool kept = base < sequence.kept;
    const int64_t first = std::max({base, piece.first_key, kept ? int64_t{0} : oldest});
    attend_part<T>(a, piece, run, Part{stretch, base, first, std::min(end, base + stretch.count), kept});
    base += stretch.count;
  }
}

template <class T>
void widen_queries(const Attention& a, const Piece& piece, float* query) {
  for (int64_t r = 0; r < piece.rows; ++r) {
    const int64_t row = piece.first_row + r, head = piece.kv_head * a.groups + row % a.groups;
    widen(at<T>(a.query, piece, head, row / a.groups), a.key_dim, a.scale, query + r * padded(a.key_dim));
  }
}

// At the end, because weights are rounded relative to the greatest score.
void add_sink(const Running& run, int64_t r, float sink, int64_t dim) {
  if (sink == kNothing) return;
  if (!(sink > run.top[r])) {
    run.total[r] += std::exp(sink - run.top[r]);
    return;
  }
  const float shrink = std::exp(run.top[r] - sink);
  run.total[r] = run.total[r] * shrink + 1.0f, run.top[r] = sink;
  for (int64_t i = 0; i < dim; ++i) run.sums[r * dim + i] *= shrink;
}

void attend_piece(const Attention& a, const Piece& piece, float* scratch) {
  const int64_t key_dim = padded(a.key_dim), value_dim = padded(a.value_dim);
  Running run;
  run.query = scratch;
  run.scores = run.query + kRows * key_dim;
  run.sums = run.scores + kRows * kBlock;
  run.keys = run.sums + kRows * value_dim;
  run.values = run.keys + kBlock * key_dim;
  run.top = run.values + kBlock * std::max(key_dim, value_dim);
  run.total = run.top + padded(kRows);
  run.query_factors = run.total + padded(kRows);
  run.weight_factors = run.query_factors + padded(kRows);
  run.whole_query = reinterpret_cast<int16_t*>(run.weight_factors + padded(kRows));
  run.whole_weights = run.whole_query + kRows * key_dim;
  run.by_pairs = piece.rows > kFewRows && takes_pairs(a);
  switch (a.query_dtype) {
    case Dtype::kFloat16: widen_queries<hwy::float16_t>(a, piece, run.query); break;
    case Dtype::kBFloat16: widen_queries<hwy::bfloat16_t>(a, piece, run.query); break;
    default: widen_queries<float>(a, piece, run.query);
  }
  const bool is_of_integers =
      is_whole(a.stored_dtype) && (run.by_pairs || (piece.rows <= kFewRows && fits_whole(a.key_dim)));
  for (int64_t r = 0; r < piece.rows && (run.by_pairs || is_of_integers); ++r) {
    const float* const row = run.query + r * key_dim;
    int16_t* const to = run.whole_query + r * key_dim;
    if (is_of_integers) {
      run.query_factors[r] = round_to_whole(row, key_dim, most_of_query(a.key_dim), to);
    } else {
#ifdef EC_PAIRS
      halves_of_row(BFloat16Pairs(), row, key_dim, to);
#endif
    }
  }
  const Sequence sequence = sequence_of(a, piece.batch);
  Range seen[kRows];
  run.seen = seen;
  for (int64_t r = 0; r < piece.rows; ++r) {
    const int64_t row = piece.first_row + r;
    seen[r] = seen_by(a, sequence, row / a.groups);
    run.top[r] = kNothing, run.total[r] = 0.0f;
  }
  std::memset(run.sums, 0, sizeof(float) * piece.rows * value_dim);
  switch (a.stored_dtype) {
    case Dtype::kFloat32: attend_stored<float>(a, piece, sequence, run); break;
    case Dtype::kFloat16: attend_stored<hwy::float16_t>(a, piece, sequence, run); break;
    case Dtype::kBFloat16: attend_stored<hwy::bfloat16_t>(a, piece, sequence, run); break;
    case Dtype::kInt8: attend_stored<int8_t>(a, piece, sequence, run); break;
    case Dtype::kInt4: attend_stored<Int4Pair>(a, piece, sequence, run); break;
  }
  for (int64_t r = 0; r < piece.rows; ++r) {
    if (a.sink.data && piece.first_key == 0) {
      const int64_t row = piece.first_row + r;
      add_sink(run, r, *a.sink.at(piece.batch, piece.kv_head * a.groups + row % a.groups, row / a.groups), value_dim);
    }
    const float* sums = run.sums + r * value_dim;
    if (piece.partial == nullptr) {
      write_row(a, piece, r, sums, run.total[r] == 0.0f ? 0.0f : 1.0f / run.total[r]);
      continue;
    }
    float* part = piece.partial + r * partial_stride(a.value_dim);
    part[0] = run.top[r], part[1] = run.total[r];
    std::memcpy(part + kPad, sums, sizeof(float) * a.value_dim);
  }
}

const char* name_of_target() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace exportable_cache::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace exportable_cache::kernels {
HWY_EXPORT(attend_piece);
HWY_EXPORT(name_of_target);

void attend_piece(const Attention& attention, const Piece& piece, float* scratch) {
  HWY_DYNAMIC_DISPATCH(attend_piece)(attention, piece, scratch);
}

bool is_supported() { return (hwy::SupportedTargets() & HWY_TARGETS) != 0; }

const char* target_name() { return HWY_DYNAMIC_DISPATCH(name_of_target)(); }

bool limit_target(const char* name) {
  // Among Highway's bits, the lower one of an architecture is the better target.
  for (int64_t bit = 0; bit < 63; ++bit) {
    const int64_t target = int64_t{1} << bit;
    if ((HWY_TARGETS & target) && std::strcmp(hwy::TargetName(target), name) == 0) {
      hwy::SetSupportedTargetsForTest(0);
      const int64_t allowed = hwy::SupportedTargets() & HWY_TARGETS & ~(target - 1);
      if ((allowed & target) == 0) return false;
      hwy::SetSupportedTargetsForTest(allowed);
      return true;
    }
  }
  return false;
}
}  // namespace exportable_cache::kernels
#endif  // HWY_ONCE
