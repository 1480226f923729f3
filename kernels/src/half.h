// Conversions of single values of the 16-bit formats, rounding to nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

namespace exportable_cache::kernels {

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of_bfloat16(uint16_t bits) { return float_of_bits(static_cast<uint32_t>(bits) << 16); }

inline uint16_t bfloat16_of_float(float value) {
  const uint32_t bits = bits_of_float(value);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float float_of_float16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return float_of_bits(sign | 0x7F800000 | fraction << 13);
  if (exponent != 0) return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
  // Subnormal: a multiple of 2^-24.
  const float size = static_cast<float>(fraction) * 5.9604644775390625e-8f;
  return sign ? -size : size;
}

inline uint16_t float16_of_float(float value) {
  const uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
  if (size > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00);
  if (size >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);  // 65520 and more round to infinity
  if (size < 0x38800000) {
    // Below 2^-14: adding 0.5 makes the float unit round to a multiple of 2^-24.
    const uint32_t whole = bits_of_float(float_of_bits(size) + 0.5f) - bits_of_float(0.5f);
    return static_cast<uint16_t>(sign | whole);
  }
  const uint32_t rounded = size + 0xFFF + (size >> 13 & 1);
  return static_cast<uint16_t>(sign | (rounded - 0x38000000) >> 13);
}

}  // namespace exportable_cache::kernels
