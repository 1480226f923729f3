// Compares norms, rotations and gates with double precision, and conversions bit for bit, for sizes, thread counts and every
// instruction set of this machine.
#include "../src/elementwise.h"
#include "../src/half.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "test_threads.h"

using namespace exportable_cache::kernels;

namespace {

std::vector<float> numbers(int64_t count, std::mt19937& random, float spread = 1.0f) {
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> made(count);
  for (float& number : made) number = normal(random);
  return made;
}

// The difference relative to a size.
double off(double found, double expected, double size) { return std::fabs(found - expected) / (size + 1e-6); }

double worst_of(double worst, double one) { return one <= worst ? worst : std::isnan(one) ? INFINITY : one; }

double norm(int64_t rows, int64_t size, bool weighted, size_t threads, std::mt19937& random) {
  const std::vector<float> source = numbers(rows * size, random), weight = numbers(size, random);
  std::vector<float> out(rows * size, NAN);
  apply_norm({rows, size, source.data(), weighted ? weight.data() : nullptr, 1e-6f, out.data()}, threads_of(threads));
  double worst = 0;
  for (int64_t row = 0; row < rows; ++row) {
    double sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += double(source[row * size + i]) * source[row * size + i];
    for (int64_t i = 0; i < size; ++i) {
      const double expected = source[row * size + i] / std::sqrt(sum / size + 1e-6) * (weighted ? weight[i] : 1.0);
      worst = worst_of(worst, off(out[row * size + i], expected, std::fabs(expected)));
    }
  }
  return worst;
}

double rotation(int64_t batch, int64_t heads, int64_t tokens, int64_t dim, bool tokens_first, size_t threads,
                std::mt19937& random) {
  const std::vector<float> source = numbers(batch * heads * tokens * dim, random);
  const int64_t angles = batch > 1 && heads > 1 ? batch : 1;
  const std::vector<float> cos = numbers(angles * tokens * dim, random), sin = numbers(angles * tokens * dim, random);
  std::vector<float> out(source.size(), NAN);
  Rotation r{batch, heads, tokens, dim, {}, cos.data(), sin.data(), angles > 1 ? tokens * dim : 0, out.data()};
  r.source = {source.data(), heads * tokens * dim, tokens_first ? heads * dim : dim, tokens_first ? dim : tokens * dim};
  apply_rotation(r, threads_of(threads));
  double worst = 0;
  for (int64_t row = 0; row < batch * heads * tokens; ++row) {
    const int64_t token = row % tokens, head = row / tokens % heads, one = row / tokens / heads;
    const float* const from = source.data() + one * r.source.batch_stride + head * r.source.head_stride +
                              token * r.source.token_stride;
    for (int64_t i = 0; i < dim; ++i) {
      const int64_t angle = one * r.angle_stride + token * dim + i;
      const double other = i < dim / 2 ? -double(from[i + dim / 2]) : from[i - dim / 2];
      const double first = double(from[i]) * cos[angle], second = other * sin[angle];
      worst = worst_of(worst, off(out[row * dim + i], first + second, std::fabs(first) + std::fabs(second)));
    }
  }
  return worst;
}

double gate(int64_t count, double first, double third, size_t threads, std::mt19937& random) {
  std::vector<float> source = numbers(count, random, 3.0f);
  const std::vector<float> factor = numbers(count, random);
  // Far below and above, where an exponential would overflow.
  const float extremes[] = {-1e4f, 1e4f, -90.0f, 90.0f, 0.0f};
  std::copy_n(extremes, std::min<int64_t>(count, 5), source.begin());
  std::vector<float> out(count, NAN);
  const auto a = static_cast<float>(first), b = static_cast<float>(third);
  apply_gate({count, source.data(), factor.data(), a, b, out.data()}, threads_of(threads));
  double worst = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double x = source[i], expected = x / (1 + std::exp(-x * (a + b * x * x))) * factor[i];
    // The exponent's own error grows with it.
    worst = worst_of(worst, off(out[i], expected, std::fabs(expected) * (1 + std::min(90.0, std::fabs(x * (a + b * x * x))))));
  }
  return worst;
}

