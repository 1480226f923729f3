// Linear layers over 4-bit weights, compiled for every instruction set and chosen at run time.
#include "linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "linear_tasks.h"
#include "processor.h"

#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "linear.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h.
#include "hwy/highway.h"
#include "unrolled-inl.h"

#ifndef EXPORTABLE_CACHE_LINEAR_TYPES
#define EXPORTABLE_CACHE_LINEAR_TYPES
namespace exportable_cache::kernels {

// Inputs whose products are summed as integers: a part of a group.
constexpr int64_t kRun = kGroupMultiple;

}  // namespace exportable_cache::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace exportable_cache::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using I32 = hn::RebindToSigned<F>;
using I16 = hn::RepartitionToNarrow<I32>;
using U16 = hn::RebindToUnsigned<I16>;
using I8 = hn::Repartition<int8_t, I32>;
using U8 = hn::RebindToUnsigned<I8>;
using VF = hn::Vec<F>;
using VI32 = hn::Vec<I32>;
using VI16 = hn::Vec<I16>;
using VI8 = hn::Vec<I8>;
using VU8 = hn::Vec<U8>;

#define EC_EACH_ROW EC_EACH(r, kRows)
#define EC_EACH_VECTOR EC_EACH(v, kVectors)

constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(F()));
// One row multiplies a block in one pass, because a second pass would not overlap with memory reads.
constexpr int64_t kAllVectors = kBlockOutputs / kLanes;

// Rows that multiply a block together, limited by the registers for their sums.
constexpr int64_t kRowsTogether = 4;

// Pairwise sums of products of weights below 16 and 8-bit values.
HWY_INLINE VI16 pairs(VU8 weights, VI8 numbers) {
#if HWY_TARGET == HWY_SSE4
  return VI16{_mm_maddubs_epi16(weights.raw, numbers.raw)};
#elif HWY_TARGET == HWY_AVX2
  return VI16{_mm256_maddubs_epi16(weights.raw, numbers.raw)};
#elif HWY_TARGET == HWY_AVX3
  return VI16{_mm512_maddubs_epi16(weights.raw, numbers.raw)};
#elif HWY_TARGET == HWY_NEON && HWY_ARCH_ARM_A64
  const int8x16_t whole = vreinterpretq_s8_u8(weights.raw);
  return VI16{vpaddq_s16(vmull_s8(vget_low_s8(whole), vget_low_s8(numbers.raw)), vmull_high_s8(whole, numbers.raw))};
#else
  const I16 d;
  const VI16 w = hn::BitCast(d, weights), n = hn::BitCast(d, numbers);
  const VI16 even = hn::Mul(hn::And(w, hn::Set(d, 0xFF)), hn::ShiftRight<8>(hn::ShiftLeft<8>(n)));
  return hn::Add(even, hn::Mul(hn::ShiftRight<8>(w), hn::ShiftRight<8>(n)));
#endif
}

// Sums of four products in each lane.
HWY_INLINE VI32 fours(VI16 pairs) {
#if HWY_TARGET == HWY_SSE4
  return VI32{_mm_madd_epi16(pairs.raw, _mm_set1_epi16(1))};
#elif HWY_TARGET == HWY_AVX2
  return VI32{_mm256_madd_epi16(pairs.raw, _mm256_set1_epi16(1))};
#elif HWY_TARGET == HWY_AVX3
  return VI32{_mm512_madd_epi16(pairs.raw, _mm512_set1_epi16(1))};
#else
  const I32 d;
  const VI32 both = hn::BitCast(d, pairs);
  return hn::Add(hn::ShiftRight<16>(hn::ShiftLeft<16>(both)), hn::ShiftRight<16>(both));
#endif
}

// How products are summed: in 16 bits, two in each lane. The sums of 32 products of at most 15 * 128 fit.
struct PairSums {
  using Sum = VI16;
  static HWY_INLINE VI16 start(int32_t) { return hn::Zero(I16()); }
  static HWY_INLINE VI16 add(VI16 sum, VU8 weights, VI8 numbers) { return hn::Add(sum, pairs(weights, numbers)); }
  static HWY_INLINE VI32 total(VI16 sum, int32_t of_numbers) { return hn::Add(fours(sum), hn::Set(I32(), of_numbers)); }
};

