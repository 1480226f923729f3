// Compares quantize_rows() with scalar code, for sizes, thread counts and every instruction set of this machine, bit for bit.
#include "../src/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "test_threads.h"

using namespace exportable_cache::kernels;

namespace {

struct Rounded {
  std::vector<uint8_t> numbers;
  std::vector<float> scales;
};

Rounded found(const std::vector<float>& source, int64_t rows, int64_t dim, bool packed, size_t threads) {
  // Buffers end with their last byte, so that the address sanitizer detects writes after it.
  Rounded out{std::vector<uint8_t>(rows * dim / (packed ? 2 : 1), 0xAA), std::vector<float>(rows, NAN)};
  quantize_rows({packed ? Dtype::kInt4 : Dtype::kInt8, rows, dim, source.data(), out.numbers.data(), out.scales.data()},
                threads_of(threads));
  return out;
}

Rounded expected(const std::vector<float>& source, int64_t rows, int64_t dim, bool packed) {
  Rounded out{std::vector<uint8_t>(rows * dim / (packed ? 2 : 1)), std::vector<float>(rows)};
  const float most = packed ? 7.0f : 127.0f;
  for (int64_t row = 0; row < rows; ++row) {
    const float* const from = source.data() + row * dim;
    float top = std::numeric_limits<float>::min();
    for (int64_t i = 0; i < dim; ++i) top = std::max(top, std::fabs(from[i]));
    const float scale = out.scales[row] = top / most;
    const auto number = [&](int64_t i) {
      return static_cast<int>(std::min(most, std::max(-most, std::nearbyint(from[i] / scale))));
    };
    for (int64_t i = 0; i < dim / (packed ? 2 : 1); ++i) {
      out.numbers[row * dim / (packed ? 2 : 1) + i] =
          static_cast<uint8_t>(packed ? number(i) + 8 + 16 * (number(i + dim / 2) + 8) : number(i));
    }
  }
  return out;
}

// Values of every size, rows of zeros, and ties.
std::vector<float> rows_of(int64_t rows, int64_t dim, float most, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> numbers(rows * dim);
  for (int64_t row = 0; row < rows; ++row) {
    const float size = std::pow(10.0f, static_cast<float>(row % 40) - 20.0f);
    for (int64_t i = 0; i < dim; ++i) {
      float& number = numbers[row * dim + i];
      number = row % 5 == 0 ? 0.0f : normal(random) * size;
      if (row % 5 == 1) number = std::floor(number / size * 3) + 0.5f;
    }
    if (row % 5 == 1) numbers[row * dim] = most;
  }
  return numbers;
}

int not_numbers(bool packed) {
  int failures = 0;
  for (const float odd : {NAN, INFINITY, -INFINITY}) {
    for (const int64_t place : {int64_t{0}, int64_t{20}, int64_t{37}}) {
      std::vector<float> source(2 * 38, 1.0f);
      source[place] = odd;
      const Rounded out = found(source, 2, 38, packed, 1);
      failures += !(std::isnan(out.scales[0]) && out.scales[1] == 1.0f / (packed ? 7.0f : 127.0f));
    }
  }
  return failures;
}

}  // namespace

int main() {
  int failures = 0, cases = 0;
  if (!is_supported()) return 2;
  for (const char* name : {"AVX3", "AVX2", "SSE4", "NEON"}) {
    if (!limit_target(name)) continue;
    std::mt19937 random(7);
    for (const bool packed : {false, true}) {
      for (const int64_t rows : {0, 1, 3, 41, 3000}) {
        for (const int64_t dim : {2, 6, 16, 34, 64, 80, 128}) {
          const auto source = rows_of(rows, dim, packed ? 7.0f : 127.0f, random);
          const Rounded out = found(source, rows, dim, packed, 1 + cases % 3), right = expected(source, rows, dim, packed);
          ++cases;
          if (out.numbers != right.numbers || out.scales != right.scales) {
            std::printf("%s: %s, %ld rows of %ld\n", target_name(), packed ? "4 bits" : "8 bits", long(rows), long(dim));
            ++failures;
          }
        }
      }
      failures += not_numbers(packed), ++cases;
    }
  }
  std::printf("%d cases, %d failures\n", cases, failures);
  return failures ? 1 : 0;
}
