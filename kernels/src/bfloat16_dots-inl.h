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
#endif

// Sums of kRows rows and kBlocks blocks, [kRows, kBlocks * kBlockOutputs], stored by `store`.
template <int64_t kRows, int64_t kBlocks, class Store>
HWY_NOINLINE void multiply(const BFloat16Pair* source, const BFloat16Pair* weights, int64_t steps, const Store& store) {
  constexpr int64_t kAll = kBlocks * kVectors;
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
  alignas(64) float results[kRows * kAll * kLanes];
  EC_EACH(r, kRows) EC_EACH(v, kAll) hn::Store(sums[r][v], F(), results + (r * kAll + v) * kLanes);
  store(results, kRows);
}

}  // namespace dots
}  // namespace HWY_NAMESPACE
}  // namespace exportable_cache::kernels
HWY_POP_ATTRIBUTES
#endif  // EC_DOTS
#endif  // EXPORTABLE_CACHE_BFLOAT16_DOTS_INL_H
