// Compiler helpers for both kinds of linear layers, for the current target.
#if defined(EXPORTABLE_CACHE_UNROLLED_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef EXPORTABLE_CACHE_UNROLLED_INL_H
#undef EXPORTABLE_CACHE_UNROLLED_INL_H
#else
#define EXPORTABLE_CACHE_UNROLLED_INL_H
#endif

#include <cstdint>

#include "hwy/cache_control.h"
#include "hwy/highway.h"

// Unrolled, so that arrays are registers.
#ifndef EC_EACH
#if defined(__clang__)
#define EC_EACH(i, count) _Pragma("unroll") for (int64_t i = 0; i < (count); ++i)
#else
#define EC_EACH(i, count) _Pragma("GCC unroll 32") for (int64_t i = 0; i < (count); ++i)
#endif
#endif

HWY_BEFORE_NAMESPACE();
namespace exportable_cache::kernels {
namespace HWY_NAMESPACE {

// Keeps a vector in its register. GCC would otherwise load it again for each use, or compute all products of a run of weights
// first and spill them (1.4 times the time, AVX2).
template <class V>
HWY_INLINE void keep(V& vector) {
#if HWY_COMPILER_GCC && !HWY_COMPILER_CLANG && HWY_ARCH_X86
  __asm__("" : "+v"(vector.raw));
#else
  (void)vector;
#endif
}

// One row is bound by memory, and the hardware prefetcher does not look far enough ahead. Into L2, because L1 has fewer
// buffers for pending loads.
HWY_INLINE void ask_for(const void* bytes) {
#if HWY_COMPILER_GCC || HWY_COMPILER_CLANG
  __builtin_prefetch(bytes, 0, 1);
#else
  hwy::Prefetch(bytes);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace exportable_cache::kernels
HWY_AFTER_NAMESPACE();
#endif  // EXPORTABLE_CACHE_UNROLLED_INL_H
