// Float32 linear layers of a prompt beside the most that the processor multiplies and adds.
//
//   prompt_linear [THREADS] [ROWS] [ROUNDS] [TARGET]
//
// The layers of a Llama of 110M: each has weights of its own in each of 12 layers, which are passed through in turn, so that
// weights come from memory as in a prompt. Fastest and median of the rounds: ms of all 12, and GFLOPS of the fastest.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "float_linear.h"
#include "pool.h"

using namespace exportable_cache::kernels;

namespace {

constexpr int64_t kLayers = 12;

struct Shape {
  const char* name;
  int64_t inputs, outputs, number;
};

constexpr Shape kShapes[] = {
    {"query, output", 768, 768, 2}, {"key, value", 768, 256, 2}, {"gate, up", 768, 2048, 2}, {"down", 2048, 768, 1}};

std::vector<float> numbers(int64_t count) {
  std::minstd_rand random(1);
  std::vector<float> made(count);
  for (float& number : made) number = static_cast<float>(random()) / 2147483648.0f - 0.5f;
  return made;
}

}  // namespace

int main(int count, char** arguments) {
  const auto number = [&](int i, int64_t otherwise) { return count > i ? std::atoll(arguments[i]) : otherwise; };
  const int64_t threads = number(1, 1), rows = number(2, 128), rounds = number(3, 5);
  if (count > 4 && !limit_target(arguments[4])) {
    std::fprintf(stderr, "this processor has no %s\n", arguments[4]);
    return 1;
  }
  Pool own(static_cast<size_t>(threads));
  const Threads runtime = threads_of(own, static_cast<size_t>(threads));
  std::printf("%s, %lld threads, %lld rows\n", target_name(), static_cast<long long>(threads), static_cast<long long>(rows));
  double all = 0;
  for (const Shape& shape : kShapes) {
    const int64_t size = shape.inputs * blocks_of(shape.outputs) * kBlockOutputs, layers = kLayers * shape.number;
    const std::vector<float> source = numbers(rows * shape.inputs), weights = numbers(layers * size);
    std::vector<float> out(rows * shape.outputs);
    std::vector<double> times;
    for (int64_t round = 0; round <= rounds; ++round) {
      const auto start = std::chrono::steady_clock::now();
      for (int64_t layer = 0; layer < layers; ++layer) {
        const FloatLinear linear{rows,    shape.inputs, shape.outputs, source.data(), weights.data() + layer * size,
                                 nullptr, out.data()};
        apply_float_linears(&linear, 1, runtime);
      }
      const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
      if (round) times.push_back(took.count());
    }
    std::sort(times.begin(), times.end());
    const double flops = 2.0 * rows * shape.inputs * shape.outputs * layers;
    std::printf("%-14s fastest %7.2f  median %7.2f ms  %6.1f GFLOPS\n", shape.name, times[0], times[times.size() / 2],
                1e-6 * flops / times[0]);
    all += times[0];
  }
  std::printf("%-14s %7.2f ms\n", "all", all);
}
