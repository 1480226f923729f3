// apply_float_linears() against double precision, over shapes, rows, thread counts and every instruction set here.
//
// The oracle multiplies plain numbers. Weights end with their last byte, so that the address sanitizer sees a read behind
// it.
#include "../src/float_linear.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "layers.h"
#include "test_threads.h"

using namespace exportable_cache::kernels;

namespace {

struct Case {
  int64_t rows, inputs, outputs;
  bool bias;
  size_t threads;
  // The outputs are those of so many layers.
  size_t layers = 1;
};

// The greatest difference, as a share of what the products sum up to.
double difference(const Case& c, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> weights(c.outputs * c.inputs), bias(c.outputs), source(c.rows * c.inputs);
  for (auto* numbers : {&weights, &bias, &source}) {
    for (auto& number : *numbers) number = normal(random);
  }
  std::vector<std::vector<float>> packed(c.layers), out(c.layers);
  std::vector<FloatLinear> layers;
  std::vector<int64_t> first_of;
  for (size_t layer = 0; layer < c.layers; ++layer) {
    const int64_t first = first_output(c.outputs, c.layers, layer);
    const int64_t outputs = first_output(c.outputs, c.layers, layer + 1) - first;
    packed[layer].assign(blocks_of(outputs) * kBlockOutputs * c.inputs, 0.0f);
    out[layer].assign(c.rows * outputs, NAN);
    for (int64_t output = 0; output < outputs; ++output) {
      for (int64_t i = 0; i < c.inputs; ++i) {
        const int64_t block = output / kBlockOutputs, lane = output % kBlockOutputs;
        packed[layer][(block * c.inputs + i) * kBlockOutputs + lane] = weights[(first + output) * c.inputs + i];
      }
    }
    layers.push_back({c.rows, c.inputs, outputs, source.data(), packed[layer].data(),
                      c.bias ? bias.data() + first : nullptr, out[layer].data()});
    first_of.push_back(first);
  }
  apply_float_linears(layers.data(), c.layers, threads_of(c.threads));
  double worst = 0;
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t output = 0; output < c.outputs; ++output) {
      double sum = c.bias ? bias[output] : 0.0, size = 1e-6 + std::fabs(sum);
      for (int64_t i = 0; i < c.inputs; ++i) {
        const double product = double(source[row * c.inputs + i]) * weights[output * c.inputs + i];
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
    for (int64_t rows : {1, 2, 3, 7, 8, 13, 14, 50}) {
      for (int64_t inputs : {1, 30, 97, 768}) {
        // Blocks by one, by three, by four, and one that is not full.
        for (int64_t outputs : {1, 16, 64, 83, 256}) {
          const Case c{rows, inputs, outputs, cases % 2 == 0, size_t(1 + cases % 3), layers_of(outputs, cases)};
          const double found = difference(c, random);
          worst = std::max(worst, found), ++cases;
          if (!(found < 1e-6)) {
            std::printf("%s: rows %ld inputs %ld outputs %ld: %g\n", target_name(), long(rows), long(inputs),
                        long(outputs), found);
            ++failures;
          }
        }
      }
    }
    std::printf("%s: the greatest difference is %.1e of what is summed up\n", target_name(), worst);
  }
  // More inputs than a task's rows may have: rows by the least number at a time.
  std::mt19937 random(1);
  for (int64_t rows : {1, 30}) failures += difference({rows, 20000, 40, true, 2}, random) < 1e-6 ? 0 : 1;
  std::printf("%d cases, %d failures\n", cases + 2, failures);
  return failures ? 1 : 0;
}
