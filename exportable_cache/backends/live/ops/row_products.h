// Products of some rows and weights of a linear layer, in float32, in bfloat16, or in 8 bits with scales.
#pragma once

#include "vectors.h"

#include <type_traits>

namespace {

// Number of sums that fit in registers together with the operands.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSums = 24;
#else
constexpr int kSums = 12;
#endif
// Maximum number of rows that a weight is multiplied by while it is in a register.
constexpr int kMostRows = kSums / 3;
// Maximum number of outputs at a time.
constexpr int kMostOutputs = kSums / 2;
// Number of floats of rows that stay in the L1 cache while weights stream through it.
constexpr int64_t kNear = 6144;
// Outputs of a unit, which a thread takes and prefetches at a time.
constexpr int kOutputs = 12;
// Minimum number of inputs of a quantization group.
constexpr int kLeastGroup = 32;

// Numbers of a tensor in float32 or bfloat16.
struct Numbers {
  void* data = nullptr;
  bool is_bfloat16 = false;

  EC_INLINE float get(int64_t i) const {
    return is_bfloat16 ? of_bfloat16(static_cast<uint16_t*>(data)[i]) : static_cast<float*>(data)[i];
  }
  EC_INLINE void set(int64_t i, float x) const {
    if (is_bfloat16) static_cast<uint16_t*>(data)[i] = to_bfloat16(x);
    else static_cast<float*>(data)[i] = x;
  }
};

struct Int8 {
  using Stored = int8_t;
  EC_INLINE static Vector vector(const int8_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(loaded<__m128i>(p)));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    return __builtin_convertvector(__builtin_convertvector(loaded<Bytes>(p), Integers), Vector);
#endif
  }
};

struct Int8Groups : Int8 {};

template <class W>
constexpr bool kHasGroups = std::is_same_v<W, Int8Groups>;

// A weight [out, in]; for groups of 2**shift inputs also scales and zero points (nullptr: 0), [out, groups].
template <class W>
struct Weights {
  const typename W::Stored* data;
  int64_t in;
  Numbers scales;
  const int8_t* zeros;
  int shift;
};

// Adds the products of R rows and O outputs over inputs [from, to) to sums[o * R + r]. `rows` are written by `pack`.
// Prefetches the weights `ahead` elements further.
template <class W, int R, int O>
EC_INLINE void tile(const Weights<W>& w, const float* rows, int64_t output, int64_t from, int64_t to, int64_t ahead,
                    float* sums) {
  constexpr int kStep = kHasGroups<W> ? kLeastGroup : std::max<int>(kLine / sizeof(typename W::Stored), kLanes);
  const auto* weights = w.data + output * w.in;
  Vector sum[R][O];
  EC_UNROLL for (int r = 0; r < R; ++r) { EC_UNROLL for (int o = 0; o < O; ++o) sum[r][o] = Vector{}; }
  float scale[O], zero[O];
  const auto add = [&](const float* x, int64_t at) __attribute__((always_inline)) {
    Vector of_output[O];
    EC_UNROLL for (int o = 0; o < O; ++o) {
      of_output[o] = W::vector(weights + o * w.in + at);
      if constexpr (kHasGroups<W>) of_output[o] = of_output[o] * scale[o] - zero[o];
    }
    EC_UNROLL for (int r = 0; r < R; ++r) {
      Vector of_row = loaded<Vector>(x + r * kLanes);
#if defined(__x86_64__)
      // Keeps the vector in a register, because the compiler would load it again for each output.
      asm("" : "+v"(of_row));
#endif
      EC_UNROLL for (int o = 0; o < O; ++o) sum[r][o] += of_row * of_output[o];
    }
  };
  int64_t i = from;
  for (; i + kStep <= to; i += kStep) {
    EC_UNROLL for (int o = 0; o < O; ++o) {
      // Into the L2 cache, because L1 supports fewer outstanding requests.
      __builtin_prefetch(weights + o * w.in + i + ahead, 0, 1);
      if constexpr (kHasGroups<W>) {
        const int64_t group = ((output + o) * w.in + i) >> w.shift;
        scale[o] = w.scales.get(group);
        zero[o] = w.zeros == nullptr ? 0.0f : w.zeros[group] * scale[o];
      }
    }
    EC_UNROLL for (int j = 0; j < kStep; j += kLanes) add(rows + (i + j) * R, i + j);
  }
  if constexpr (!kHasGroups<W>) {
    for (; i < to; i += kLanes) add(rows + i * R, std::min(i, w.in - kLanes));
  }
  const auto at = [&](int i) __attribute__((always_inline)) { return sum[i % R][i / R]; };
  constexpr int kAll = R * O, kSixteens = EC_SIXTEENS ? kAll / 16 * 16 : 0, kFours = kAll / 4 * 4;
#if EC_SIXTEENS
  EC_UNROLL for (int i = 0; i < kSixteens; i += 16) {
    Vector fours[4];
    EC_UNROLL for (int j = 0; j < 4; ++j) {
      const int k = i + 4 * j;
      fours[j] = quarters_of(at(k), at(k + 1), at(k + 2), at(k + 3));
    }
    const Vector sixteen = totals_of_quarters(fours[0], fours[1], fours[2], fours[3]) + loaded<Vector>(sums + i);
    std::memcpy(sums + i, &sixteen, sizeof sixteen);
  }
#endif
  EC_UNROLL for (int i = kSixteens; i < kFours; i += 4) {
    const Quad four = totals(at(i), at(i + 1), at(i + 2), at(i + 3)) + loaded<Quad>(sums + i);
    std::memcpy(sums + i, &four, sizeof four);
  }
  EC_UNROLL for (int i = kFours; i < kAll; ++i) sums[i] += total(at(i));
}

