// Float32 rows quantized to 8 or 4 bits, as caches store them.
#pragma once

#include <cstdint>

#include "attention.h"

namespace exportable_cache::kernels {

struct QuantizedRows {
  Dtype dtype = Dtype::kInt8;  // or kInt4
  int64_t rows = 0, dim = 0;   // even for kInt4
  const float* source = nullptr;  // [rows, dim]
  // [rows, dim] from -127 to 127; or [rows, dim / 2], from -7 to 7 plus 8, the first half of a row in the low bits
  void* numbers = nullptr;
  float* scales = nullptr;  // [rows]
};

// A row's largest magnitude becomes the largest integer; values are rounded to nearest, ties to even. A row with an infinite
// value or a NaN gets a NaN scale.
void quantize_rows(const QuantizedRows& quantized, const Threads& threads);

}  // namespace exportable_cache::kernels
