// Linear layers over weights of float32.
#pragma once

#include <cstdint>

#include "attention.h"
#include "linear.h"

namespace exportable_cache::kernels {

struct FloatLinear {
  int64_t rows = 0, inputs = 0, outputs = 0;
  const float* source = nullptr;   // [rows, inputs]
  const float* weights = nullptr;  // [blocks, inputs, kBlockOutputs], zeros for outputs that are not there
  const float* bias = nullptr;     // [outputs], or null
  float* out = nullptr;            // [rows, outputs]
};

// Up to `kMostLayers` layers of the same rows.
void apply_float_linears(const FloatLinear* layers, size_t count, const Threads& threads);

}  // namespace exportable_cache::kernels
