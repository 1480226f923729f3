// Linear layers over 4-bit weights, with each row of activations quantized to 8 bits separately.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.h"

namespace exportable_cache::kernels {

// Outputs are stored in blocks of this size, each block contiguous:
//   [kBlockOutputs] float32: the sum of an output's dequantized weights
//   [groups, kBlockOutputs] bfloat16: a scale for each group of an output's weights
//   [inputs / 8, kBlockOutputs, 4] bytes: of 8 inputs, the weights of the first 4 in the low halves, plus 8
constexpr int64_t kBlockOutputs = 16;
// Groups hold a multiple of it.
constexpr int64_t kGroupMultiple = 32;

constexpr int64_t blocks_of(int64_t outputs) { return (outputs + kBlockOutputs - 1) / kBlockOutputs; }

// Layers that are computed together.
constexpr size_t kMostLayers = 4;

struct Linear {
  int64_t rows = 0, inputs = 0, outputs = 0, groups = 0;
  const float* source = nullptr;   // [rows, inputs]
  const uint8_t* weights = nullptr;  // [blocks, bytes_of_block], no alignment
  const float* bias = nullptr;     // [outputs], or null
  float* out = nullptr;            // [rows, outputs]
};

constexpr int64_t bytes_of_block(int64_t inputs, int64_t groups) {
  return kBlockOutputs * (4 + 2 * groups + inputs / 2);
}

// Bytes of scratch memory, which must be aligned to 64.
size_t linear_scratch(const Linear& linear);

// Computes up to `kMostLayers` layers of the same rows.
void apply_linears(const Linear* layers, size_t count, const Threads& threads, void* scratch);

}  // namespace exportable_cache::kernels