#undef EC_AVX_VNNI
#if HWY_TARGET == HWY_AVX2 && defined(EC_COMPILES_AVX_VNNI)
// Not all processors with AVX2 have this instruction. Assembler, because an intrinsic would need functions of another target,
// into which Highway's cannot be inlined. The prefix selects the form without AVX-512.
#define EC_AVX_VNNI
struct FourSums {
  using Sum = VI32;
  static HWY_INLINE VI32 start(int32_t of_numbers) { return hn::Set(I32(), of_numbers); }
  static HWY_INLINE VI32 add(VI32 sum, VU8 weights, VI8 numbers) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.raw) : "x"(weights.raw), "x"(numbers.raw));
    return sum;
  }
  static HWY_INLINE VI32 total(VI32 sum, int32_t) { return sum; }
};
#endif

HWY_INLINE VI8 four_numbers(const int8_t* numbers) {
  int32_t four;
  std::memcpy(&four, numbers, sizeof(four));
  return hn::BitCast(I8(), hn::Set(I32(), four));
}

HWY_INLINE VF scales_at(const uint8_t* scales) {
  const hn::Rebind<hwy::bfloat16_t, F> d;
  return hn::PromoteTo(F(), hn::LoadU(d, reinterpret_cast<const hwy::bfloat16_t*>(scales)));
}

// kRows rows of one block, kVectors vectors of its outputs at a time. One row prefetches the same offset of the next block: at
// a whole number of pages ahead (12 KB) a thread with AVX2 takes 3.4 ms for 57 MB, one block ahead 2.4 (AMD EPYC, family 25).
template <int64_t kRows, int64_t kVectors, class Sums>
HWY_NOINLINE void multiply(const Linear& linear, const Rounded& rounded, int64_t block, int64_t row) {
  const F d;
  const U8 bytes;
  const int64_t inputs = linear.inputs, groups = linear.groups, runs = inputs / kRun, runs_of_group = runs / groups;
  const int64_t size = bytes_of_block(inputs, groups);
  const uint8_t* const start = linear.weights + block * size;
  const VU8 low = hn::Set(bytes, 15);
  float results[kRows][kBlockOutputs];
  for (int64_t lane = 0; lane < kBlockOutputs; lane += kVectors * kLanes) {
    const uint8_t* scales = start + kBlockOutputs * 4 + 2 * lane;
    const uint8_t* weights = start + kBlockOutputs * (4 + 2 * groups) + 4 * lane;
    const int8_t* numbers = rounded.numbers + row * inputs;
    const int32_t* of_runs = rounded.sums + row * runs;
    VF sums[kRows][kVectors];
    EC_EACH_ROW { EC_EACH_VECTOR sums[r][v] = hn::Zero(d); }
    for (int64_t group = 0; group < groups; ++group) {
      if (kRows == 1 && lane == 0) ask_for(scales + size);
      VF scale[kVectors];
      EC_EACH_VECTOR scale[v] = scales_at(scales + 2 * kLanes * v);
      for (int64_t run = 0; run < runs_of_group; ++run) {
        typename Sums::Sum of_run[kRows][kVectors];
        EC_EACH_ROW { EC_EACH_VECTOR of_run[r][v] = Sums::start(of_runs[r * runs]); }
        for (int64_t eight = 0; eight < kRun / 8; ++eight) {
          if (kRows == 1 && lane == 0) ask_for(weights + size);
          VU8 first[kVectors], second[kVectors];
          EC_EACH_VECTOR {
            VU8 both = hn::LoadU(bytes, weights + 4 * kLanes * v);
            keep(both);
            first[v] = hn::And(both, low), second[v] = hn::ShiftRight<4>(both);
          }
          EC_EACH_ROW {
            VI8 of_row = four_numbers(numbers + r * inputs);
            EC_EACH_VECTOR {
              of_run[r][v] = Sums::add(of_run[r][v], first[v], of_row);
              keep(of_run[r][v]);
            }
            of_row = four_numbers(numbers + r * inputs + 4);
            EC_EACH_VECTOR {
              of_run[r][v] = Sums::add(of_run[r][v], second[v], of_row);
              keep(of_run[r][v]);
            }
          }
          weights += 4 * kBlockOutputs, numbers += 8;
        }
        EC_EACH_ROW {
          EC_EACH_VECTOR {
            const VI32 sum = Sums::total(of_run[r][v], of_runs[r * runs]);
            sums[r][v] = hn::MulAdd(hn::ConvertTo(d, sum), scale[v], sums[r][v]);
          }
        }
        ++of_runs;
      }
      scales += 2 * kBlockOutputs;
    }
    EC_EACH_ROW { EC_EACH_VECTOR hn::StoreU(sums[r][v], d, results[r] + lane + kLanes * v); }
  }
  const int64_t output = block * kBlockOutputs, count = std::min(kBlockOutputs, linear.outputs - output);
  float of_weights[kBlockOutputs];
  std::memcpy(of_weights, start, sizeof(of_weights));
  EC_EACH_ROW {
    const float scale = rounded.scale[row + r], zero = rounded.zero[row + r];
    float* const out = linear.out + (row + r) * linear.outputs + output;
    for (int64_t i = 0; i < count; ++i) {
      out[i] = scale * (results[r][i] - zero * of_weights[i]) + (linear.bias ? linear.bias[output + i] : 0.0f);
    }
  }
}

