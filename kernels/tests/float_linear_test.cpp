// Compares apply_float_linears() with double precision, for shapes, rows, thread counts and every instruction set of this machine.
//
// The oracle multiplies unpacked values. 16-bit weights must give the same results as in float32, bit for bit. With rounded
// inputs, the oracle rounds them, too, so that only the order of sums differs. Weights of 4 and 8 bits have scales in both dtypes, and
// zero points of their bits or in float32. Weights end with their last byte, so that the address sanitizer detects reads after it.
#include "../src/float_linear.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#include "../src/half.h"
#include "layers.h"
#include "test_threads.h"

using namespace exportable_cache::kernels;

namespace {

struct Case {
  int64_t rows, inputs, outputs;
  bool bias;
  size_t threads;
  // The outputs are distributed over this many layers.
  size_t layers = 1;
};

struct Numbers {
  std::vector<float> weights, bias, source;
};

Numbers numbers_of(const Case& c, std::mt19937& random) {
  std::normal_distribution<float> normal;
  Numbers made{std::vector<float>(c.outputs * c.inputs), std::vector<float>(c.outputs),
               std::vector<float>(c.rows * c.inputs)};
  for (auto* numbers : {&made.weights, &made.bias, &made.source}) {
    for (auto& number : *numbers) number = normal(random);
  }
  // Values that both 16-bit formats represent, some of them subnormal in float16.
  for (size_t i = 0; i < made.weights.size(); ++i) {
    const float rounded = float_of_bfloat16(bfloat16_of_float(made.weights[i] * (i % 7 ? 1.0f : 1e-5f)));
    made.weights[i] = float_of_float16(float16_of_float(rounded));
  }
  return made;
}

// Stores a weight where the kernel reads it.
void put(float& place, int64_t, float weight) { place = weight; }
void put(hwy::float16_t& place, int64_t, float weight) {
  const uint16_t bits = float16_of_float(weight);
  std::memcpy(&place, &bits, sizeof bits);
}
void put(BFloat16Pair& place, int64_t input, float weight) {
  place |= static_cast<BFloat16Pair>(bfloat16_of_float(weight)) << (16 * input);
}

// A layer's weights, rows of `plain`.
template <class W>
std::vector<W> packed_weights(const float* plain, int64_t inputs, int64_t outputs) {
  const int64_t steps = steps_of<W>(inputs);
  std::vector<W> packed(blocks_of(outputs) * kBlockOutputs * steps);
  for (int64_t output = 0; output < outputs; ++output) {
    const int64_t block = output / kBlockOutputs, lane = output % kBlockOutputs;
    for (int64_t i = 0; i < inputs; ++i) {
      put(packed[(block * steps + i / kInputsOfStep<W>) * kBlockOutputs + lane], i % kInputsOfStep<W>,
          plain[output * inputs + i]);
    }
  }
  return packed;
}

template <class L>
void run_layers(const std::vector<L>& layers, const Threads& threads) {
  apply_float_linears(layers.data(), layers.size(), threads);
}
void run_layers(const std::vector<RoundedLinear>& layers, const Threads& threads) {
  constexpr size_t kAlignment = 64;
  const size_t bytes = rounded_scratch(layers[0]);
  std::unique_ptr<void, decltype(&std::free)> scratch(
      std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment), &std::free);
  apply_float_linears(layers.data(), layers.size(), threads, scratch.get());
}

// The outputs [rows, outputs] of layers that share them, whose first ones are given.
template <class L>
std::vector<float> computed(const Case& c, const std::vector<L>& layers, const std::vector<int64_t>& first_of) {
  run_layers(layers, threads_of(c.threads));
  std::vector<float> all(c.rows * c.outputs);
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t output = 0; output < c.outputs; ++output) {
      all[row * c.outputs + output] = result(layers, first_of, row, output);
    }
  }
  return all;
}

// The outputs of a case's layers, [rows, outputs].
template <class L>
std::vector<float> results(const Case& c, const Numbers& numbers) {
  using W = std::remove_const_t<std::remove_pointer_t<decltype(L::weights)>>;
  std::vector<std::vector<W>> packed(c.layers);
  std::vector<std::vector<float>> out(c.layers);
  std::vector<L> layers;
  std::vector<int64_t> first_of;
  for (size_t layer = 0; layer < c.layers; ++layer) {
    const int64_t first = first_output(c.outputs, c.layers, layer);
    const int64_t outputs = first_output(c.outputs, c.layers, layer + 1) - first;
    packed[layer] = packed_weights<W>(numbers.weights.data() + first * c.inputs, c.inputs, outputs);
    out[layer].assign(c.rows * outputs, NAN);
    L made;
    made.rows = c.rows, made.inputs = c.inputs, made.outputs = outputs, made.source = numbers.source.data();
    made.bias = c.bias ? numbers.bias.data() + first : nullptr, made.out = out[layer].data();
    made.weights = packed[layer].data();
    layers.push_back(made);
    first_of.push_back(first);
  }
  return computed(c, layers, first_of);
}

