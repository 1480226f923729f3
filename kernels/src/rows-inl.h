// Stored rows as float32 vectors, and the two products over them, for the current target.
//
// There are two forms. With few rows (a decode step), the scores of four keys at a time are dot products over stored keys, so
// that each is read once, from memory, in order. With many rows (a prompt), keys are transposed into scratch memory first,
// and scores are vectors, without sums across lanes.
#if defined(EXPORTABLE_CACHE_ROWS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef EXPORTABLE_CACHE_ROWS_INL_H
#undef EXPORTABLE_CACHE_ROWS_INL_H
#else
#define EXPORTABLE_CACHE_ROWS_INL_H
#endif

#include <cstring>

#include "half.h"
#include "hwy/highway.h"
#include "piece.h"
#include "unrolled-inl.h"

#if defined(__clang__)
#define EC_UNROLL _Pragma("unroll")
#else
#define EC_UNROLL _Pragma("GCC unroll 16")
#endif

HWY_BEFORE_NAMESPACE();
namespace exportable_cache::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using V = hn::Vec<F>;

// Accumulators that fit into the registers with the operands.
#if HWY_TARGET == HWY_NEON || (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3)
constexpr int kAccumulators = 24;
#else
constexpr int kAccumulators = 12;
#endif

HWY_INLINE V load_as(F d, const float* p) { return hn::LoadU(d, p); }
HWY_INLINE V load_as(F d, const hwy::float16_t* p) {
  return hn::PromoteTo(d, hn::LoadU(hn::Rebind<hwy::float16_t, F>(), p));
}
HWY_INLINE V load_as(F d, const hwy::bfloat16_t* p) {
  return hn::PromoteTo(d, hn::LoadU(hn::Rebind<hwy::bfloat16_t, F>(), p));
}
HWY_INLINE V load_as(F d, const int8_t* p) {
  return hn::ConvertTo(d, hn::PromoteTo(hn::Rebind<int32_t, F>(), hn::LoadU(hn::Rebind<int8_t, F>(), p)));
}

HWY_INLINE float number(float x) { return x; }
template <class T>
HWY_INLINE uint16_t bits_of(T x) {
  // On some targets these are built-in types, on others structs.
  static_assert(sizeof(T) == 2);
  uint16_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
HWY_INLINE float number(hwy::float16_t x) { return float_of_float16(bits_of(x)); }
HWY_INLINE float number(hwy::bfloat16_t x) { return float_of_bfloat16(bits_of(x)); }
HWY_INLINE float number(int8_t x) { return x; }

// Writes `dim` values of a row as float32 times `factor`, and zeros after them, up to `padded(dim)`.
template <class T>
HWY_INLINE void widen(const T* from, int64_t dim, float factor, float* to) {
  const F d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const V by = hn::Set(d, factor);
  int64_t i = 0;
  for (; i + lanes <= dim; i += lanes) hn::Store(hn::Mul(load_as(d, from + i), by), d, to + i);
  for (; i < dim; ++i) to[i] = number(from[i]) * factor;
  for (; i < padded(dim); ++i) to[i] = 0.0f;
}

// Two values of a row.
struct Int4Pair {
  uint8_t bits;
};

template <>
HWY_INLINE void widen(const Int4Pair* from, int64_t dim, float factor, float* to) {
  const F d;
  const hn::Rebind<int32_t, F> whole;
  const hn::Rebind<uint8_t, F> bytes;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d)), half = dim / 2;
  const uint8_t* pairs = reinterpret_cast<const uint8_t*>(from);
  const auto low = hn::Set(whole, 15), eight = hn::Set(whole, 8);
  const V by = hn::Set(d, factor);
  int64_t i = 0;
  for (; i + lanes <= half; i += lanes) {
    const auto both = hn::PromoteTo(whole, hn::LoadU(bytes, pairs + i));
    hn::StoreU(hn::Mul(hn::ConvertTo(d, hn::Sub(hn::And(both, low), eight)), by), d, to + i);
    hn::StoreU(hn::Mul(hn::ConvertTo(d, hn::Sub(hn::ShiftRight<4>(both), eight)), by), d, to + half + i);
  }
  for (; i < half; ++i) {
    to[i] = static_cast<float>(int{pairs[i]} % 16 - 8) * factor;
    to[half + i] = static_cast<float>(int{pairs[i]} / 16 - 8) * factor;
  }
  for (i = 2 * half; i < padded(dim); ++i) to[i] = 0.0f;
}