#if HWY_TARGET == HWY_AVX3
#define EC_VNNI __attribute__((target("avx512vnni")))
#define EC_EACH_BLOCK EC_EACH(b, kBlocks)

// Rows and blocks that are multiplied together, and the remaining rows; with more blocks a row is read less often.
constexpr int64_t kRowsWithVnni = 6, kBlocksWithVnni = 2;

// The same for kBlocks blocks with VNNI, which not all processors with AVX-512 have.
template <int64_t kRows, int64_t kBlocks>
EC_VNNI HWY_NOINLINE void multiply_vnni(const Linear& linear, const Rounded& rounded, int64_t block, int64_t row) {
  const int64_t inputs = linear.inputs, groups = linear.groups, runs = inputs / kRun, runs_of_group = runs / groups;
  const int64_t bytes = bytes_of_block(inputs, groups);
  const uint8_t* const start = linear.weights + block * bytes;
  const uint8_t* scales = start + kBlockOutputs * 4;
  const uint8_t* weights = start + kBlockOutputs * (4 + 2 * groups);
  const int8_t* numbers = rounded.numbers + row * inputs;
  const int32_t* of_runs = rounded.sums + row * runs;
  const __m512i low = _mm512_set1_epi8(15);
  __m512 sums[kRows][kBlocks];
  EC_EACH_ROW { EC_EACH_BLOCK sums[r][b] = _mm512_setzero_ps(); }
  for (int64_t group = 0; group < groups; ++group) {
    if (kRows == 1) ask_for(scales + bytes);
    for (int64_t run = 0; run < runs_of_group; ++run) {
      __m512i of_run[kRows][kBlocks];
      EC_EACH_ROW { EC_EACH_BLOCK of_run[r][b] = _mm512_set1_epi32(of_runs[r * runs]); }
      for (int64_t eight = 0; eight < kRun / 8; ++eight) {
        if (kRows == 1) ask_for(weights + bytes);
        __m512i first[kBlocks], second[kBlocks];
        EC_EACH_BLOCK {
          const __m512i both = _mm512_loadu_si512(weights + b * bytes);
          first[b] = _mm512_and_si512(both, low);
          second[b] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
        EC_EACH_ROW {
          // Two loads of four bytes, because a load of eight would be split in other registers first.
          int32_t four;
          std::memcpy(&four, numbers + r * inputs, sizeof(four));
          VI32 of_row{_mm512_set1_epi32(four)};
          keep(of_row);
          EC_EACH_BLOCK of_run[r][b] = _mm512_dpbusd_epi32(of_run[r][b], first[b], of_row.raw);
          std::memcpy(&four, numbers + r * inputs + 4, sizeof(four));
          of_row = VI32{_mm512_set1_epi32(four)};
          keep(of_row);
          EC_EACH_BLOCK of_run[r][b] = _mm512_dpbusd_epi32(of_run[r][b], second[b], of_row.raw);
        }
        weights += 4 * kBlockOutputs, numbers += 8;
      }
      EC_EACH_BLOCK {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + b * bytes));
        const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
        EC_EACH_ROW sums[r][b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(of_run[r][b]), scale, sums[r][b]);
      }
      ++of_runs;
    }
    scales += 2 * kBlockOutputs;
  }
  EC_EACH_BLOCK {
    const int64_t output = (block + b) * kBlockOutputs, count = std::min(kBlockOutputs, linear.outputs - output);
    const __mmask16 valid = static_cast<__mmask16>((1u << count) - 1);
    const __m512 of_weights = _mm512_loadu_ps(start + b * bytes);
    const __m512 bias = linear.bias ? _mm512_maskz_loadu_ps(valid, linear.bias + output) : _mm512_setzero_ps();
    EC_EACH_ROW {
      const __m512 sum = _mm512_fnmadd_ps(_mm512_set1_ps(rounded.zero[row + r]), of_weights, sums[r][b]);
      const __m512 out = _mm512_fmadd_ps(_mm512_set1_ps(rounded.scale[row + r]), sum, bias);
      _mm512_mask_storeu_ps(linear.out + (row + r) * linear.outputs + output, valid, out);
    }
  }
}

