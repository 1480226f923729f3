// Distribution of a case's outputs over layers that are computed together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

// Number of layers, each with at least one output.
inline size_t layers_of(int64_t outputs, int cases) {
  return static_cast<size_t>(std::min<int64_t>(outputs, 1 + cases / 2 % 4));
}

// The first output of a layer: unequal shares, one of which has only a few outputs.
inline int64_t first_output(int64_t outputs, size_t layers, size_t layer) {
  if (layer == 0) return 0;
  if (layer == layers) return outputs;
  return std::min<int64_t>(outputs - static_cast<int64_t>(layers - layer), static_cast<int64_t>(layer) * outputs * 2 / 5 + 1);
}

// The results of a layer, for a layer of all outputs.
template <class L>
double result(const std::vector<L>& layers, const std::vector<int64_t>& first_of, int64_t row, int64_t output) {
  size_t layer = layers.size() - 1;
  while (first_of[layer] > output) --layer;
  return layers[layer].out[row * layers[layer].outputs + output - first_of[layer]];
}
