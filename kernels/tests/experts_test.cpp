// Compares apply_experts() with apply_linears() and apply_float_linears() of one row and expert at a time, for shapes, choices,
// thread counts and every instruction set of this machine. The weights are random bytes of the right form; those of an expert
// that is never chosen are NaN, so that a read of them shows.
//
// Buffers end with the last byte, so that the address sanitizer detects reads after it.
#include "../src/experts.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "test_threads.h"

using namespace exportable_cache::kernels;

namespace {

enum class Chosen { kRandom, kSame };

struct Case {
  int64_t tokens, choices, experts, inputs, outputs;
  Chosen chosen;
  bool bias, factors, shared;
  size_t threads;
};

// Weights of all experts, in a layer's form.
struct Weights4Bit {
  using L = Linear;
  std::vector<uint8_t> packed;
  int64_t groups, size;

  Weights4Bit(const Case& c, std::mt19937& random)
      : groups(c.inputs / kGroupMultiple), size(blocks_of(c.outputs) * bytes_of_block(c.inputs, groups)) {
    packed.resize(c.experts * size);
    for (auto& byte : packed) byte = static_cast<uint8_t>(random());
    const int64_t bytes = bytes_of_block(c.inputs, groups);
    for (int64_t block = 0; block < c.experts * blocks_of(c.outputs); ++block) {
      const bool odd = block >= (c.experts - 1) * blocks_of(c.outputs);
      for (int64_t i = 0; i < kBlockOutputs; ++i) {
        const float sum = odd ? NAN : static_cast<float>(random() % 64) / 32.0f - 1.0f;
        std::memcpy(packed.data() + block * bytes + 4 * i, &sum, 4);
      }
      for (int64_t i = 0; i < kBlockOutputs * groups; ++i) {
        const uint16_t scale = odd ? 0x7FC0 : static_cast<uint16_t>(0x3C00 + random() % 512);
        std::memcpy(packed.data() + block * bytes + 4 * kBlockOutputs + 2 * i, &scale, 2);
      }
    }
  }
  void set(L& layer, int64_t expert) const { layer.groups = groups, layer.weights = packed.data() + expert * size; }
  static void one(const L& layer) {
    std::vector<char> scratch(linear_scratch(layer) + 64);
    apply_linears(&layer, 1, {}, scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64);
  }
};

template <class W>
struct FloatWeights {
  using L = FloatLinearOf<W>;
  std::vector<uint8_t> packed;
  int64_t size;

