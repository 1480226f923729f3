// Tiles of products of bfloat16 by instructions that multiply pairs and add both products in float32, for the current target.
#if defined(EXPORTABLE_CACHE_BFLOAT16_DOTS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef EXPORTABLE_CACHE_BFLOAT16_DOTS_INL_H
#undef EXPORTABLE_CACHE_BFLOAT16_DOTS_INL_H
#else
#define EXPORTABLE_CACHE_BFLOAT16_DOTS_INL_H
#endif

#include <cstdint>

#include "float_linear.h"
#include "hwy/highway.h"
#include "unrolled-inl.h"

// Attributes of the functions with these instructions. Intrinsics, because Highway 1.0 has no target with them: the
// functions are compiled for the target and the instructions, and called if the processor has both.
#undef EC_DOTS
#if (HWY_COMPILER_GCC || HWY_COMPILER_CLANG) && HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
#include <immintrin.h>
#ifdef HWY_TARGET_STR
#define EC_DOTS HWY_TARGET_STR ",avx512bf16"
#else
#define EC_DOTS "avx512bf16"
#endif
#elif HWY_ARCH_ARM_A64 && defined(__linux__) && (!HWY_COMPILER_CLANG || HWY_COMPILER_CLANG >= 1600)
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#if defined(HWY_NEON_BF16) && HWY_TARGET == HWY_NEON_BF16 && defined(HWY_TARGET_STR)
#define EC_DOTS HWY_TARGET_STR
#elif !defined(__ARM_FEATURE_QRDMX)
// Functions of a target for ARMv8.0 can be inlined into it.
#define EC_DOTS "arch=armv8.2-a+crypto+bf16"
#endif
#endif

#ifdef EC_DOTS
HWY_BEFORE_NAMESPACE();
namespace exportable_cache::kernels {
namespace HWY_NAMESPACE {
namespace dots {

// True if the processor has the instructions.
inline bool are_there() {
#if HWY_ARCH_X86
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
#endif
}

}  // namespace dots
}  // namespace HWY_NAMESPACE
}  // namespace exportable_cache::kernels
HWY_AFTER_NAMESPACE();

