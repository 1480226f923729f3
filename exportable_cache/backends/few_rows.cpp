// Linear layers of few rows, as decode steps have them, over weights in float32, in bfloat16, or in 8 bits with scales.
//
// A step reads every weight once and cannot be faster than memory gives them. So weights lie as the model has them,
// [out, in], they are read once and in order, and what is read next is asked for meanwhile. This is compiled for the
// processor at hand, with vectors of the compiler.
#include "vectors.h"

#include <atomic>
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

// Units of a thread that are left. It takes them from the front, and others, once they have none, from the back: cores
// are not given memory evenly.
class alignas(kLine) Share {
 public:
  void set(uint64_t begin, uint64_t end) { left_.store(begin << 32 | end, std::memory_order_relaxed); }
  // One of them, and which one follows it, -1 for none.
  bool take(bool is_own, int64_t& unit, int64_t& next) {
    uint64_t left = left_.load(std::memory_order_relaxed);
    while (true) {
      const uint64_t begin = left >> 32, end = left & 0xffffffff;
      if (begin >= end) return false;
      const uint64_t rest = is_own ? (begin + 1) << 32 | end : begin << 32 | (end - 1);
      if (left_.compare_exchange_weak(left, rest, std::memory_order_relaxed)) {
        unit = static_cast<int64_t>(is_own ? begin : end - 1);
        next = end - begin < 2 ? -1 : is_own ? unit + 1 : unit - 1;
        return true;
      }
    }
  }

 private:
  std::atomic<uint64_t> left_{0};
};

template <class W>
struct Work {
  const Layers<W>& layers;
  Blocks blocks;
  std::vector<Share> shares;

  // By one thread: its own share, and what is left of others'.
  void run(int64_t own) {
    thread_local Scratch scratch;
    const int64_t padded = (layers.in + kLanes - 1) / kLanes * kLanes;
    float* rows = scratch.numbers(padded * kMostRows * blocks.count);
    for (int64_t b = 0; b < blocks.count; ++b) {
      blocks.with_places(b, [&](auto places) {
        pack(layers, blocks.first(b), blocks.size(b), places, rows + b * padded * kMostRows);
      });
    }
    const int64_t threads = static_cast<int64_t>(shares.size());
    for (int64_t i = 0; i < threads; ++i) {
      int64_t unit, next;
      while (shares[(own + i) % threads].take(i == 0, unit, next)) one(unit, next, rows, padded * kMostRows);
    }
  }

 private:
  // All rows of a unit: weights are near for those behind the first block.
  void one(int64_t unit, int64_t next, const float* rows, int64_t stride) const {
    const Layer<W>& layer = layers.find(unit);
    const int64_t end = std::min(unit + kOutputs, layer.out);
    int64_t ahead = 0;
    if (next >= 0) {
      const Layer<W>& other = layers.find(next);
      ahead = (reinterpret_cast<intptr_t>(other.weights.data + next * layers.in) -
               reinterpret_cast<intptr_t>(layer.weights.data + unit * layers.in)) /
              intptr_t{sizeof(typename W::Stored)};
    }
    for (int64_t b = 0; b < blocks.count; ++b) {
      // The fewer rows, the more outputs at a time: memory is slow to answer, and is to be asked for much at once.
      blocks.with_places(b, [&](auto places) {
        constexpr int R = places;
        outputs_of<W, R, std::min(kSums / R, kMostOutputs)>(layer, blocks.first(b), blocks.size(b), rows + b * stride,
                                                            unit, end, b == 0 ? ahead : 0);
      });
    }
  }
};

template <class W>
void some_shares(int64_t begin, int64_t end, void* context) {
  for (; begin < end; ++begin) static_cast<Work<W>*>(context)->run(begin);
}

template <class W>
void run(const Layers<W>& layers) {
  if (layers.rows == 0) return;
  const int64_t units = layers.units(), bytes = units * kOutputs * layers.in * int64_t{sizeof(typename W::Stored)};
  uint32_t threads;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  const int64_t count = std::min({int64_t{threads}, units, bytes / kWorthAThread + 1});
  Work<W> work{layers, Blocks(layers.rows), std::vector<Share>(count)};
  for (int64_t i = 0; i < count; ++i) work.shares[i].set(units * i / count, units * (i + 1) / count);
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, count, 1, some_shares<W>, &work));
}

Numbers numbers(const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  STD_TORCH_CHECK((type == ScalarType::Float || type == ScalarType::BFloat16) && tensor.is_contiguous(),
                  "few_rows_linear: numbers are in float32 or bfloat16, without gaps");
  return {tensor.data_ptr(), type == ScalarType::BFloat16};
}

Numbers one_each(const std::optional<Tensor>& tensor, int64_t size) {
  if (!tensor.has_value()) return {};
  STD_TORCH_CHECK(tensor->numel() == size, "few_rows_linear: a bias, or a scale, has ", size, " numbers");
  return numbers(*tensor);
}

