// Instructions that not all processors of one of Highway's targets have.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace exportable_cache::kernels {

// The assembler knows AVX-VNNI. Apple counts its releases of Clang otherwise.
#if defined(__x86_64__)
#if defined(__apple_build_version__)
#if __clang_major__ >= 13
#define EC_COMPILES_AVX_VNNI
#endif
#elif defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define EC_COMPILES_AVX_VNNI
#endif
#endif

#if defined(__x86_64__)
// VNNI without AVX-512: EAX of CPUID's leaf 7, part 1, bit 4. __builtin_cpu_supports does not know it in every compiler.
inline bool has_avx_vnni() {
  static const bool has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    // EAX of part 0 is the last part that there is.
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || a < 1) return false;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
  }();
  return has;
}
#endif

}  // namespace exportable_cache::kernels
