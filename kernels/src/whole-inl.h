// The two products over 8-bit keys and values as integers, for the current target.
//
// Queries and weights are rounded to 16 bits per row, and products of two adjacent values are summed in 32 bits: twice the
// values per vector compared with floats, and no stored value is converted to a float. The error of a query is at most half
// of 1/32767 of its largest magnitude. That of a weight is the same of its block's with few rows, and of one with many rows.
//
// Many rows take pairs of 16 bits from a copy of the block, in which the pairs of a step are adjacent. Pairs of bfloat16
// have the same layout.
#if defined(EXPORTABLE_CACHE_WHOLE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef EXPORTABLE_CACHE_WHOLE_INL_H
#undef EXPORTABLE_CACHE_WHOLE_INL_H
#else
#define EXPORTABLE_CACHE_WHOLE_INL_H
#endif

#include <algorithm>
#include <cmath>
#include <cstring>

#include "hwy/highway.h"
#include "piece.h"
#include "processor.h"
#include "rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace exportable_cache::kernels {
namespace HWY_NAMESPACE {

using I32 = hn::RebindToSigned<F>;
using I16 = hn::RepartitionToNarrow<I32>;
using I8 = hn::Rebind<int8_t, I16>;  // as many lanes as of 16 bits
using VI32 = hn::Vec<I32>;
using VI16 = hn::Vec<I16>;

// True if rows of this width are multiplied as integers.
HWY_INLINE bool fits_whole(int64_t dim) { return dim % static_cast<int64_t>(hn::Lanes(I16())) == 0; }

// The sum of two adjacent products in each lane.
HWY_INLINE VI32 pair_products(VI16 a, VI16 b) {
#if HWY_TARGET == HWY_SSE4
  return VI32{_mm_madd_epi16(a.raw, b.raw)};
#elif HWY_TARGET == HWY_AVX2
  return VI32{_mm256_madd_epi16(a.raw, b.raw)};
#elif HWY_TARGET == HWY_AVX3
  return VI32{_mm512_madd_epi16(a.raw, b.raw)};
#elif HWY_TARGET == HWY_NEON && HWY_ARCH_ARM_A64
  return VI32{vpaddq_s32(vmull_s16(vget_low_s16(a.raw), vget_low_s16(b.raw)), vmull_high_s16(a.raw, b.raw))};
#else
  const I32 d;
  const VI32 x = hn::BitCast(d, a), y = hn::BitCast(d, b);
  const VI32 even = hn::Mul(hn::ShiftRight<16>(hn::ShiftLeft<16>(x)), hn::ShiftRight<16>(hn::ShiftLeft<16>(y)));
  return hn::Add(even, hn::Mul(hn::ShiftRight<16>(x), hn::ShiftRight<16>(y)));
#endif
}

// Rounds values to integers up to `most`, and returns their factor, which is NaN if one of them is NaN or infinite. `count` is a
// multiple of the lanes.
HWY_INLINE float round_to_whole(const float* numbers, int64_t count, float most, int16_t* to) {
  const F d;
  const hn::Rebind<int16_t, F> halves;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  V top = hn::Zero(d), odd = hn::Zero(d);
  for (int64_t i = 0; i < count; i += lanes) {
    const V x = hn::Load(d, numbers + i);
    top = hn::Max(top, hn::Abs(x));
    odd = hn::MulAdd(x, hn::Zero(d), odd);
  }
  const float greatest = hn::GetLane(hn::MaxOfLanes(d, top)), lost = hn::GetLane(hn::SumOfLanes(d, odd));
  if (!(greatest > 1e-30f)) {
    std::memset(to, 0, sizeof(int16_t) * count);
    return lost;
  }
  // Adding this number leaves the bits of the nearest integer: fewer steps than Highway's function, which is for all values.
  const V by = hn::Set(d, most / greatest), shift = hn::Set(d, 12582912.0f);
  const I32 whole;
  for (int64_t i = 0; i < count; i += lanes) {
    const V shifted = hn::MulAdd(hn::Load(d, numbers + i), by, shift);
    const VI32 rounded = hn::Sub(hn::BitCast(whole, shifted), hn::BitCast(whole, shift));
    hn::StoreU(hn::DemoteTo(halves, rounded), halves, to + i);
  }
  return greatest / most + lost;
}

// The largest integer of a query for which no sum of products overflows 32 bits.
HWY_INLINE float most_of_query(int64_t dim) {
  return static_cast<float>(std::min<int64_t>(32767, 2147483647 / (128 * dim)));
}

// For R rows and two keys: lanes whose sums are the products of each key, interleaved.
template <int R>
HWY_INLINE void two_keys(const int16_t* query, int64_t query_stride, const int8_t* first, const int8_t* second,
                         int64_t dim, VI32* both) {
  const I32 d;
  const I16 halves;
  const I8 bytes;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(halves));
  VI32 sum[R][2];
  EC_UNROLL for (int r = 0; r < R; ++r) sum[r][0] = hn::Zero(d), sum[r][1] = hn::Zero(d);
  for (int64_t i = 0; i < dim; i += lanes) {
    const VI16 x0 = hn::PromoteTo(halves, hn::LoadU(bytes, first + i));
    const VI16 x1 = hn::PromoteTo(halves, hn::LoadU(bytes, second + i));
    EC_UNROLL for (int r = 0; r < R; ++r) {
      const VI16 q = hn::Load(halves, query + r * query_stride + i);
      sum[r][0] = hn::Add(sum[r][0], pair_products(q, x0));
      sum[r][1] = hn::Add(sum[r][1], pair_products(q, x1));
    }
  }
  EC_UNROLL for (int r = 0; r < R; ++r) both[r] = neighbours_sum(d, sum[r][0], sum[r][1]);
}

