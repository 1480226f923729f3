// Compares apply_linears() with double precision, for shapes, groups, rows, thread counts and every instruction set of this machine.
//
// The oracle rounds activations as torchao does and multiplies unpacked values. Buffers end with the last byte, so that the address
// sanitizer detects reads after it.
#include "../src/linear.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "layers.h"
#include "test_threads.h"

using namespace exportable_cache::kernels;

namespace {

struct Case {
  int64_t rows, inputs, outputs, group;
  bool bias, positive;
  size_t threads;
  // The outputs are distributed over this many layers.
  size_t layers;
};

// The next lower bfloat16.
float cut(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits &= 0xFFFF0000u;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The largest difference, relative to the sum of the products' magnitudes.
double difference(const Case& c, std::mt19937& random) {
  std::uniform_int_distribution<int> whole(-8, 7);
  std::normal_distribution<float> normal;
  const int64_t groups = c.inputs / c.group;
  std::vector<int8_t> weights(c.outputs * c.inputs);
  std::vector<float> scales(c.outputs * groups), bias(c.outputs), source(c.rows * c.inputs);
  for (auto& weight : weights) weight = static_cast<int8_t>(whole(random));
  for (auto& scale : scales) {
    const float drawn = normal(random) * 0.1f;
    scale = cut(drawn + std::copysign(1e-3f, drawn));
  }
  for (auto& value : bias) value = normal(random);
  for (auto& value : source) value = c.positive ? std::fabs(normal(random)) + 3.0f : normal(random);
  // One row of zeros, whose scale is zero.
  if (c.rows > 2) std::fill_n(source.begin() + c.inputs, c.inputs, 0.0f);

  const int64_t bytes = bytes_of_block(c.inputs, groups);
  std::vector<std::vector<uint8_t>> packed(c.layers);
  std::vector<std::vector<float>> out(c.layers);
  std::vector<Linear> layers;
  std::vector<int64_t> first_of;
  for (size_t layer = 0; layer < c.layers; ++layer) {
    const int64_t first = first_output(c.outputs, c.layers, layer);
    const int64_t outputs = first_output(c.outputs, c.layers, layer + 1) - first;
    packed[layer].assign(blocks_of(outputs) * bytes, 0);
    out[layer].assign(c.rows * outputs, NAN);
    for (int64_t local = 0; local < outputs; ++local) {
      const int64_t output = first + local, lane = local % kBlockOutputs;
      uint8_t* block = packed[layer].data() + local / kBlockOutputs * bytes;
      double sum = 0;
      for (int64_t i = 0; i < c.inputs; ++i) {
        const int weight = weights[output * c.inputs + i];
        sum += double(scales[output * groups + i / c.group]) * weight;
        uint8_t* at = block + kBlockOutputs * (4 + 2 * groups) + i / 8 * 4 * kBlockOutputs + 4 * lane + i % 4;
        *at = static_cast<uint8_t>(*at | (weight + 8) << (i % 8 < 4 ? 0 : 4));
      }
      const float of_weights = static_cast<float>(sum);
      std::memcpy(block + 4 * lane, &of_weights, 4);
      for (int64_t group = 0; group < groups; ++group) {
        uint32_t bits;
        std::memcpy(&bits, &scales[output * groups + group], 4);
        const uint16_t half = static_cast<uint16_t>(bits >> 16);
        std::memcpy(block + 4 * kBlockOutputs + 2 * (group * kBlockOutputs + lane), &half, 2);
      }
    }
    layers.push_back({c.rows, c.inputs, outputs, groups, source.data(), packed[layer].data(),
                      c.bias ? bias.data() + first : nullptr, out[layer].data()});
    first_of.push_back(first);
  }
  std::vector<char> scratch(linear_scratch(layers.front()) + 64);
  void* aligned = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
  apply_linears(layers.data(), c.layers, threads_of(c.threads), aligned);

  double worst = 0;
  for (int64_t row = 0; row < c.rows; ++row) {
    const float* values = source.data() + row * c.inputs;
    const float lowest = std::min(0.0f, *std::min_element(values, values + c.inputs));
    const float highest = std::max(0.0f, *std::max_element(values, values + c.inputs));
    const float scale = std::max((highest - lowest) / 255.0f, 1.1920929e-7f), inverse = 1.0f / scale;
    const float zero = std::min(127.0f, std::max(-128.0f, -128.0f - std::nearbyint(lowest / scale)));
    for (int64_t output = 0; output < c.outputs; ++output) {
      double sum = c.bias ? bias[output] : 0.0, size = 1e-6;
      for (int64_t i = 0; i < c.inputs; ++i) {
        const float number = std::min(127.0f, std::max(-128.0f, std::nearbyint(values[i] * inverse) + zero));
        const double product = double(scale) * (number - zero) * scales[output * groups + i / c.group] *
                               weights[output * c.inputs + i];
        sum += product, size += std::fabs(product);
      }
      const double found = std::fabs(sum - result(layers, first_of, row, output)) / size;
      worst = std::isnan(found) ? INFINITY : std::max(worst, found);
    }
  }
  return worst;
}

}  // namespace

int main() {
  const char* names[] = {"AVX3", "AVX2", "SSE4", "NEON"};
  int failures = 0, cases = 0;
  if (!is_supported()) return 2;
  for (const char* name : names) {
    if (!limit_target(name)) continue;
    std::mt19937 random(7);
    double worst = 0;
    for (int64_t rows : {1, 2, 3, 5, 8, 11, 130}) {
      for (int64_t inputs : {32, 96, 256, 768}) {
        for (int64_t group : {32, 64, 256}) {
          if (inputs % group) continue;
          for (int64_t outputs : {1, 16, 40, 257}) {
            if (rows > 100 && outputs > 40) continue;
            const Case c{rows, inputs, outputs, group, cases % 2 == 0, cases % 3 == 0, size_t(1 + cases % 3),
                         layers_of(outputs, cases)};
            const double found = difference(c, random);
            worst = std::max(worst, found), ++cases;
            if (!(found < 1e-5)) {
              std::printf("%s: rows %ld inputs %ld outputs %ld group %ld: %g\n", target_name(), long(rows),
                          long(inputs), long(outputs), long(group), found);
              ++failures;
            }
          }
        }
      }
    }
    std::printf("%s: the greatest difference is %.1e of what is summed up\n", target_name(), worst);
  }
  std::printf("%d cases, %d failures\n", cases, failures);
  return failures ? 1 : 0;
}
