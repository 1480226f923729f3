// Instructions that not all processors of one of Highway's targets have.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace exportable_cache::kernels {

#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
// The assembler knows AVX-VNNI.
#define EC_COMPILES_AVX_VNNI
#endif

#if defined(__x86_64__)
// VNNI without AVX-512: EAX of CPUID's leaf 7, part 1, bit 4. __builtin_cpu_supports does not know it in every compiler.
inline bool has_avx_vnni() {
  static const bool has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
  }();
  return has;
}
#endif

}  // namespace exportable_cache::kernels