template <int64_t kBlocks>
void multiply_rows(const Linear& linear, const Rounded& rounded, const Tile& tile, int64_t block) {
  int64_t row = tile.first_row;
  for (; row + kRowsWithVnni <= tile.last_row; row += kRowsWithVnni) {
    multiply_vnni<kRowsWithVnni, kBlocks>(linear, rounded, block, row);
  }
  for (; row + 2 <= tile.last_row; row += 2) multiply_vnni<2, kBlocks>(linear, rounded, block, row);
  for (; row < tile.last_row; ++row) multiply_vnni<1, kBlocks>(linear, rounded, block, row);
}

bool has_vnni() {
  static const bool has = __builtin_cpu_supports("avx512vnni");
  return has;
}
#endif

// kVectors: of rows that are multiplied together.
template <int64_t kVectors, class Sums>
void multiply_blocks(const Linear& linear, const Rounded& rounded, const Tile& tile) {
  for (int64_t block = tile.first_block; block < tile.last_block; ++block) {
    int64_t row = tile.first_row;
    for (; row + kRowsTogether <= tile.last_row; row += kRowsTogether) {
      multiply<kRowsTogether, kVectors, Sums>(linear, rounded, block, row);
    }
    for (; row < tile.last_row; ++row) multiply<1, kAllVectors, Sums>(linear, rounded, block, row);
  }
}

void multiply_tile(const Linear& linear, const Rounded& rounded, const Tile& tile) {
#if HWY_TARGET == HWY_AVX3
  if (has_vnni()) {
    int64_t block = tile.first_block;
    const bool one_row = tile.last_row - tile.first_row == 1;
    for (; !one_row && block + kBlocksWithVnni <= tile.last_block; block += kBlocksWithVnni) {
      multiply_rows<kBlocksWithVnni>(linear, rounded, tile, block);
    }
    for (; block < tile.last_block; ++block) multiply_rows<1>(linear, rounded, tile, block);
    return;
  }
#endif
#ifdef EC_AVX_VNNI
  if (has_avx_vnni()) return multiply_blocks<kAllVectors, FourSums>(linear, rounded, tile);
#endif
  multiply_blocks<1, PairSums>(linear, rounded, tile);
}