// scores[r * kBlock + t] of R rows and the keys: sums of products times the row's factor. Two keys at a time, whose sums and
// operands need few registers.
template <int R, class Next>
HWY_NOINLINE void few_whole_scores(const int16_t* query, int64_t query_stride, const float* factors,
                                   const Rows<int8_t>& keys, int64_t dim, const Ahead<Next>& next, float* scores) {
  const I32 d;
  const hn::FixedTag<int32_t, 4> four;
  const hn::FixedTag<float, 4> floats;
  const int64_t n = keys.count;
  const Ahead<Next> ahead = next;
  for (int64_t t = 0; t < n; t += 4) {
    ahead.ask(t, 4);
    // After the last key, the last one is read again, and the result is ignored.
    const int8_t* k0 = keys.first + t * keys.stride;
    const int8_t* k1 = t + 1 < n ? k0 + keys.stride : k0;
    const int8_t* k2 = t + 2 < n ? k1 + keys.stride : k1;
    const int8_t* k3 = t + 3 < n ? k2 + keys.stride : k2;
    VI32 ab[R], ce[R];
    two_keys<R>(query, query_stride, k0, k1, dim, ab);
    two_keys<R>(query, query_stride, k2, k3, dim, ce);
    EC_UNROLL for (int r = 0; r < R; ++r) {
      const auto whole = hn::BitCast(four, pairs_sum(d, ab[r], ce[r]));
      hn::Store(hn::Mul(hn::ConvertTo(floats, whole), hn::Set(floats, factors[r])), floats, scores + r * kBlock + t);
    }
  }
}

// For R rows, whose weights of two values are adjacent: lower[r] and upper[r] gain the products with 2 * lanes columns of
// these.
template <int R>
HWY_INLINE void add_two(const int16_t* weights, const int8_t* first, const int8_t* second, VI32* lower, VI32* upper) {
  const I32 whole;
  const I16 halves;
  const I8 bytes;
  const auto a = hn::LoadU(bytes, first), b = hn::LoadU(bytes, second);
  const VI16 low = hn::PromoteTo(halves, hn::InterleaveLower(bytes, a, b));
  const VI16 high = hn::PromoteTo(halves, hn::InterleaveUpper(bytes, a, b));
  EC_UNROLL for (int r = 0; r < R; ++r) {
    int32_t two;
    std::memcpy(&two, weights + r * kBlock, sizeof two);
    VI16 weight = hn::BitCast(halves, hn::Set(whole, two));
    lower[r] = hn::Add(lower[r], pair_products(weight, low));
    upper[r] = hn::Add(upper[r], pair_products(weight, high));
  }
}

