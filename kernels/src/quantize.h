// Rows of float32 in 8 or 4 bits, as caches keep them.
#pragma once

#include <cstdint>

#include "attention.h"

namespace exportable_cache::kernels {

struct QuantizedRows {
  Dtype dtype = Dtype::kInt8;  // or kInt4
  int64_t rows = 0, dim = 0;   // even for kInt4
  const float* source = nullptr;  // [rows, dim]
  // [rows, dim] from -127 to 127; or [rows, dim / 2], from -7 to 7 and 8 more, the first half of a row in the low bits
  void* numbers = nullptr;
  float* scales = nullptr;  // [rows]
};

// The greatest of a row becomes the greatest number, each the nearest, of two the even one. A row that holds an infinite
// number, or one that is none, gets a scale that is none.
void quantize_rows(const QuantizedRows& quantized, const Threads& threads);

}  // namespace exportable_cache::kernels