// Bit for bit as single values: also ties, subnormal and infinite values.
bool narrows(int64_t count, Dtype dtype, size_t threads, std::mt19937& random) {
  std::vector<float> source(count);
  std::vector<uint16_t> out(count);
  for (float& value : source) value = float_of_bits(static_cast<uint32_t>(random()) & (random() % 2 ? ~0u : 0xFFFFF000u));
  const auto is_none = [](float value) { return std::isnan(value); };
  std::replace_if(source.begin(), source.end(), is_none, 1.0f);
  // Magnitudes that float16 has.
  for (int64_t i = 0; i < count; i += 2) {
    int exponent = 0;
    source[i] = std::ldexp(std::frexp(source[i], &exponent), static_cast<int>(random() % 45) - 28);
  }
  apply_narrowing({count, source.data(), dtype, out.data()}, threads_of(threads));
  for (int64_t i = 0; i < count; ++i) {
    if (out[i] != (dtype == Dtype::kFloat16 ? float16_of_float(source[i]) : bfloat16_of_float(source[i]))) return false;
  }
  return true;
}

// A NaN reaches the result of its row.
bool shows_not_a_number() {
  std::vector<float> source(40, 1.0f), factor(40, 1.0f), out(40);
  source[33] = std::numeric_limits<float>::quiet_NaN();
  apply_gate({40, source.data(), factor.data(), 1.0f, 0.0f, out.data()}, Threads{});
  bool in_gate = std::isnan(out[33]) && !std::isnan(out[32]);
  // A square that is infinite gives none, in whole vectors and after them.
  std::vector<float> huge(40, 1e20f);
  apply_gate({39, huge.data(), factor.data(), 1.0f, 0.0f, out.data()}, Threads{});
  in_gate = in_gate && out[0] == 1e20f && out[38] == 1e20f;
  apply_norm({2, 20, source.data(), nullptr, 1e-6f, out.data()}, Threads{});
  return in_gate && std::isnan(out[20]) && !std::isnan(out[19]);
}

}  // namespace

int main() {
  const char* const names[] = {"AVX3", "AVX2", "SSE4", "NEON"};
  int failures = 0, cases = 0;
  if (!is_supported()) return 2;
  for (const char* name : names) {
    if (!limit_target(name)) continue;
    std::mt19937 random(7);
    double worst = 0;
    const auto check = [&](double found) {
      worst = std::max(worst, found), ++cases;
      if (!(found < 2e-6)) ++failures, std::printf("%s: case %d: %g\n", target_name(), cases, found);
    };
    for (size_t threads : {1, 3}) {
      for (int64_t rows : {1, 2, 7, 130}) {
        for (int64_t size : {1, 5, 16, 63, 64, 128, 1000}) check(norm(rows, size, rows % 2 == 0, threads, random));
        for (int64_t count : {1, 15, 16, 3000}) {
          check(gate(rows * count, 1.0, 0.0, threads, random));
          check(gate(rows * count, 1.5957691216, 0.0713548163, threads, random));
          for (Dtype dtype : {Dtype::kFloat16, Dtype::kBFloat16}) check(narrows(rows * count, dtype, threads, random) ? 0 : 1);
        }
        for (int64_t dim : {2, 6, 30, 64, 128}) {
          check(rotation(1, 3, rows, dim, false, threads, random));
          check(rotation(2, 2, rows, dim, true, threads, random));
          check(rotation(2, 1, rows, dim, true, threads, random));
        }
      }
    }
    if (!shows_not_a_number()) ++failures, std::printf("%s: a value that is not a number was lost\n", target_name());
    std::printf("%s: the greatest difference is %.1e of the size\n", target_name(), worst);
  }
  std::printf("%d cases, %d failures\n", cases, failures);
  return failures ? 1 : 0;
}