HWY_PUSH_ATTRIBUTES(EC_DOTS)
namespace exportable_cache::kernels {
namespace HWY_NAMESPACE {
namespace dots {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using V = hn::Vec<F>;
using Pairs = hn::Vec<hn::RebindToUnsigned<F>>;

constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(F()));
constexpr int64_t kVectors = kBlockOutputs / kLanes;

#if HWY_ARCH_X86
constexpr int64_t kTileRows = 8, kTileBlocks = 3;
HWY_INLINE V add_products(Pairs of_row, Pairs of_outputs, V sums) {
  V added;
  added.raw = _mm512_dpbf16_ps(sums.raw, (__m512bh)of_row.raw, (__m512bh)of_outputs.raw);
  return added;
}
#else
constexpr int64_t kTileRows = 6, kTileBlocks = 1;
HWY_INLINE V add_products(Pairs of_row, Pairs of_outputs, V sums) {
  return V(vbfdotq_f32(sums.raw, vreinterpretq_bf16_u32(of_row.raw), vreinterpretq_bf16_u32(of_outputs.raw)));
}

// Adds the products of two rows with a block of outputs over two steps. BFMMLA multiplies [2, 4] inputs with [2, 4]
// weights, twice the products of BFDOT. sums[o] has [2 rows, 2 outputs]. Weights of two steps are interleaved in
// registers, because the file has the outputs of one step next to each other.
template <int64_t kRowPairs, int64_t kAll>
HWY_INLINE void add_two_steps(const bfloat16x8_t (&of_rows)[kRowPairs], const uint32x4_t (&first)[kAll],
                              const uint32x4_t (&second)[kAll], float32x4_t (&sums)[kRowPairs][2 * kAll]) {
  EC_EACH(v, kAll) {
    const bfloat16x8_t low = vreinterpretq_bf16_u32(vzip1q_u32(first[v], second[v]));
    const bfloat16x8_t high = vreinterpretq_bf16_u32(vzip2q_u32(first[v], second[v]));
    EC_EACH(r, kRowPairs) {
      sums[r][2 * v] = vbfmmlaq_f32(sums[r][2 * v], of_rows[r], low);
      sums[r][2 * v + 1] = vbfmmlaq_f32(sums[r][2 * v + 1], of_rows[r], high);
    }
  }
}

// As `multiply` below, for an even number of rows.
template <int64_t kRows, int64_t kBlocks>
HWY_INLINE void multiply_row_pairs(const BFloat16Pair* source, const BFloat16Pair* weights, int64_t steps,
                                   float* results) {
  constexpr int64_t kRowPairs = kRows / 2, kAll = kBlocks * kVectors, kOutputs = kBlocks * kBlockOutputs;
  const int64_t size = steps * kBlockOutputs;
  float32x4_t sums[kRowPairs][2 * kAll];
  EC_EACH(r, kRowPairs) EC_EACH(v, 2 * kAll) sums[r][v] = vdupq_n_f32(0.0f);
  for (int64_t step = 0; step < steps; step += 2, weights += 2 * kBlockOutputs) {
    // The last of an odd number of steps is followed by zeros.
    const bool both = step + 1 < steps;
    uint32x4_t first[kAll], second[kAll];
    EC_EACH(v, kAll) {
      const BFloat16Pair* const from = weights + v / kVectors * size + v % kVectors * kLanes;
      first[v] = vld1q_u32(from);
      second[v] = both ? vld1q_u32(from + kBlockOutputs) : vdupq_n_u32(0);
    }
    bfloat16x8_t of_rows[kRowPairs];
    EC_EACH(r, kRowPairs) {
      const BFloat16Pair* const upper = source + 2 * r * steps + step;
      const BFloat16Pair* const lower = upper + steps;
      const uint32x2_t of_upper = both ? vld1_u32(upper) : vset_lane_u32(*upper, vdup_n_u32(0), 0);
      const uint32x2_t of_lower = both ? vld1_u32(lower) : vset_lane_u32(*lower, vdup_n_u32(0), 0);
      of_rows[r] = vreinterpretq_bf16_u32(vcombine_u32(of_upper, of_lower));
    }
    add_two_steps(of_rows, first, second, sums);
  }
  EC_EACH(r, kRowPairs) EC_EACH(v, 2 * kAll) {
    vst1_f32(results + 2 * r * kOutputs + 2 * v, vget_low_f32(sums[r][v]));
    vst1_f32(results + (2 * r + 1) * kOutputs + 2 * v, vget_high_f32(sums[r][v]));
  }
}
#endif

// Sums of kRows rows and kBlocks blocks, [kRows, kBlocks * kBlockOutputs], stored by `store`.
template <int64_t kRows, int64_t kBlocks, class Store>
HWY_NOINLINE void multiply(const BFloat16Pair* source, const BFloat16Pair* weights, int64_t steps, const Store& store) {
  constexpr int64_t kAll = kBlocks * kVectors;
  alignas(64) float results[kRows * kAll * kLanes];
#if !HWY_ARCH_X86
  if constexpr (kRows % 2 == 0) {
    multiply_row_pairs<kRows, kBlocks>(source, weights, steps, results);
    store(results, kRows);
    return;
  }
#endif
  const hn::RebindToUnsigned<F> bits;
  const int64_t size = steps * kBlockOutputs;
  V sums[kRows][kAll];
  EC_EACH(r, kRows) EC_EACH(v, kAll) sums[r][v] = hn::Zero(F());
  for (int64_t step = 0; step < steps; ++step, weights += kBlockOutputs) {
    Pairs of_outputs[kAll];
    EC_EACH(v, kAll) of_outputs[v] = hn::LoadU(bits, weights + v / kVectors * size + v % kVectors * kLanes);
    EC_EACH(r, kRows) {
      Pairs of_row = hn::Set(bits, source[r * steps + step]);
      keep(of_row);
      EC_EACH(v, kAll) sums[r][v] = add_products(of_row, of_outputs[v], sums[r][v]);
    }
  }
  EC_EACH(r, kRows) EC_EACH(v, kAll) hn::Store(sums[r][v], F(), results + (r * kAll + v) * kLanes);
  store(results, kRows);
}

}  // namespace dots
}  // namespace HWY_NAMESPACE
}  // namespace exportable_cache::kernels
HWY_POP_ATTRIBUTES
#endif  // EC_DOTS
#endif  // EXPORTABLE_CACHE_BFLOAT16_DOTS_INL_H