// Writes the `dim` values of a row in 8 bits.
HWY_INLINE void unpack(const Int4Pair* from, int64_t dim, int8_t* to) {
  const hn::ScalableTag<uint8_t> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d)), half = dim / 2;
  const uint8_t* pairs = reinterpret_cast<const uint8_t*>(from);
  uint8_t* bytes = reinterpret_cast<uint8_t*>(to);
  const auto low = hn::Set(d, 15), eight = hn::Set(d, 8);
  int64_t i = 0;
  for (; i + lanes <= half; i += lanes) {
    const auto both = hn::LoadU(d, pairs + i);
    hn::StoreU(hn::Sub(hn::And(both, low), eight), d, bytes + i);
    hn::StoreU(hn::Sub(hn::ShiftRight<4>(both), eight), d, bytes + half + i);
  }
  for (; i < half; ++i) {
    to[i] = static_cast<int8_t>(pairs[i] % 16 - 8);
    to[half + i] = static_cast<int8_t>(pairs[i] / 16 - 8);
  }
}

// True if rows can be loaded from their middle on, as vectors.
template <class T>
constexpr bool kLoads = true;
template <>
constexpr bool kLoads<Int4Pair> = false;

// Keeps a loaded vector in a register for several products. AVX2 and SSE4 have too few registers. Without it, GCC would load
// it again for each product (1.15 times the time of a step's attention in float32, AVX-512).
HWY_INLINE void keep_one(V& loaded) {
  if constexpr (kAccumulators > 12) keep(loaded);
}
// For stored values; widened ones are in registers anyway.
template <class T>
HWY_INLINE void keep_stored(V& loaded) {
  if constexpr (sizeof(T) == 4) keep_one(loaded);
}

// Sums of adjacent lanes of two vectors, interleaved.
template <class D, class Vector = hn::Vec<D>>
HWY_INLINE Vector neighbours_sum(D d, Vector a, Vector b) {
  return hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
}

// From two of those, the sums of all lanes, in order.
template <class D, class Vector = hn::Vec<D>>
HWY_INLINE hn::Vec<hn::FixedTag<hn::TFromD<D>, 4>> pairs_sum(D d, Vector ab, Vector ce) {
  const hn::Repartition<double, D> pairs;
  const auto x = hn::BitCast(pairs, ab), y = hn::BitCast(pairs, ce);
  const Vector sums =
      hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, x, y)), hn::BitCast(d, hn::InterleaveUpper(pairs, x, y)));
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  const hn::Half<D> h;
  const hn::Half<hn::Half<D>> q;
  const auto half = hn::Add(hn::LowerHalf(h, sums), hn::UpperHalf(h, sums));
  return hn::Add(hn::LowerHalf(q, half), hn::UpperHalf(q, half));
#elif HWY_TARGET == HWY_AVX2
  const hn::Half<D> h;
  return hn::Add(hn::LowerHalf(h, sums), hn::UpperHalf(h, sums));
#else
  return sums;
#endif
}

// Stored rows of one head; the stride in elements.
template <class T>
struct Rows {
  const T* first;
  int64_t stride;
  int64_t count;
};

// Prefetches the next rows, because the processor does not foresee the change from keys to values and back. Into L2; one-byte
// values, of which L1 holds two blocks, into L1, because they are bound by arithmetic (1.05 times the time from L2).
template <class T>
struct Ahead {
  const T* rows = nullptr;
  int64_t stride = 0;
  int64_t dim = 0;
  int64_t count = 0;

  static HWY_INLINE Ahead of(const Rows<T>& rows, int64_t dim) { return {rows.first, rows.stride, dim, rows.count}; }

  HWY_INLINE void ask(int64_t first, int64_t number) const {
    constexpr int64_t kLine = 64 / sizeof(T);
    for (int64_t t = first; t < std::min(first + number, count); ++t) {
      for (int64_t at = 0; at < dim; at += kLine) {
        if constexpr (sizeof(T) == 1) hwy::Prefetch(rows + t * stride + at);
        else ask_for(rows + t * stride + at);
      }
    }
  }
};