// Quantizes one row to 8 bits, like torchao's dynamic activations: from the minimum to the maximum, including 0.
void round_row(const float* source, int64_t inputs, const Rounded& rounded, int64_t row) {
  const F d;
  const I32 whole;
  const hn::Rebind<int16_t, F> narrow;
  const hn::Rebind<int8_t, F> narrowest;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  VF least = hn::Zero(d), most = hn::Zero(d);
  for (int64_t i = 0; i < inputs; i += lanes) {
    const VF values = hn::LoadU(d, source + i);
    least = hn::Min(least, values), most = hn::Max(most, values);
  }
  const float lowest = hn::GetLane(hn::MinOfLanes(d, least)), highest = hn::GetLane(hn::MaxOfLanes(d, most));
  const float scale = std::max((highest - lowest) / 255.0f, 1.1920929e-7f);
  const float zero = std::min(127.0f, std::max(-128.0f, -128.0f - std::nearbyint(lowest / scale)));
  rounded.scale[row] = scale, rounded.zero[row] = zero;
  const VF inverse = hn::Set(d, 1.0f / scale);
  const VI32 offset = hn::Set(whole, static_cast<int32_t>(zero));
  const VI32 floor = hn::Set(whole, -128), ceiling = hn::Set(whole, 127);
  int8_t* const numbers = rounded.numbers + row * inputs;
  for (int64_t run = 0; run < inputs / kRun; ++run) {
    VI32 sum = hn::Zero(whole);
    for (int64_t i = run * kRun; i < (run + 1) * kRun; i += lanes) {
      const VI32 nearest = hn::Add(hn::NearestInt(hn::Mul(hn::LoadU(d, source + i), inverse)), offset);
      const VI32 number = hn::Min(hn::Max(nearest, floor), ceiling);
      sum = hn::Add(sum, number);
      hn::StoreU(hn::DemoteTo(narrowest, hn::DemoteTo(narrow, number)), narrowest, numbers + i);
    }
    rounded.sums[row * (inputs / kRun) + run] = -8 * hn::GetLane(hn::SumOfLanes(whole, sum));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace exportable_cache::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace exportable_cache::kernels {
HWY_EXPORT(multiply_tile);
HWY_EXPORT(round_row);

size_t rounded_bytes(int64_t rows, int64_t inputs) {
  return aligned(rows * inputs) + aligned(4 * rows * (inputs / kRun)) + aligned(8 * rows);
}

Rounded rounded_in(int64_t rows, int64_t inputs, void* scratch) {
  char* const start = static_cast<char*>(scratch);
  const size_t numbers = aligned(rows * inputs), sums = aligned(4 * rows * (inputs / kRun));
  float* const scale = reinterpret_cast<float*>(start + numbers + sums);
  return {reinterpret_cast<int8_t*>(start), reinterpret_cast<int32_t*>(start + numbers), scale, scale + rows};
}

void round_linear_row(const float* source, int64_t inputs, const Rounded& rounded, int64_t row) {
  HWY_DYNAMIC_DISPATCH(round_row)(source, inputs, rounded, row);
}

void multiply_linear_tile(const Linear& linear, const Rounded& rounded, const Tile& tile) {
  HWY_DYNAMIC_DISPATCH(multiply_tile)(linear, rounded, tile);
}

namespace {

struct Work {
  const Linear& first;
  Rounded rounded;
  TilesOfLayers<Linear> tiles;
};

void round_one(void* context, size_t index) {
  const Work& work = *static_cast<Work*>(context);
  const int64_t row = static_cast<int64_t>(index), inputs = work.first.inputs;
  round_linear_row(work.first.source + row * inputs, inputs, work.rounded, row);
}

void multiply_one(void* context, size_t index) {
  const Work& work = *static_cast<Work*>(context);
  work.tiles.run(static_cast<int64_t>(index), [&](const Linear& linear, const Tile& tile) {
    multiply_linear_tile(linear, work.rounded, tile);
  });
}

}  // namespace

size_t linear_scratch(const Linear& linear) {
  return rounded_bytes(linear.rows, linear.inputs);
}

void apply_linears(const Linear* layers, size_t count, const Threads& threads, void* scratch) {
  if (count == 0 || layers->rows == 0) return;
  const Linear& first = *layers;
  Work work{first, rounded_in(first.rows, first.inputs, scratch), {layers, count, kTaskRows, kTogether, threads}};
  run_tasks(threads, first.rows, round_one, &work, first.rows * first.inputs > kWorthAThread);
  run_tasks(threads, work.tiles.count(), multiply_one, &work, work.tiles.is_worth_threads());
}

}  // namespace exportable_cache::kernels
#endif  // HWY_ONCE
