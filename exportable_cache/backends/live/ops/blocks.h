// Scores, weights and weighted sums of some query rows over a block of keys and values.
#pragma once

#include "seen_keys.h"

#include <cmath>

namespace {

// Number of rows that keys and values are multiplied by while they are in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 4;
#else
constexpr int kTileRows = 2;
#endif
// Number of vectors of a value that are in registers.
constexpr int kTileColumns = 4;

// Rows of memory to prefetch, into the L2 cache because L1 supports fewer outstanding requests.
struct Ahead {
  const char* data = nullptr;
  int64_t stride = 0, bytes = 0, count = 0;

  template <class T>
  static Ahead of(const T* rows, int64_t stride, int64_t dim, int64_t count) {
    constexpr int64_t size = sizeof(T);
    return {reinterpret_cast<const char*>(rows), stride * size, dim * size, count};
  }
  EC_INLINE void ask(int64_t first, int64_t end) const {
    for (end = std::min(end, count); first < end; ++first) {
      for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(data + first * stride + i, 0, 1);
    }
  }
};

// exp(x) for x <= 0, to 2e-7; 0 far below.
EC_INLINE Vector exp_of_low(Vector x) {
  // Adding this constant rounds to the nearest integer, which is then in the low bits.
  const Vector shift = Vector{} + 12582912.0f, least = Vector{} - 127.0f;
  Vector two_to = x * 1.44269504f;
  two_to = two_to < least ? least : two_to;
  const Vector shifted = two_to + shift;
  const Vector rest = two_to - (shifted - shift);
  Vector power = rest * 1.5353362e-4f + 1.3398874e-3f;
  power = power * rest + 9.6184374e-3f;
  power = power * rest + 5.5503325e-2f;
  power = power * rest + 0.24022648f;
  power = power * rest + 0.6931472f;
  power = power * rest + 1.0f;
  const Integers exponent = reinterpret_cast<Integers>(shifted) << 23;
  const Vector result = reinterpret_cast<Vector>(reinterpret_cast<Integers>(power) + exponent);
  return x == x ? result : x;
}

// Scores of R rows over `count` keys, four at a time. Scores after the last key repeat the last one.
template <class T, int R>
EC_INLINE void scores_of(const float* query, int64_t dim, const typename T::Stored* keys, int64_t stride, int64_t count,
                         const Ahead& ahead, float* scores) {
  for (int64_t t = 0; t < count; t += 4) {
    ahead.ask(t, t + 4);
    const typename T::Stored* key[4];
    EC_UNROLL for (int j = 0; j < 4; ++j) key[j] = keys + std::min(t + j, count - 1) * stride;
    Vector sum[R][4];
    EC_UNROLL for (int r = 0; r < R; ++r) { EC_UNROLL for (int j = 0; j < 4; ++j) sum[r][j] = Vector{}; }
    for (int64_t i = 0; i < dim; i += kLanes) {
      Vector of_key[4];
      EC_UNROLL for (int j = 0; j < 4; ++j) of_key[j] = T::vector(key[j] + i);
      EC_UNROLL for (int r = 0; r < R; ++r) {
        const Vector of_query = loaded<Vector>(query + r * dim + i);
        EC_UNROLL for (int j = 0; j < 4; ++j) sum[r][j] += of_query * of_key[j];
      }
    }
    EC_UNROLL for (int r = 0; r < R; ++r) {
      const Quad four = totals(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
      std::memcpy(scores + r * kBlock + t, &four, sizeof four);
    }
  }
  ahead.ask((count + 3) / 4 * 4, kBlock);
}

// Adds C vectors of `count` values to the sums of R rows, multiplied by their weights.
template <class T, int R, int C>
EC_INLINE void columns_of(const float* weights, const typename T::Stored* values, int64_t stride, int64_t count,
                          const Ahead& ahead, float* sums, int64_t dim) {
  Vector sum[R][C];
  EC_UNROLL for (int r = 0; r < R; ++r) {
    EC_UNROLL for (int c = 0; c < C; ++c) sum[r][c] = loaded<Vector>(sums + r * dim + c * kLanes);
  }
  for (int64_t t = 0; t < count; ++t) {
    ahead.ask(t, t + 1);
    Vector of_value[C];
    EC_UNROLL for (int c = 0; c < C; ++c) of_value[c] = T::vector(values + t * stride + c * kLanes);
    EC_UNROLL for (int r = 0; r < R; ++r) {
      const float weight = weights[r * kBlock + t];
      EC_UNROLL for (int c = 0; c < C; ++c) sum[r][c] += of_value[c] * weight;
    }
  }
  ahead.ask(count, kBlock);
  EC_UNROLL for (int r = 0; r < R; ++r) {
    EC_UNROLL for (int c = 0; c < C; ++c) std::memcpy(sums + r * dim + c * kLanes, &sum[r][c], sizeof(Vector));
  }
}

template <class T, int R>
EC_INLINE void sums_of(const float* weights, const typename T::Stored* values, int64_t stride, int64_t count,
                       const Ahead& ahead, float* sums, int64_t dim) {
  int64_t i = 0;
  for (; i + kTileColumns * kLanes <= dim; i += kTileColumns * kLanes) {
    columns_of<T, R, kTileColumns>(weights, values + i, stride, count, i ? Ahead() : ahead, sums + i, dim);
  }
  for (; i < dim; i += kLanes) {
    columns_of<T, R, 1>(weights, values + i, stride, count, i ? Ahead() : ahead, sums + i, dim);
  }
}

// Calls `of_tile(first row, number of rows)` for tiles of nearly equal size.
template <class F>
EC_INLINE void for_tiles(int64_t rows, const F& of_tile) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = rows * tile / tiles, count = rows * (tile + 1) / tiles - first;
    if (count == 1) of_tile(first, std::integral_constant<int, 1>());
    else if (count == 2) of_tile(first, std::integral_constant<int, 2>());
#if defined(__AVX512F__) || defined(__aarch64__)
    else if (count == 3) of_tile(first, std::integral_constant<int, 3>());
    else of_tile(first, std::integral_constant<int, 4>());
#endif
  }
}