// Rows of a tensor without gaps.
template <class W>
Layers<W> layers_over(const Tensor& x) {
  const int64_t in = x.dim() > 0 ? x.size(x.dim() - 1) : 0;
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return {rows, in, numbers(x), {}};
}

// Adds a layer, and gives the tensor that its outputs will be in.
template <class W>
Tensor add(Layers<W>& layers, const Tensor& x, const Tensor& weight, const Numbers& scales,
           const std::optional<Tensor>& bias, Weights<W> weights = {}) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && x.dim() > 0 && layers.in == weight.size(1),
                  "few_rows_linear: x is [..., in], and a weight [out, in] without gaps");
  STD_TORCH_CHECK(weight.size(0) >= kMostOutputs && weight.size(1) >= kLanes, "few_rows_linear: a weight is at least [",
                  kMostOutputs, ", ", kLanes, "]");
  weights.data = static_cast<const typename W::Stored*>(weight.data_ptr());
  weights.in = weight.size(1);
  const auto sizes = x.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = weight.size(0);
  const Tensor y = empty(x, shape);
  layers.of.push_back({weights, weight.size(0), scales, one_each(bias, weight.size(0)), numbers(y)});
  return y;
}

template <class W>
Tensor linear(const Tensor& input, const Tensor& weight, const Numbers& scales, const std::optional<Tensor>& bias,
              Weights<W> weights) {
  const Tensor x = without_gaps(input);
  Layers<W> layers = layers_over<W>(x);
  const Tensor y = add(layers, x, weight, scales, bias, weights);
  run_noted([=] { run(layers); });
  return y;
}

template <class W>
std::vector<Tensor> linears(const Tensor& input, const std::vector<Tensor>& weights,
                            const std::vector<Tensor>& biases) {
  const Tensor x = without_gaps(input);
  Layers<W> layers = layers_over<W>(x);
  std::vector<Tensor> outputs;
  for (size_t i = 0; i < weights.size(); ++i) {
    STD_TORCH_CHECK(weights[i].scalar_type() == weights[0].scalar_type(), "few_rows_linears: weights of one dtype");
    outputs.push_back(add(layers, x, weights[i], {}, biases.empty() ? std::nullopt : std::optional(biases[i])));
  }
  run_noted([=] { run(layers); });
  return outputs;
}

bool is_float32(const Tensor& weight) {
  const ScalarType type = weight.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16,
                  "few_rows_linear: weights in float32 or bfloat16");
  return type == ScalarType::Float;
}

Tensor few_rows_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  return is_float32(weight) ? linear<Float32>(x, weight, {}, bias, {}) : linear<BFloat16>(x, weight, {}, bias, {});
}

std::vector<Tensor> few_rows_linears(const Tensor& x, const std::vector<Tensor>& weights,
                                     const std::vector<Tensor>& biases) {
  STD_TORCH_CHECK(!weights.empty() && (biases.empty() || biases.size() == weights.size()),
                  "few_rows_linears: weights, and a bias for each or none");
  return is_float32(weights[0]) ? linears<Float32>(x, weights, biases) : linears<BFloat16>(x, weights, biases);
}

Tensor few_rows_linear_int8(const Tensor& x, const Tensor& weight, const Tensor& scale,
                            const std::optional<Tensor>& zero_point, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(weight.scalar_type() == ScalarType::Char && weight.dim() == 2, "few_rows_linear: weights in int8");
  const int64_t out = weight.size(0), in = weight.size(1), groups = scale.numel() / out;
  STD_TORCH_CHECK(groups >= 1 && groups * out == scale.numel() && in % groups == 0,
                  "few_rows_linear: a scale for each group of inputs");
  if (groups == 1 && !zero_point.has_value()) return linear<Int8>(x, weight, one_each(scale, out), bias, {});
  Weights<Int8Groups> weights{};
  while (int64_t{1} << weights.shift < in / groups) ++weights.shift;
  STD_TORCH_CHECK(int64_t{1} << weights.shift == in / groups && in / groups >= kLeastGroup,
                  "few_rows_linear: groups have 32 inputs, 64, 128 and so on");
  weights.scales = numbers(scale);
  if (zero_point.has_value()) {
    STD_TORCH_CHECK(zero_point->scalar_type() == ScalarType::Char && zero_point->numel() == scale.numel() &&
                        zero_point->is_contiguous(),
                    "few_rows_linear: a zero point in int8 for each scale");
    weights.zeros = static_cast<const int8_t*>(zero_point->data_ptr());
  }
  return linear<Int8Groups>(x, weight, {}, bias, weights);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(exportable_cache, library) {
  library.def("few_rows_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor");
  library.def("few_rows_linears(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor[]");
  library.def(
      "few_rows_linear_int8(Tensor x, Tensor weight, Tensor scale, Tensor? zero_point=None, Tensor? bias=None) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(exportable_cache, CPU, library) {
  library.impl("few_rows_linear", TORCH_BOX(&few_rows_linear));
  library.impl("few_rows_linears", TORCH_BOX(&few_rows_linears));
  library.impl("few_rows_linear_int8", TORCH_BOX(&few_rows_linear_int8));
}
