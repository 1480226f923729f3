// Times linear layers of a prompt over weights of float32, bfloat16 and float16, and with inputs rounded to bfloat16.
//
//   prompt_linear [THREADS] [ROWS] [ROUNDS] [TARGET] [SIZE]
//
// The layers of a Llama of 110M, or with SIZE 1100 of 1.1B: some layers with separate weights, run in order, so that weights
// come from memory as in a prompt. Prints the fastest and median of the rounds in ms for all of them, and GFLOPS of the
// fastest. The kinds are interleaved.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#include "float_linear.h"
#include "half.h"
#include "pool.h"

using namespace exportable_cache::kernels;

namespace {

// `number` layers of a shape.
struct Shape {
  const char* name;
  int64_t inputs, outputs, number;
};

const std::vector<Shape> kSmall = {
    {"query, output", 768, 768, 24}, {"key, value", 768, 256, 24}, {"gate, up", 768, 2048, 24}, {"down", 2048, 768, 12}};
// 3 of 16 layers.
const std::vector<Shape> kLarge = {
    {"query, output", 2048, 2048, 6}, {"key, value", 2048, 512, 6}, {"gate, up", 2048, 8192, 6}, {"down", 8192, 2048, 3}};

std::vector<float> numbers(int64_t count) {
  std::minstd_rand random(1);
  std::vector<float> made(count);
  for (float& number : made) number = static_cast<float>(random()) / 2147483648.0f - 0.5f;
  return made;
}

// Scratch memory, of which layers without rounded inputs need none.
template <class L>
size_t scratch_of(const L&) {
  return 0;
}
size_t scratch_of(const RoundedLinear& linear) { return rounded_scratch(linear); }

template <class L>
void run_layer(const L& linear, const Threads& threads, void*) {
  apply_float_linears(&linear, 1, threads);
}
void run_layer(const RoundedLinear& linear, const Threads& threads, void* scratch) {
  apply_float_linears(&linear, 1, threads, scratch);
}

// The layers of one shape and kind.
template <class L>
class Layers {
  using W = std::remove_const_t<std::remove_pointer_t<decltype(L::weights)>>;

 public:
  Layers(const char* name, const Shape& shape, const std::vector<float>& source, int64_t rows)
      : name_(name), shape_(shape), source_(source), out_(rows * shape.outputs), rows_(rows),
        size_(steps_of<W>(shape.inputs) * blocks_of(shape.outputs) * kBlockOutputs), weights_(count() * size_) {
    const std::vector<float> some = numbers(size_ + 1);
    for (int64_t i = 0; i < count() * size_; ++i) weights_[i] = weight(some[i % size_], some[i % size_ + 1], W());
  }

  void run(const Threads& threads, bool is_timed) {
    const auto start = std::chrono::steady_clock::now();
    for (int64_t layer = 0; layer < count(); ++layer) {
      L linear;
      linear.rows = rows_, linear.inputs = shape_.inputs, linear.outputs = shape_.outputs;
      linear.source = source_.data(), linear.out = out_.data(), linear.weights = &weights_[layer * size_];
      scratch_.resize(scratch_of(linear) / sizeof(float) + 16);
      void* scratch = scratch_.data();
      size_t space = scratch_.size() * sizeof(float);
      run_layer(linear, threads, std::align(64, scratch_of(linear), scratch, space));
    }
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    if (is_timed) times_.push_back(took.count());
  }

  // The fastest time.
  double print() {
    std::sort(times_.begin(), times_.end());
    const double flops = 2.0 * rows_ * shape_.inputs * shape_.outputs * count();
    std::printf("%-14s %-8s  fastest %7.2f  median %7.2f ms  %6.1f GFLOPS\n", shape_.name, name_, times_[0],
                times_[times_.size() / 2], 1e-6 * flops / times_[0]);
    return times_[0];
  }

 private:
  static float weight(float number, float, float) { return number; }
  static hwy::float16_t weight(float number, float, hwy::float16_t) {
    const uint16_t bits = float16_of_float(number);
    hwy::float16_t made;
    std::memcpy(&made, &bits, sizeof bits);
    return made;
  }
  static BFloat16Pair weight(float number, float next, BFloat16Pair) {
    return bfloat16_of_float(number) | static_cast<BFloat16Pair>(bfloat16_of_float(next)) << 16;
  }
  int64_t count() const { return shape_.number; }

  const char* name_;
  const Shape shape_;
  const std::vector<float>& source_;
  std::vector<float> out_, scratch_;
  int64_t rows_, size_;
  std::vector<W> weights_;
  std::vector<double> times_;
};

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
  double all[4] = {};
  for (const Shape& shape : number(5, 110) < 1000 ? kSmall : kLarge) {
    const std::vector<float> source = numbers(rows * shape.inputs);
    Layers<FloatLinear> floats("float32", shape, source, rows);
    Layers<BFloat16Linear> bfloats("bfloat16", shape, source, rows);
    Layers<Float16Linear> halves("float16", shape, source, rows);
    Layers<RoundedLinear> rounded("rounded", shape, source, rows);
    for (int64_t round = 0; round <= rounds; ++round) {
      floats.run(runtime, round > 0), bfloats.run(runtime, round > 0), halves.run(runtime, round > 0);
      rounded.run(runtime, round > 0);
    }
    all[0] += floats.print(), all[1] += bfloats.print(), all[2] += halves.print(), all[3] += rounded.print();
  }
  std::printf("all: float32 %.2f ms, bfloat16 %.2f ms, float16 %.2f ms, rounded %.2f ms\n", all[0], all[1], all[2], all[3]);
}