// sums[r * sum_stride + i] += factors[r] * weights[r * kBlock + t] * values[t][i] of R rows, whose weights after the last value
// are zeros.
template <int R, class Next>
HWY_NOINLINE void add_whole(const int16_t* weights, const float* factors, const Rows<int8_t>& values, int64_t dim,
                            const Ahead<Next>& next, float* sums, int64_t sum_stride) {
  const F d;
  const I32 whole;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d)), columns = 2 * lanes, n = values.count;
  const int64_t stride = values.stride, asked = (kBlock * columns + dim - 1) / dim;
  const Ahead<Next> ahead = next;
  for (int64_t i = 0, asks = 0; i < dim; i += columns, asks += asked) {
    ahead.ask(asks, asked);
    VI32 lower[R], upper[R];
    EC_UNROLL for (int r = 0; r < R; ++r) lower[r] = hn::Zero(whole), upper[r] = hn::Zero(whole);
    const int8_t* row = values.first + i;
    int64_t t = 0;
    for (; t + 1 < n; t += 2, row += 2 * stride) {
      add_two<R>(weights + t, row, row + stride, lower, upper);
    }
    if (t < n) add_two<R>(weights + t, row, row, lower, upper);
    EC_UNROLL for (int r = 0; r < R; ++r) {
      const V factor = hn::Set(d, factors[r]);
      float* to = sums + r * sum_stride + i;
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
      // Bytes of two rows are interleaved in blocks of 16: the lower half has the first of both blocks.
      const VI32 first = hn::ConcatLowerLower(whole, upper[r], lower[r]);
      const VI32 second = hn::ConcatUpperUpper(whole, upper[r], lower[r]);
#else
      const VI32 first = lower[r], second = upper[r];
#endif
      hn::Store(hn::MulAdd(hn::ConvertTo(d, first), factor, hn::Load(d, to)), d, to);
      hn::Store(hn::MulAdd(hn::ConvertTo(d, second), factor, hn::Load(d, to + lanes)), d, to + lanes);
    }
  }
}

// Integers, added to 32-bit integers.
struct WholePairs {
  using D = I32;
  static HWY_INLINE VI32 add(VI32 a, VI32 b, VI32 sum) {
    const I16 halves;
    return hn::Add(sum, pair_products(hn::BitCast(halves, a), hn::BitCast(halves, b)));
  }
  static HWY_INLINE V floats(VI32 sum) { return hn::ConvertTo(F(), sum); }
};

#undef EC_WHOLE_IN_ONE
#undef EC_PAIRS
#if (HWY_COMPILER_GCC || HWY_COMPILER_CLANG) && HWY_ARCH_X86 && \
    (HWY_TARGET <= HWY_AVX3 || (HWY_TARGET == HWY_AVX2 && defined(EC_COMPILES_AVX_VNNI)))
// Not all processors with AVX-512 or AVX2 have these instructions. Assembler, because intrinsics would need functions of another
// target, into which the others cannot be inlined. The prefix selects the form without AVX-512.
#define EC_WHOLE_IN_ONE
struct WholePairsInOne : WholePairs {
#if HWY_TARGET == HWY_AVX2
  static bool is_there() { return has_avx_vnni(); }
  static HWY_INLINE VI32 add(VI32 a, VI32 b, VI32 sum) {
    __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum.raw) : "x"(a.raw), "x"(b.raw));
    return sum;
  }
#else
  static bool is_there() {
    static const bool is = __builtin_cpu_supports("avx512vnni");
    return is;
  }
  static HWY_INLINE VI32 add(VI32 a, VI32 b, VI32 sum) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
    return sum;
  }
#endif
};
#endif

#if (HWY_COMPILER_GCC || HWY_COMPILER_CLANG) && HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
#define EC_PAIRS
struct BFloat16Pairs {
  using D = F;
  static bool is_there() {
    static const bool is = __builtin_cpu_supports("avx512bf16");
    return is;
  }
  static HWY_INLINE V add(VI32 a, VI32 b, V sum) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
    return sum;
  }
  static HWY_INLINE V floats(V sum) { return sum; }
};

HWY_INLINE __m256i to_bfloat16(V numbers) {
  __m256i rounded;
  __asm__("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(numbers.raw));
  return rounded;
}

// Rounds values, whose count is a multiple of the lanes.
template <class T>
HWY_INLINE void halves_of_row(BFloat16Pairs, const T* from, int64_t count, int16_t* to) {
  for (int64_t i = 0; i < count; i += 16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), to_bfloat16(load_as(F(), from + i)));
  }
}

template <class T>
HWY_INLINE VI32 pairs_of_rows(BFloat16Pairs, const T* first, const T* second) {
  const __m512i low = _mm512_cvtepu16_epi32(to_bfloat16(load_as(F(), first)));
  const __m512i high = _mm512_cvtepu16_epi32(to_bfloat16(load_as(F(), second)));
  return VI32{_mm512_or_si512(low, _mm512_slli_epi32(high, 16))};
}
#endif

// Writes the values of a row in 16 bits, and zeros after them, up to `padded(dim)`.
HWY_INLINE void halves_of_row(WholePairs, const int8_t* from, int64_t dim, int16_t* to) {
  const I16 halves;
  const I8 bytes;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(halves));
  int64_t i = 0;
  for (; i + lanes <= dim; i += lanes) hn::StoreU(hn::PromoteTo(halves, hn::LoadU(bytes, from + i)), halves, to + i);
  for (; i < dim; ++i) to[i] = from[i];
  for (; i < padded(dim); ++i) to[i] = 0;
}

