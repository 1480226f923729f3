// Products of some rows and weights of a linear layer, in float32, in bfloat16, or in 8 bits with scales.
#pragma once

#include "vectors.h"

#include <type_traits>

namespace {

// Sums that fit the registers beside operands.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSums = 24;
#else
constexpr int kSums = 12;
#endif
// Rows that a weight is multiplied by while it is in a register.
constexpr int kMostRows = kSums / 3;
// Outputs at a time.
constexpr int kMostOutputs = kSums / 2;
// This many numbers of rows stay in the nearest cache while weights pass it.
constexpr int64_t kNear = 6144;
// Outputs of a unit: what a thread takes at a time, and what it asks memory for ahead.
constexpr int kOutputs = 12;
// Fewest inputs of a group with a scale of its own.
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

// [out, in], and for groups of 2**shift inputs a scale, and the integer that stands for zero (nullptr: 0), [out, groups].
template <class W>
struct Weights {
  const typename W::Stored* data;
  int64_t in;
  Numbers scales;
  const int8_t* zeros;
  int shift;
};

// Adds the products of R rows and O outputs over inputs [from, to) to sums[o * R + r]; `rows` as `pack` writes them.
// What lies `ahead` numbers further is asked for meanwhile.
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
      // Otherwise the compiler reads it for each output again, and a processor multiplies more often than it reads.
      asm("" : "+v"(of_row));
#endif
      EC_UNROLL for (int o = 0; o < O; ++o) sum[r][o] += of_row * of_output[o];
    }
  };
  int64_t i = from;
  for (; i + kStep <= to; i += kStep) {
    EC_UNROLL for (int o = 0; o < O; ++o) {
      // Into the second cache: the first has fewer places for what is under way.
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
  const auto at = [&](int place) __attribute__((always_inline)) { return sum[place % R][place / R]; };
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

// Layers of the same rows. Their outputs are counted through, in units of kOutputs.
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
  // The layer of a unit, which becomes the number of its first output.
  const Layer<W>& find(int64_t& unit) const {
    const Layer<W>* layer = of.data();
    for (; unit >= units(*layer); ++layer) unit -= units(*layer);
    unit *= kOutputs;
    return *layer;
  }
};

// Rows in blocks that are as equal as they can be.
struct Blocks {
  int64_t rows, count, most;

  explicit Blocks(int64_t rows)
      : rows(rows), count((rows + kMostRows - 1) / kMostRows), most((rows + count - 1) / count) {}
  int64_t first(int64_t block) const { return block * most; }
  int64_t size(int64_t block) const { return std::min(most, rows - first(block)); }
  // `of_rows(R)`, with places for as many rows as there may be.
  template <class F>
  EC_INLINE void with_places(int64_t block, const F& of_rows) const {
    const int64_t size = this->size(block);
    if (size == 1) of_rows(std::integral_constant<int, 1>());
    else if (size == 2) of_rows(std::integral_constant<int, 2>());
    else if (size <= 4) of_rows(std::integral_constant<int, 4>());
#if defined(__AVX512F__) || defined(__aarch64__)
    else of_rows(std::integral_constant<int, 8>());
#endif
  }
};

// Numbers of some rows as `tile` reads them: vector by vector, those of all rows beside each other, zeros for rows that
// are not there. The last vector ends where the weights end, with zeros for what the one before it has.
template <class W>
void pack(const Layers<W>& layers, int64_t first, int64_t count, int64_t places, float* to) {
  const int64_t in = layers.in;
  for (int64_t i = 0; i < in; i += kLanes) {
    const int64_t begin = std::min(i, in - kLanes);
    for (int64_t r = 0; r < places; ++r, to += kLanes) {
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

// Sums of an output for rows [first, first + count) to what the layer gives.
template <class W>
EC_INLINE void store(const Layer<W>& layer, int64_t first, int64_t count, int64_t output, const float* sums) {
  const int64_t place = first * layer.out + output;
  if (layer.scales.data == nullptr && layer.bias.data == nullptr && !layer.y.is_bfloat16) {
    float* y = static_cast<float*>(layer.y.data) + place;
    for (int64_t r = 0; r < count; ++r) y[r * layer.out] = sums[r];
    return;
  }
  const float scale = layer.scales.data == nullptr ? 1.0f : layer.scales.get(output);
  const float bias = layer.bias.data == nullptr ? 0.0f : layer.bias.get(output);
  for (int64_t r = 0; r < count; ++r) layer.y.set(place + r * layer.out, sums[r] * scale + bias);
}

// A unit's outputs [begin, end) of `count` rows, which are packed for R; layers have O outputs and more.
template <class W, int R, int O>
void outputs_of(const Layer<W>& layer, int64_t first, int64_t count, const float* rows, int64_t begin, int64_t end,
                int64_t ahead) {
  const Weights<W>& w = layer.weights;
  // Parts of equal length, as sums are added up after each.
  constexpr int64_t kUnit = kHasGroups<W> ? kLeastGroup : kLine;
  const int64_t parts = (w.in * R + kNear - 1) / kNear, part = ((w.in + parts - 1) / parts + kUnit - 1) / kUnit * kUnit;
  float sums[kOutputs * R] = {};
  // The last few are computed with some before them again.
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
