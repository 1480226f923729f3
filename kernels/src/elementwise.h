// Normalization, rotation of queries and keys, and gates: steps between linear layers that would pass over memory once for each
// elementary operator.
#pragma once

#include <cstdint>

#include "attention.h"

namespace exportable_cache::kernels {

// source * rsqrt(mean(source^2) + epsilon) * weight, for each row.
struct Norm {
  int64_t rows = 0, size = 0;
  const float* source = nullptr;  // [rows, size]
  const float* weight = nullptr;  // [size], or null
  float epsilon = 0.0f;
  float* out = nullptr;  // [rows, size]
};

// source * cos + rotated(source) * sin, where the halves (a, b) of a row are rotated to (-b, a).
struct Rotation {
  int64_t batch = 0, heads = 0, tokens = 0, dim = 0;  // dim is even
  View source;                                        // float32
  const float *cos = nullptr, *sin = nullptr;         // [batch or 1, tokens, dim]
  int64_t angle_stride = 0;                           // of the batch, 0 for one row
  float* out = nullptr;                               // [batch, heads, tokens, dim]
};

// source * sigmoid(source * (first + third * source^2)) * factor: SiLU for 1 and 0, and GELU by tanh for others.
struct Gate {
  int64_t count = 0;
  const float *source = nullptr, *factor = nullptr;
  float first = 1.0f, third = 0.0f;
  float* out = nullptr;
};

// Float32 in 16 bits: float16 or bfloat16, to nearest and ties to even.
struct Narrowing {
  int64_t count = 0;
  const float* source = nullptr;
  Dtype dtype = Dtype::kFloat16;
  uint16_t* out = nullptr;
};

void apply_narrowing(const Narrowing& narrowing, const Threads& threads);
void apply_norm(const Norm& norm, const Threads& threads);
void apply_rotation(const Rotation& rotation, const Threads& threads);
void apply_gate(const Gate& gate, const Threads& threads);

}  // namespace exportable_cache::kernels
