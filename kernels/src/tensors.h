// Accessors of ExecuTorch's tensors for operators.
#pragma once

#include <executorch/runtime/core/exec_aten/exec_aten.h>
#include <executorch/runtime/core/exec_aten/util/dim_order_util.h>
#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/kernel/kernel_runtime_context.h>

#include <array>
#include <optional>

#include "attention.h"
#include "float_linear.h"

namespace exportable_cache::kernels {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::KernelRuntimeContext;

inline std::optional<Dtype> float_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return Dtype::kFloat32;
    case ScalarType::Half: return Dtype::kFloat16;
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    default: return std::nullopt;
  }
}

inline bool is_contiguous(const Tensor& tensor) {
  return executorch::runtime::is_contiguous_dim_order(tensor.dim_order().data(), tensor.dim());
}

// True if contiguous float32.
inline bool is_float(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Float && is_contiguous(tensor); }

// True if contiguous, with four dimensions.
inline bool is_cache_shaped(const Tensor& tensor) { return tensor.dim() == 4 && is_contiguous(tensor); }

constexpr size_t kMostDims = 8;

// Gives a tensor the first `kept` sizes of another, followed by `last`; false if it cannot have them.
inline bool resize_rows(const Tensor& like, size_t kept, int64_t last, Tensor& tensor) {
  if (kept >= kMostDims) return false;
  std::array<executorch::aten::SizesType, kMostDims> sizes{};
  for (size_t dim = 0; dim < kept; ++dim) sizes[dim] = like.sizes()[dim];
  sizes[kept] = static_cast<executorch::aten::SizesType>(last);
  return executorch::runtime::resize_tensor(tensor, {sizes.data(), kept + 1}) == Error::Ok;
}

template <class W>
constexpr ScalarType kStoredAs = ScalarType::Float;
template <>
inline constexpr ScalarType kStoredAs<hwy::float16_t> = ScalarType::Half;
template <>
inline constexpr ScalarType kStoredAs<BFloat16Pair> = ScalarType::BFloat16;

// Weights [blocks, steps, kBlockOutputs], optionally with the inputs of a step as last dimension, after `leading` dimensions of
// any size; null if they are others.
template <class W>
const W* packed_weights(const Tensor& weights, int64_t inputs, int64_t outputs, ssize_t leading = 0) {
  constexpr int64_t kInputs = kInputsOfStep<W>;
  const bool fits = is_contiguous(weights) && weights.scalar_type() == kStoredAs<W> && outputs > 0 &&
                    weights.dim() == leading + (kInputs > 1 ? 4 : 3) && weights.size(leading) == blocks_of(outputs) &&
                    weights.size(leading + 1) == steps_of<W>(inputs) && weights.size(leading + 2) == kBlockOutputs &&
                    (kInputs == 1 || weights.size(leading + 3) == kInputs);
  return fits ? static_cast<const W*>(weights.const_data_ptr()) : nullptr;
}

// Bytes of a block of weights with some groups.
inline int64_t bytes_of(const Linear&, int64_t inputs, int64_t groups) { return bytes_of_block(inputs, groups); }
template <class S, class Z, int kBits>
int64_t bytes_of(const GroupedLinearOf<S, Z, kBits>&, int64_t inputs, int64_t groups) {
  return bytes_of_grouped<S, Z, kBits>(inputs, groups);
}
// Number that the inputs of a group are a multiple of.
inline int64_t multiple_of(const Linear&) { return kGroupMultiple; }
template <class S, class Z, int kBits>
int64_t multiple_of(const GroupedLinearOf<S, Z, kBits>& layer) {
  return layer.kMultiple;
}

// Number of groups of an output's weights, from the block's bytes; 0 if the sizes are inconsistent.
template <class L>
int64_t groups_of(const L& layer, int64_t bytes, int64_t inputs) {
  const int64_t without = bytes_of(layer, inputs, 0), groups = (bytes - without) / (bytes_of(layer, inputs, 1) - without);
  const bool fits = groups > 0 && inputs % groups == 0 && inputs / groups % multiple_of(layer) == 0;
  return fits && bytes == bytes_of(layer, inputs, groups) ? groups : 0;
}

// Sets the blocks and the groups of a layer, after `leading` dimensions; false if the weights are others.
template <class L>
bool set_blocks(const Tensor& weights, int64_t inputs, int64_t outputs, L& layer, ssize_t leading = 0) {
  const bool is_packed = inputs > 0 && outputs > 0 && weights.dim() == leading + 2 &&
                         weights.scalar_type() == ScalarType::Byte && is_contiguous(weights);
  layer.groups = is_packed ? groups_of(layer, weights.size(leading + 1), inputs) : 0;
  if (layer.groups == 0 || weights.size(leading) != blocks_of(outputs)) return false;
  layer.weights = weights.const_data_ptr<uint8_t>();
  return true;
}

}  // namespace exportable_cache::kernels