// The largest difference from the products of `source`, relative to the sum of their magnitudes.
double difference(const Case& c, const Numbers& numbers, const std::vector<float>& source,
                  const std::vector<float>& found) {
  double worst = 0;
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t output = 0; output < c.outputs; ++output) {
      double sum = c.bias ? numbers.bias[output] : 0.0, size = 1e-6 + std::fabs(sum);
      for (int64_t i = 0; i < c.inputs; ++i) {
        const double product = double(source[row * c.inputs + i]) * numbers.weights[output * c.inputs + i];
        sum += product, size += std::fabs(product);
      }
      const double apart = std::fabs(sum - found[row * c.outputs + output]) / size;
      worst = std::isnan(apart) ? INFINITY : std::max(worst, apart);
    }
  }
  return worst;
}

// The largest difference of all kinds from their oracles.
double difference(const Case& c, std::mt19937& random) {
  const Numbers numbers = numbers_of(c, random);
  const std::vector<float> found = results<FloatLinear>(c, numbers);
  if (results<BFloat16Linear>(c, numbers) != found || results<Float16Linear>(c, numbers) != found) return INFINITY;
  std::vector<float> rounded = numbers.source;
  for (float& number : rounded) number = float_of_bfloat16(bfloat16_of_float(number));
  const std::vector<float> by_rounded = results<RoundedLinear>(c, numbers);
  const double exact = difference(c, numbers, numbers.source, found);
  // Of rounded inputs, each product is off by at most 2^-8 of itself.
  if (!(difference(c, numbers, numbers.source, by_rounded) <= 1.0 / 256 + 1e-6)) return INFINITY;
  return std::max(exact, difference(c, numbers, rounded, by_rounded));
}

// The largest difference of weights of 4 or 8 bits in groups, whose scales are of type S and zero points of type Z.
template <class S, class Z = uint8_t, int kBits = 4>
double grouped_difference(const Case& c, int64_t group, std::mt19937& random) {
  constexpr int kBias = 1 << (kBits - 1);
  std::uniform_int_distribution<int> whole(-kBias, kBias - 1);
  std::uniform_real_distribution<float> shift(-2.0f * kBias, 2.0f * kBias);
  Numbers numbers = numbers_of(c, random);
  const int64_t groups = c.inputs / group, bytes = bytes_of_grouped<S, Z, kBits>(c.inputs, groups);
  std::vector<std::vector<uint8_t>> packed(c.layers);
  std::vector<std::vector<float>> out(c.layers);
  std::vector<GroupedLinearOf<S, Z, kBits>> layers;
  std::vector<int64_t> first_of;
  for (size_t layer = 0; layer < c.layers; ++layer) {
    const int64_t first = first_output(c.outputs, c.layers, layer);
    const int64_t outputs = first_output(c.outputs, c.layers, layer + 1) - first;
    packed[layer].assign(blocks_of(outputs) * bytes, 0);
    out[layer].assign(c.rows * outputs, NAN);
    for (int64_t local = 0; local < outputs; ++local) {
      const int64_t lane = local % kBlockOutputs;
      uint8_t* const block = packed[layer].data() + local / kBlockOutputs * bytes;
      uint8_t* const zeros = block + static_cast<int64_t>(sizeof(S)) * kBlockOutputs * groups;
      uint8_t* const words = zeros + static_cast<int64_t>(sizeof(Z)) * kBlockOutputs * groups;
      for (int64_t g = 0; g < groups; ++g) {
        // The magnitudes of a layer's scales, which float16 represents.
        float* const weights = numbers.weights.data() + (first + local) * c.inputs + g * group;
        const float scale = weights[0] * 0.01f;
        S stored{};
        put(stored, 0, scale);
        std::memcpy(block + static_cast<int64_t>(sizeof(S)) * (g * kBlockOutputs + lane), &stored, sizeof(S));
        const float exact = sizeof(S) == 2 ? float_of_float16(float16_of_float(scale)) : scale;
        const Z zero = std::is_same_v<Z, float> ? static_cast<Z>(shift(random)) : static_cast<Z>(whole(random) + kBias);
        std::memcpy(zeros + static_cast<int64_t>(sizeof(Z)) * (g * kBlockOutputs + lane), &zero, sizeof(Z));
        for (int64_t j = 0; j < group; ++j) {
          const int weight = whole(random) + kBias;
          const int64_t i = g * group + j, word = 32 / kBits;
          uint8_t* const at = words + i / word * 4 * kBlockOutputs + 4 * lane + i % 4;
          *at = static_cast<uint8_t>(*at | weight << (i % word < 4 ? 0 : 4));
          const int bias = std::is_same_v<Z, float> && kBits == 8 ? kBias : 0;
          weights[j] = exact * (static_cast<float>(weight - bias) - static_cast<float>(zero));
        }
      }
    }
    GroupedLinearOf<S, Z, kBits> made;
    made.rows = c.rows, made.inputs = c.inputs, made.outputs = outputs, made.source = numbers.source.data();
    made.bias = c.bias ? numbers.bias.data() + first : nullptr, made.out = out[layer].data();
    made.weights = packed[layer].data(), made.groups = groups;
    std::vector<float> row(c.inputs);
    for (int64_t local = 0; local < outputs; ++local) {
      row_of_weights(made, local, row.data());
      if (!std::equal(row.begin(), row.end(), numbers.weights.begin() + (first + local) * c.inputs)) return INFINITY;
    }
    layers.push_back(made);
    first_of.push_back(first);
  }
  return difference(c, numbers, numbers.source, computed(c, layers, first_of));
}