// One layer.
template <class W>
struct Layer {
  Weights<W> weights;
  int64_t out;
  Numbers scales, bias;  // [out], nullptr for none
  Numbers y;             // [rows, out]
};

// Layers with the same input. Units of kOutputs outputs are numbered across all layers.
template <class W>
struct Layers {
  int64_t rows, in;
  Numbers x;  // [rows, in]
  std::vector<Layer<W>> of;

  static int64_t units(const Layer<W>& layer) { return (layer.out + kOutputs - 1) / kOutputs; }
  int64_t units() const {
    int64_t sum = 0;
    for (const Layer<W>& layer : of) sum += units(layer);
    return sum;
  }
  // Returns the layer of a unit, and replaces the unit by the index of its first output.
  const Layer<W>& find(int64_t& unit) const {
    const Layer<W>* layer = of.data();
    for (; unit >= units(*layer); ++layer) unit -= units(*layer);
    unit *= kOutputs;
    return *layer;
  }
};

// Divides rows into blocks of nearly equal size.
struct Blocks {
  int64_t rows, count, most;

  explicit Blocks(int64_t rows)
      : rows(rows), count((rows + kMostRows - 1) / kMostRows), most((rows + count - 1) / count) {}
  int64_t first(int64_t block) const { return block * most; }
  int64_t size(int64_t block) const { return std::min(most, rows - first(block)); }
  // Calls `of_rows(R)` with a compile-time R of at least the number of rows of the block.
  template <class F>
  EC_INLINE void with_capacity(int64_t block, const F& of_rows) const {
    const int64_t size = this->size(block);
    if (size == 1) of_rows(std::integral_constant<int, 1>());
    else if (size == 2) of_rows(std::integral_constant<int, 2>());
    else if (size <= 4) of_rows(std::integral_constant<int, 4>());
#if defined(__AVX512F__) || defined(__aarch64__)
    else of_rows(std::integral_constant<int, 8>());
#endif
  }
};

// Writes rows in the order in which `tile` reads them: vector by vector, interleaved, with zeros for missing rows.
// The last vector ends with the weights and has zeros for the elements that the one before it covers.
template <class W>
void pack(const Layers<W>& layers, int64_t first, int64_t count, int64_t capacity, float* to) {
  const int64_t in = layers.in;
  for (int64_t i = 0; i < in; i += kLanes) {
    const int64_t begin = std::min(i, in - kLanes);
    for (int64_t r = 0; r < capacity; ++r, to += kLanes) {
      const int64_t from = (first + r) * in + begin;
      if (r >= count) {
        std::fill_n(to, kLanes, 0.0f);
      } else if (begin == i && !layers.x.is_bfloat16) {
        std::memcpy(to, static_cast<const float*>(layers.x.data) + from, kLanes * sizeof(float));
      } else {
        for (int64_t j = 0; j < kLanes; ++j) to[j] = begin + j < i ? 0.0f : layers.x.get(from + j);
      }
    }
  }
}

// Stores the sums of an output for rows [first, first + count).
template <class W>
EC_INLINE void store(const Layer<W>& layer, int64_t first, int64_t count, int64_t output, const float* sums) {
  const int64_t offset = first * layer.out + output;
  if (layer.scales.data == nullptr && layer.bias.data == nullptr && !layer.y.is_bfloat16) {
    float* y = static_cast<float*>(layer.y.data) + offset;
    for (int64_t r = 0; r < count; ++r) y[r * layer.out] = sums[r];
    return;
  }
  const float scale = layer.scales.data == nullptr ? 1.0f : layer.scales.get(output);
  const float bias = layer.bias.data == nullptr ? 0.0f : layer.bias.get(output);
  for (int64_t r = 0; r < count; ++r) layer.y.set(offset + r * layer.out, sums[r] * scale + bias);
}

// Computes outputs [begin, end) of a unit for `count` rows, packed for R. A layer has at least O outputs.
template <class W, int R, int O>
void outputs_of(const Layer<W>& layer, int64_t first, int64_t count, const float* rows, int64_t begin, int64_t end,
                int64_t ahead) {
  const Weights<W>& w = layer.weights;
  // Parts of equal length, because sums are stored after each.
  constexpr int64_t kUnit = kHasGroups<W> ? kLeastGroup : kLine;
  const int64_t parts = (w.in * R + kNear - 1) / kNear, part = ((w.in + parts - 1) / parts + kUnit - 1) / kUnit * kUnit;
  float sums[kOutputs * R] = {};
  // The last outputs are computed together with some earlier ones, which are computed twice.
  const auto start = [&](int64_t o) { return std::min(begin + o, layer.out - O); };
  for (int64_t from = 0; from < w.in; from += part) {
    for (int64_t o = 0; begin + o < end; o += O) {
      tile<W, R, O>(w, rows, start(o), from, std::min(w.in, from + part), ahead, sums + o * R);
    }
  }
  for (int64_t one = begin; one < end; ++one) {
    const int64_t o = (one - begin) / O * O;
    store(layer, first, count, one, sums + (o + one - start(o)) * R);
  }
}

}  // namespace