// scores[r * kBlock + t] of R rows and the keys. `dim` is a multiple of the lanes.
template <int R, class T, class Next>
HWY_INLINE void few_scores(const float* query, int64_t query_stride, const Rows<T>& keys, int64_t dim,
                           const Ahead<Next>& ahead, float* scores) {
  const F d;
  const hn::FixedTag<float, 4> four;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t n = keys.count;
  for (int64_t t = 0; t < n; t += 4) {
    ahead.ask(t, 4);
    // After the last key, the last one is read again, and the result is ignored.
    const T* k0 = keys.first + t * keys.stride;
    const T* k1 = t + 1 < n ? k0 + keys.stride : k0;
    const T* k2 = t + 2 < n ? k1 + keys.stride : k1;
    const T* k3 = t + 3 < n ? k2 + keys.stride : k2;
    V sum[R][4];
    EC_UNROLL for (int r = 0; r < R; ++r) {
      sum[r][0] = hn::Zero(d), sum[r][1] = hn::Zero(d), sum[r][2] = hn::Zero(d), sum[r][3] = hn::Zero(d);
    }
    for (int64_t i = 0; i < dim; i += lanes) {
      V x0 = load_as(d, k0 + i), x1 = load_as(d, k1 + i), x2 = load_as(d, k2 + i), x3 = load_as(d, k3 + i);
      keep_stored<T>(x0), keep_stored<T>(x1), keep_stored<T>(x2), keep_stored<T>(x3);
      EC_UNROLL for (int r = 0; r < R; ++r) {
        V q = hn::Load(d, query + r * query_stride + i);
        keep_one(q);
        sum[r][0] = hn::MulAdd(q, x0, sum[r][0]);
        sum[r][1] = hn::MulAdd(q, x1, sum[r][1]);
        sum[r][2] = hn::MulAdd(q, x2, sum[r][2]);
        sum[r][3] = hn::MulAdd(q, x3, sum[r][3]);
      }
    }
    EC_UNROLL for (int r = 0; r < R; ++r) {
      const V ab = neighbours_sum(d, sum[r][0], sum[r][1]), ce = neighbours_sum(d, sum[r][2], sum[r][3]);
      hn::Store(pairs_sum(d, ab, ce), four, scores + r * kBlock + t);
    }
  }
}

// sums[r * sum_stride + i] += weights[r * kBlock + t] * values[t][i], for R rows and `vectors` vectors from i on. The next rows
// are prefetched one by one, because many at once wait for each other.
template <int R, int vectors, class T, class Next>
HWY_INLINE void add_columns(const float* weights, const Rows<T>& values, const Ahead<Next>& ahead, int64_t first_ahead,
                            float* sums, int64_t sum_stride) {
  const F d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  V sum[R][vectors];
  EC_UNROLL for (int r = 0; r < R; ++r) {
    EC_UNROLL for (int j = 0; j < vectors; ++j) sum[r][j] = hn::Load(d, sums + r * sum_stride + j * lanes);
  }
  for (int64_t t = 0; t < values.count; ++t) {
    ahead.ask(first_ahead + t, 1);
    V x[vectors];
    EC_UNROLL for (int j = 0; j < vectors; ++j) {
      x[j] = load_as(d, values.first + t * values.stride + j * lanes);
      if constexpr (R <= 4) keep_stored<T>(x[j]);
    }
    EC_UNROLL for (int r = 0; r < R; ++r) {
      V weight = hn::Set(d, weights[r * kBlock + t]);
      if constexpr (R <= 4) keep_one(weight);
      EC_UNROLL for (int j = 0; j < vectors; ++j) sum[r][j] = hn::MulAdd(weight, x[j], sum[r][j]);
    }
  }
  EC_UNROLL for (int r = 0; r < R; ++r) {
    EC_UNROLL for (int j = 0; j < vectors; ++j) hn::Store(sum[r][j], d, sums + r * sum_stride + j * lanes);
  }
}