// Check ties, infinities and NaN of the inputs, in as many rows as `rows`, alone and in vectors of others.
int wrong_roundings(int64_t rows) {
  const float ties[] = {1.0f + 1.0f / 256, 1.0f + 3.0f / 256, -1.0f - 1.0f / 256, 3.3895314e38f, -INFINITY, NAN,
                        float_of_bits(0x7FFFFFFF), float_of_bits(0xFFFFFFFF), 1e-30f, 0.1f};
  int wrong = 0;
  for (int64_t inputs : {1, 2, 37, 64}) {
    for (const float number : ties) {
      const int64_t at = inputs * 2 / 3;
      Numbers numbers{std::vector<float>(16 * inputs), {}, std::vector<float>(rows * inputs)};
      for (int64_t output = 0; output < 16; ++output) numbers.weights[output * inputs + at] = 1.0f;
      for (int64_t row = 0; row < rows; ++row) numbers.source[row * inputs + at] = number;
      const float expected = float_of_bfloat16(bfloat16_of_float(number));
      for (const float sum : results<RoundedLinear>({rows, inputs, 16, false, 1}, numbers)) {
        wrong += std::isnan(expected) ? !std::isnan(sum) : sum != expected;
      }
    }
  }
  return wrong;
}

// Check that rows of packed weights equal the unpacked rows.
template <class W>
bool are_rows(int64_t inputs, int64_t outputs, std::mt19937& random) {
  const Numbers numbers = numbers_of({1, inputs, outputs, false, 1}, random);
  const auto packed = packed_weights<W>(numbers.weights.data(), inputs, outputs);
  std::vector<float> found(outputs * inputs);
  for (int64_t output = 0; output < outputs; ++output) {
    row_of_weights(packed.data(), inputs, output, found.data() + output * inputs);
  }
  return found == numbers.weights;
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
        // One block, three blocks, four blocks, and a partly filled one.
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
    for (int64_t rows : {1, 2, 3, 8, 13, 50}) {
      for (int64_t inputs : {32, 96, 768}) {
        for (int64_t group : {16, 32, 96, 128}) {
          if (inputs % group) continue;
          for (int64_t outputs : {1, 16, 64, 83}) {
            const Case c{rows, inputs, outputs, cases % 2 == 0, size_t(1 + cases % 3), layers_of(outputs, cases)};
            const double found = std::max({grouped_difference<float>(c, group, random),
                                           grouped_difference<hwy::float16_t>(c, group, random),
                                           grouped_difference<float, uint8_t, 8>(c, group, random),
                                           grouped_difference<hwy::float16_t, uint8_t, 8>(c, group, random),
                                           grouped_difference<float, float, 4>(c, group, random),
                                           grouped_difference<float, float, 8>(c, group, random)});
            worst = std::max(worst, found), ++cases;
            if (!(found < 1e-6)) {
              std::printf("%s: rows %ld inputs %ld outputs %ld groups of %ld: %g\n", target_name(), long(rows),
                          long(inputs), long(outputs), long(group), found);
              ++failures;
            }
          }
        }
      }
    }
    for (int64_t rows : {1, 2, 9}) failures += wrong_roundings(rows);
    std::printf("%s: the greatest difference is %.1e of what is summed up\n", target_name(), worst);
  }
  // More inputs than a task's rows may have, so that the fewest rows are used at a time.
  std::mt19937 random(1);
  for (int64_t rows : {1, 30}) failures += difference({rows, 20000, 40, true, 2}, random) < 1e-6 ? 0 : 1;
  for (int64_t inputs : {1, 97, 768}) {
    failures += are_rows<BFloat16Pair>(inputs, 83, random) ? 0 : 1;
    failures += are_rows<hwy::float16_t>(inputs, 83, random) ? 0 : 1;
  }
  std::printf("%d cases, %d failures\n", cases + 8, failures);
  return failures ? 1 : 0;
}