// Pairs of the values of two rows, as many as a vector has.
HWY_INLINE VI32 pairs_of_rows(WholePairs, const int8_t* first, const int8_t* second) {
  const I32 whole;
  const hn::Rebind<int8_t, I32> bytes;
  const VI32 low = hn::PromoteTo(whole, hn::LoadU(bytes, first)), high = hn::PromoteTo(whole, hn::LoadU(bytes, second));
  return hn::Or(hn::And(low, hn::Set(whole, 0xFFFF)), hn::ShiftLeft<16>(high));
}

// Rounds a vector of weights, times a factor, to integers.
HWY_INLINE void store_weights(WholePairs, V weights, const float* factors, int16_t* to) {
  const F d;
  const I32 whole;
  const hn::Rebind<int16_t, F> halves;
  const V shift = hn::Set(d, 12582912.0f), shifted = hn::MulAdd(weights, hn::Load(d, factors), shift);
  hn::StoreU(hn::DemoteTo(halves, hn::Sub(hn::BitCast(whole, shifted), hn::BitCast(whole, shift))), halves, to);
}
#ifdef EC_PAIRS
HWY_INLINE void store_weights(BFloat16Pairs, V weights, const float*, int16_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_bfloat16(weights));
}
#endif

// columns[i * kBlock + t]: the values 2 i and 2 i + 1 of row t. `memory` holds the rows in 16 bits.
template <class Pairs, class T>
HWY_INLINE void columns_of_keys(const Rows<T>& keys, int64_t dim, float* memory, float* columns) {
  const int64_t stride = padded(dim) / 2;
  for (int64_t t = 0; t < keys.count; ++t) {
    halves_of_row(Pairs(), keys.first + t * keys.stride, dim, reinterpret_cast<int16_t*>(memory + t * stride));
  }
  transpose(memory, stride, keys.count, stride, columns);
}

// columns[t * padded(dim) + i]: the values i of the rows 2 t and 2 t + 1. After an odd number of rows the last one follows,
// because its weight is zero there.
template <class Pairs, class T>
HWY_INLINE void columns_of_values(const Rows<T>& values, int64_t dim, int32_t* columns) {
  const I32 whole;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(whole));
  for (int64_t t = 0; t < values.count; t += 2, columns += padded(dim)) {
    const T* const first = values.first + t * values.stride;
    const T* const second = t + 1 < values.count ? first + values.stride : first;
    int64_t i = 0;
    for (; i + lanes <= dim; i += lanes) hn::Store(pairs_of_rows(Pairs(), first + i, second + i), whole, columns + i);
    if constexpr (sizeof(T) == 1) {
      for (; i < dim; ++i) {
        columns[i] = (first[i] & 0xFFFF) | static_cast<int32_t>(static_cast<uint32_t>(second[i]) << 16);
      }
    }
    for (; i < padded(dim); ++i) columns[i] = 0;
  }
}

// sums(r, j) for R rows and `wide` vectors of columns: those of the products of `steps` pairs. The pairs of a row are adjacent, and
// those of a step `width` apart.
template <class Pairs, int R, int wide, class Store>
HWY_INLINE void tile_of_pairs(const int32_t* rows, int64_t row_stride, const int32_t* columns, int64_t width, int64_t steps,
                              const Store& store) {
  const I32 whole;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(whole));
  const typename Pairs::D sums;
  hn::Vec<typename Pairs::D> sum[R][wide];
  EC_UNROLL for (int r = 0; r < R; ++r) {
    EC_UNROLL for (int j = 0; j < wide; ++j) sum[r][j] = hn::Zero(sums);
  }
  for (int64_t step = 0; step < steps; ++step, columns += width) {
    VI32 x[wide];
    EC_UNROLL for (int j = 0; j < wide; ++j) x[j] = hn::Load(whole, columns + j * lanes);
    EC_UNROLL for (int r = 0; r < R; ++r) {
      VI32 pair = hn::Set(whole, rows[r * row_stride + step]);
      keep(pair);
      EC_UNROLL for (int j = 0; j < wide; ++j) sum[r][j] = Pairs::add(pair, x[j], sum[r][j]);
    }
  }
  EC_UNROLL for (int r = 0; r < R; ++r) {
    EC_UNROLL for (int j = 0; j < wide; ++j) store(r, j * lanes, Pairs::floats(sum[r][j]));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace exportable_cache::kernels
HWY_AFTER_NAMESPACE();
#endif  // EXPORTABLE_CACHE_WHOLE_INL_H