  FloatWeights(const Case& c, std::mt19937& random)
      : size(blocks_of(c.outputs) * steps_of<W>(c.inputs) * kBlockOutputs * static_cast<int64_t>(sizeof(W))) {
    packed.resize(c.experts * size);
    constexpr int64_t kBytes = sizeof(W) / kInputsOfStep<W>;
    for (int64_t i = 0; i < c.experts * size / kBytes; ++i) {
      const bool odd = i * kBytes >= (c.experts - 1) * size;
      // From -1 to 1, in steps that each type has.
      const uint32_t sign = random() % 2, rest = random() % 64;
      const uint32_t bits = odd ? 0x7FC00000u : sign << 31 | (0x3F000000u + (rest << 17));
      const uint16_t half = static_cast<uint16_t>(odd ? 0x7E00 : sign << 15 | (0x3800 + (rest << 4)));
      const uint16_t brain = static_cast<uint16_t>(bits >> 16);
      const void* from = &bits;
      if (std::is_same_v<W, hwy::float16_t>) from = &half;
      if (std::is_same_v<W, BFloat16Pair>) from = &brain;
      std::memcpy(packed.data() + i * kBytes, from, kBytes);
    }
  }
  void set(L& layer, int64_t expert) const {
    layer.weights = reinterpret_cast<const W*>(packed.data() + expert * size);
  }
  static void one(const L& layer) { apply_float_linears(&layer, 1, {}); }
};

// The largest difference, relative to the largest result.
template <class Weights>
double difference(const Case& c, std::mt19937& random) {
  using L = typename Weights::L;
  const Weights weights(c, random);
  std::normal_distribution<float> normal;
  std::vector<float> source(c.tokens * (c.shared ? 1 : c.choices) * c.inputs), bias(c.experts * c.outputs);
  std::vector<float> factors(c.tokens * c.choices), out(c.tokens * (c.factors ? 1 : c.choices) * c.outputs, NAN);
  for (auto& value : source) value = normal(random);
  for (auto& value : bias) value = normal(random);
  for (auto& value : factors) value = normal(random);
  std::vector<int64_t> indices(c.tokens * c.choices, 0);
  if (c.chosen == Chosen::kRandom) {
    // Never the last.
    for (auto& index : indices) index = static_cast<int64_t>(random() % (c.experts - 1));
  }

  L layer;
  layer.inputs = c.inputs, layer.outputs = c.outputs;
  layer.source = source.data(), layer.bias = c.bias ? bias.data() : nullptr, layer.out = out.data();
  weights.set(layer, 0);
  const Choice choice{c.tokens, c.choices, c.experts, indices.data(), c.factors ? factors.data() : nullptr, c.shared};
  std::vector<char> scratch(experts_scratch(layer, choice) + 64);
  apply_experts(layer, choice, threads_of(c.threads), scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64);

  double worst = 0, most = 1e-6;
  std::vector<float> result(c.outputs);
  for (int64_t token = 0; token < c.tokens; ++token) {
    std::vector<double> sum(c.outputs, 0.0);
    for (int64_t i = 0; i < c.choices; ++i) {
      const int64_t slot = token * c.choices + i;
      L one = layer;
      one.rows = 1, one.source = source.data() + (c.shared ? token : slot) * c.inputs, one.out = result.data();
      if (c.bias) one.bias = bias.data() + indices[slot] * c.outputs;
      weights.set(one, indices[slot]);
      Weights::one(one);
      for (int64_t output = 0; output < c.outputs; ++output) {
        sum[output] += factors[slot] * result[output];
        most = std::max<double>(most, std::fabs(result[output]));
        if (c.factors) continue;
        const double found = std::fabs(out[slot * c.outputs + output] - result[output]);
        worst = std::isnan(found) ? INFINITY : std::max(worst, found);
      }
    }
    for (int64_t output = 0; c.factors && output < c.outputs; ++output) {
      const double found = std::fabs(out[token * c.outputs + output] - sum[output]);
      worst = std::isnan(found) ? INFINITY : std::max(worst, found);
    }
  }
  return worst / most;
}

template <class Weights>
void check(const char* kind, int& cases, int& failures) {
  std::mt19937 random(11);
  double worst = 0;
  for (int64_t tokens : {0, 1, 3, 40, 300}) {
    for (int64_t choices : {1, 4}) {
      for (int64_t experts : {2, 9}) {
        for (int64_t outputs : {16, 40, 272}) {
          if (tokens > 100 && outputs > 40) continue;
          const Chosen chosen = cases % 4 == 3 ? Chosen::kSame : Chosen::kRandom;
          const Case c{tokens, choices, experts, 96, outputs, chosen, cases % 2 == 0, cases % 3 != 0, cases % 5 < 3,
                       size_t(1 + cases % 3)};
          const double found = difference<Weights>(c, random);
          worst = std::max(worst, found), ++cases;
          if (!(found < 2e-6)) {
            std::printf("%s %s: tokens %ld choices %ld experts %ld outputs %ld: %g\n", target_name(), kind, long(tokens),
                        long(choices), long(experts), long(outputs), found);
            ++failures;
          }
        }
      }
    }
  }
  std::printf("%s %s: the greatest difference is %.1e of the largest result\n", target_name(), kind, worst);
}

}  // namespace

int main() {
  int failures = 0, cases = 0;
  if (!is_supported()) return 2;
  for (const char* name : {"AVX3", "AVX2", "SSE4", "NEON"}) {
    if (!limit_target(name)) continue;
    check<Weights4Bit>("4 bits", cases, failures);
    check<FloatWeights<float>>("float32", cases, failures);
    check<FloatWeights<hwy::float16_t>>("float16", cases, failures);
    check<FloatWeights<BFloat16Pair>>("bfloat16", cases, failures);
  }
  std::printf("%d cases, %d failures\n", cases, failures);
  return failures ? 1 : 0;
}