// The same for all columns; `dim` is a multiple of the lanes, and `stretch` the slots that are read at a time.
template <int R, class T, class Next>
HWY_INLINE void add_weighted(const float* weights, const Rows<T>& values, int64_t dim, int64_t stretch,
                             const Ahead<Next>& ahead, float* sums, int64_t sum_stride) {
  constexpr int wide = kAccumulators / R >= 4 ? 4 : kAccumulators / R >= 2 ? 2 : 1;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(F()));
  for (int64_t t = 0; t < values.count; t += stretch) {
    const T* first = values.first + t * values.stride;
    const int64_t count = std::min(stretch, values.count - t);
    const Ahead<Next> nothing;
    int64_t i = 0;
    for (; i + wide * lanes <= dim; i += wide * lanes) {
      const Rows<T> columns{first + i, values.stride, count};
      add_columns<R, wide>(weights + t, columns, i ? nothing : ahead, t, sums + i, sum_stride);
    }
    for (; i < dim; i += lanes) {
      const Rows<T> columns{first + i, values.stride, count};
      add_columns<R, 1>(weights + t, columns, i ? nothing : ahead, t, sums + i, sum_stride);
    }
  }
}

// transposed[i * kBlock + t] = rows[t * stride + i] for `padded(dim)` values of n rows. Memory after the last row is unchanged,
// because its scores are ignored.
HWY_INLINE void transpose(const float* rows, int64_t stride, int64_t n, int64_t dim, float* transposed) {
  const hn::FixedTag<float, 4> d;
  const hn::FixedTag<double, 2> pairs;
  for (int64_t t = 0; t < n; t += 4) {
    const float* from = rows + t * stride;
    for (int64_t i = 0; i < dim; i += 4) {
      const auto zero = hn::Zero(d);
      const auto a = hn::LoadU(d, from + i);
      const auto b = t + 1 < n ? hn::LoadU(d, from + stride + i) : zero;
      const auto c = t + 2 < n ? hn::LoadU(d, from + 2 * stride + i) : zero;
      const auto e = t + 3 < n ? hn::LoadU(d, from + 3 * stride + i) : zero;
      const auto ab = hn::BitCast(pairs, hn::InterleaveLower(d, a, b)),
                 ab2 = hn::BitCast(pairs, hn::InterleaveUpper(d, a, b));
      const auto ce = hn::BitCast(pairs, hn::InterleaveLower(d, c, e)),
                 ce2 = hn::BitCast(pairs, hn::InterleaveUpper(d, c, e));
      float* to = transposed + i * kBlock + t;
      hn::Store(hn::BitCast(d, hn::InterleaveLower(pairs, ab, ce)), d, to);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(pairs, ab, ce)), d, to + kBlock);
      hn::Store(hn::BitCast(d, hn::InterleaveLower(pairs, ab2, ce2)), d, to + 2 * kBlock);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(pairs, ab2, ce2)), d, to + 3 * kBlock);
    }
  }
}

// scores[r * kBlock + t] of R rows and at least the first n of a block's transposed keys.
template <int R>
HWY_INLINE void tile_scores(const float* query, int64_t query_stride, const float* transposed, int64_t dim, int64_t n,
                            float* scores) {
  constexpr int wide = kAccumulators / R >= 4 ? 4 : 2;
  const F d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t t = 0; t < n; t += wide * lanes) {
    V sum[R][wide];
    EC_UNROLL for (int r = 0; r < R; ++r) { EC_UNROLL for (int j = 0; j < wide; ++j) sum[r][j] = hn::Zero(d); }
    for (int64_t i = 0; i < dim; ++i) {
      V x[wide];
      EC_UNROLL for (int j = 0; j < wide; ++j) x[j] = hn::Load(d, transposed + i * kBlock + t + j * lanes);
      EC_UNROLL for (int r = 0; r < R; ++r) {
        const V q = hn::Set(d, query[r * query_stride + i]);
        EC_UNROLL for (int j = 0; j < wide; ++j) sum[r][j] = hn::MulAdd(q, x[j], sum[r][j]);
      }
    }
    EC_UNROLL for (int r = 0; r < R; ++r) {
      EC_UNROLL for (int j = 0; j < wide; ++j) hn::Store(sum[r][j], d, scores + r * kBlock + t + j * lanes);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace exportable_cache::kernels
HWY_AFTER_NAMESPACE();
#endif  // EXPORTABLE_CACHE_ROWS_INL_H
