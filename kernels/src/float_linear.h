// Linear layers over weights of float32, or of bfloat16 or float16 if these represent them exactly. All give the same
// results. Weights of 4 and 8 bits in groups are multiplied by the same floats.
#pragma once

#include <hwy/base.h>

#include <cstdint>

#include "attention.h"
#include "linear.h"

namespace exportable_cache::kernels {

struct LinearRows {
  int64_t rows = 0, inputs = 0, outputs = 0;
  const float* source = nullptr;  // [rows, inputs]
  const float* bias = nullptr;    // [outputs], or null
  float* out = nullptr;           // [rows, outputs]
};

// A step takes the inputs whose weights are in one W.
template <class W>
struct FloatLinearOf : LinearRows {
  const W* weights = nullptr;  // [blocks, steps, kBlockOutputs], zeros for padding of outputs and inputs
};

using FloatLinear = FloatLinearOf<float>;
using Float16Linear = FloatLinearOf<hwy::float16_t>;

// The bits of two bfloat16, an input in the low half and the next in the high half: a vector of 32-bit words of any length
// is converted to floats by a shift or a mask.
using BFloat16Pair = uint32_t;
using BFloat16Linear = FloatLinearOf<BFloat16Pair>;

template <class W>
constexpr int64_t kInputsOfStep = 1;
template <>
inline constexpr int64_t kInputsOfStep<BFloat16Pair> = 2;

template <class W>
constexpr int64_t steps_of(int64_t inputs) {
  return (inputs + kInputsOfStep<W> - 1) / kInputsOfStep<W>;
}

// Weights of bfloat16 whose inputs are rounded to bfloat16, to nearest and ties to even. Sums are float32. One row, and
// processors without instructions for such products, take the same inputs as floats.
struct RoundedLinear : BFloat16Linear {};

// Weights of 4 or 8 bits in groups of inputs, each its integer less its group's zero point, times its group's scale. Blocks have
// no alignment, and each is contiguous:
//   [groups, kBlockOutputs] S, float32 or float16: a scale for each group of an output's weights
//   [groups, kBlockOutputs] Z, bytes or float32: its zero point; plus 8, bytes of 8 bits plus 128
//   [inputs / 8, kBlockOutputs, 4] bytes: the integers of 4 bits, as in `Linear`; or
//   [inputs / 4, kBlockOutputs, 4] bytes: the integers of 8 bits, plus 128
template <class S, class Z = uint8_t, int kBits = 4>
struct GroupedLinearOf : LinearRows {
  // Groups hold a multiple of it.
  static constexpr int64_t kMultiple = 16;
  int64_t groups = 0;
  const uint8_t* weights = nullptr;  // [blocks, bytes_of_grouped]
};

using GroupedLinear = GroupedLinearOf<float>;
using Grouped16Linear = GroupedLinearOf<hwy::float16_t>;
using Grouped8BitLinear = GroupedLinearOf<float, uint8_t, 8>;
using Grouped16Of8BitLinear = GroupedLinearOf<hwy::float16_t, uint8_t, 8>;
// Zero points in float32, as minimums of groups give.
using ShiftedLinear = GroupedLinearOf<float, float, 4>;
using Shifted8BitLinear = GroupedLinearOf<float, float, 8>;

template <class S, class Z = uint8_t, int kBits = 4>
constexpr int64_t bytes_of_grouped(int64_t inputs, int64_t groups) {
  return kBlockOutputs * (static_cast<int64_t>(sizeof(S) + sizeof(Z)) * groups + inputs * kBits / 8);
}

// Bytes of scratch memory for the rounded inputs, which must be aligned to 64.
size_t rounded_scratch(const RoundedLinear& layer);

// Computes up to `kMostLayers` layers of the same rows.
void apply_float_linears(const RoundedLinear* layers, size_t count, const Threads& threads, void* scratch);
void apply_float_linears(const FloatLinear* layers, size_t count, const Threads& threads);
void apply_float_linears(const Float16Linear* layers, size_t count, const Threads& threads);
void apply_float_linears(const BFloat16Linear* layers, size_t count, const Threads& threads);
void apply_float_linears(const GroupedLinear* layers, size_t count, const Threads& threads);
void apply_float_linears(const Grouped16Linear* layers, size_t count, const Threads& threads);
void apply_float_linears(const Grouped8BitLinear* layers, size_t count, const Threads& threads);
void apply_float_linears(const Grouped16Of8BitLinear* layers, size_t count, const Threads& threads);
void apply_float_linears(const ShiftedLinear* layers, size_t count, const Threads& threads);
void apply_float_linears(const Shifted8BitLinear* layers, size_t count, const Threads& threads);

// Reads a row of a table whose rows are the outputs of such weights: float32 [inputs].
void row_of_weights(const hwy::float16_t* weights, int64_t inputs, int64_t output, float* row);
void row_of_weights(const BFloat16Pair* weights, int64_t inputs, int64_t output, float* row);
// The same of weights in groups, of the layer's inputs, outputs and groups.
template <class S, class Z, int kBits>
void row_of_weights(const GroupedLinearOf<S, Z, kBits>& layer, int64_t output, float* row);

}  // namespace exportable_cache::kernels