// tanh(x) to 2e-7.
EC_INLINE Vector tanh_of(Vector x) {
  const Vector size = x < 0.0f ? -x : x, square = x * x;
  const Vector low = exp_of_low(size * -2.0f), high = (1.0f - low) / (1.0f + low);
  Vector small = square * -0.053968254f + 0.13333334f;
  small = small * square - 0.33333334f;
  small = small * square * x + x;
  return size < 0.25f ? small : x < 0.0f ? -high : high;
}

EC_INLINE float greatest_of(Vector v) {
  const char* p = reinterpret_cast<const char*>(&v);
  Quad most = loaded<Quad>(p);
  EC_UNROLL for (int i = 1; i < kLanes / 4; ++i) {
    const Quad other = loaded<Quad>(p + i * sizeof(Quad));
    most = other > most ? other : most;
  }
  return std::max(std::max(most[0], most[1]), std::max(most[2], most[3]));
}

// Replaces the scores of a row by weights, exp(score - maximum so far). Rescales the sums if the maximum has grown.
EC_INLINE void weigh(float* scores, float* top, float* total_so_far, float* sums, int64_t dim) {
  Vector most = Vector{} + *top;
  for (int64_t t = 0; t < kBlock; t += kLanes) {
    const Vector x = loaded<Vector>(scores + t);
    most = x > most ? x : most;
  }
  const float greatest = greatest_of(most);
  // If all keys are hidden, any finite maximum gives weights of 0.
  const float below = greatest == kNothing ? 0.0f : greatest;
  Vector sum{};
  for (int64_t t = 0; t < kBlock; t += kLanes) {
    const Vector weight = exp_of_low(loaded<Vector>(scores + t) - below);
    std::memcpy(scores + t, &weight, sizeof weight);
    sum += weight;
  }
  if (greatest != *top) {
    const float shrink = std::exp(*top - greatest);
    *total_so_far *= shrink, *top = greatest;
    for (int64_t i = 0; i < dim; i += kLanes) {
      const Vector shrunk = loaded<Vector>(sums + i) * shrink;
      std::memcpy(sums + i, &shrunk, sizeof shrunk);
    }
  }
  *total_so_far += total(sum);
}

EC_INLINE void cap(float* scores, float softcap) {
  for (int64_t t = 0; t < kBlock; t += kLanes) {
    const Vector x = tanh_of(loaded<Vector>(scores + t) * (1.0f / softcap)) * softcap;
    std::memcpy(scores + t, &x, sizeof x);
  }
}

}  // namespace
