// Linear layers of few rows, as decode steps have them, over weights in float32, in bfloat16, or in 8 bits with scales.
//
// A step reads every weight once and cannot be faster than memory gives them. So weights lie as the model has them,
// [out, in], they are read once and in order, and what is read next is asked for meanwhile. This is compiled for the
// processor at hand, with vectors of the compiler.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define EC_INLINE inline __attribute__((always_inline))
#define EC_UNROLL _Pragma("GCC unroll 32")

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
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
// A cache line in bytes.
constexpr int kLine = 64;
// This many numbers of rows stay in the nearest cache while weights pass it.
constexpr int64_t kNear = 6144;
// Outputs whose sums are kept where rows are longer than that.
constexpr int kOutputs = 24;
// Bytes of weights that are worth another thread.
constexpr int64_t kWorthAThread = 1 << 16;
// Fewest inputs of a group with a scale of its own.
constexpr int kLeastGroup = 32;

typedef float Vector __attribute__((vector_size(kLanes * 4)));
typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));
typedef float Quad __attribute__((vector_size(16)));

template <class V>
EC_INLINE V loaded(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

EC_INLINE float of_bfloat16(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}

EC_INLINE uint16_t to_bfloat16(float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof x);
  return x != x ? 0x7fc0 : static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

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

// How a vector of weights of a kind becomes float32.
struct Float32 {
  using Stored = float;
  static constexpr bool kHasGroups = false;
  EC_INLINE static Vector vector(const float* p) { return loaded<Vector>(p); }
};

struct BFloat16 {
  using Stored = uint16_t;
  static constexpr bool kHasGroups = false;
  EC_INLINE static Vector vector(const uint16_t* p) {
#if defined(__AVX512F__)
    return reinterpret_cast<Vector>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(loaded<__m256i>(p)), 16));
#elif defined(__AVX2__)
    return reinterpret_cast<Vector>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(loaded<__m128i>(p)), 16));
#else
    return reinterpret_cast<Vector>(__builtin_convertvector(loaded<Halves>(p), Words) << 16);
#endif
  }
};

struct Int8 {
  using Stored = int8_t;
  static constexpr bool kHasGroups = false;
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

struct Int8Groups : Int8 {
  static constexpr bool kHasGroups = true;
};

// [out, in], and for groups of 2**shift inputs a scale, and the integer that stands for zero (nullptr: 0), [out, groups].
template <class W>
struct Weights {
  const typename W::Stored* data;
  int64_t in;
  Numbers scales;
  const int8_t* zeros;
  int shift;
};

#if defined(__clang__) || __GNUC__ >= 12
#define EC_SHUFFLES 1
#if defined(__AVX512F__)
#define EC_PICK(a, b, i, j, k, l)                                                                              \
  __builtin_shufflevector(a, b, i, j, k, l, i + 4, j + 4, k + 4, l + 4, i + 8, j + 8, k + 8, l + 8, i + 12, j + 12, \
                          k + 12, l + 12)
#elif defined(__AVX__)
#define EC_PICK(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l, i + 4, j + 4, k + 4, l + 4)
#else
#define EC_PICK(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#endif
#endif

// The sums of every fourth lane.
EC_INLINE Quad quarters(Vector v) {
  const char* p = reinterpret_cast<const char*>(&v);
  Quad sum = loaded<Quad>(p);
  EC_UNROLL for (int i = 1; i < kLanes / 4; ++i) sum += loaded<Quad>(p + i * sizeof(Quad));
  return sum;
}

EC_INLINE float total(Vector v) {
  const Quad q = quarters(v);
  return (q[0] + q[1]) + (q[2] + q[3]);
}

// The totals of four vectors.
EC_INLINE Quad totals(Vector a, Vector b, Vector c, Vector d) {
#if EC_SHUFFLES
  constexpr int n = kLanes;
  const Vector ab = EC_PICK(a, b, 0, n, 1, n + 1) + EC_PICK(a, b, 2, n + 2, 3, n + 3);
  const Vector cd = EC_PICK(c, d, 0, n, 1, n + 1) + EC_PICK(c, d, 2, n + 2, 3, n + 3);
  return quarters(EC_PICK(ab, cd, 0, 1, n, n + 1) + EC_PICK(ab, cd, 2, 3, n + 2, n + 3));
#else
  return Quad{total(a), total(b), total(c), total(d)};
#endif
}

// Adds the products of R rows and O outputs over inputs [from, to) to sums[o * R + r]; `rows` as `pack` writes them.
template <class W, int R, int O>
EC_INLINE void tile(const Weights<W>& w, const float* rows, int64_t output, int64_t from, int64_t to, int64_t ahead,
                    float* sums) {
  constexpr int kStep = W::kHasGroups ? kLeastGroup : std::max<int>(kLine / sizeof(typename W::Stored), kLanes);
  const auto* weights = w.data + output * w.in;
  Vector sum[R][O];
  EC_UNROLL for (int r = 0; r < R; ++r) { EC_UNROLL for (int o = 0; o < O; ++o) sum[r][o] = Vector{}; }
  float scale[O], zero[O];
  const auto add = [&](const float* x, int64_t at) __attribute__((always_inline)) {
    Vector of_output[O];
    EC_UNROLL for (int o = 0; o < O; ++o) {
      of_output[o] = W::vector(weights + o * w.in + at);
      if constexpr (W::kHasGroups) of_output[o] = of_output[o] * scale[o] - zero[o];
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
      if constexpr (W::kHasGroups) {
        const int64_t group = ((output + o) * w.in + i) >> w.shift;
        scale[o] = w.scales.get(group);
        zero[o] = w.zeros == nullptr ? 0.0f : w.zeros[group] * scale[o];
      }
    }
    EC_UNROLL for (int j = 0; j < kStep; j += kLanes) add(rows + (i + j) * R, i + j);
  }
  if constexpr (!W::kHasGroups) {
    for (; i < to; i += kLanes) add(rows + i * R, std::min(i, w.in - kLanes));
  }
  EC_UNROLL for (int o = 0; o < O; ++o) {
    constexpr int kFours = R / 4 * 4;
    EC_UNROLL for (int r = 0; r < kFours; r += 4) {
      const Quad four = totals(sum[r][o], sum[r + 1][o], sum[r + 2][o], sum[r + 3][o]);
      EC_UNROLL for (int j = 0; j < 4; ++j) sums[o * R + r + j] += four[j];
    }
    EC_UNROLL for (int r = kFours; r < R; ++r) sums[o * R + r] += total(sum[r][o]);
  }
}

// One layer.
template <class W>
struct Layer {
  Weights<W> weights;
  int64_t out, rows;
  Numbers x;             // [rows, in]
  Numbers scales, bias;  // [out], nullptr for none
  Numbers y;             // [rows, out]
};

// What a thread writes while it works, kept for its next layer.
struct Scratch {
  float* numbers(int64_t count) {
    if (count > size_) {
      size_ = count;
      memory_.reset(static_cast<float*>(std::aligned_alloc(kLine, (count * sizeof(float) + kLine - 1) / kLine * kLine)));
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  std::unique_ptr<float, Free> memory_;
  int64_t size_ = 0;
};

// Numbers of some rows as `tile` reads them: vector by vector, those of all rows beside each other, zeros for rows that
// are not there. The last vector ends where the weights end, with zeros for what the one before it has.
template <class W>
void pack(const Layer<W>& layer, int64_t first, int64_t count, int64_t places, float* to) {
  const int64_t in = layer.weights.in;
  for (int64_t i = 0; i < in; i += kLanes) {
    const int64_t begin = std::min(i, in - kLanes);
    for (int64_t r = 0; r < places; ++r, to += kLanes) {
      const int64_t from = (first + r) * in + begin;
      if (r >= count) {
        std::fill_n(to, kLanes, 0.0f);
      } else if (begin == i && !layer.x.is_bfloat16) {
        std::memcpy(to, static_cast<const float*>(layer.x.data) + from, kLanes * sizeof(float));
      } else {
        for (int64_t j = 0; j < kLanes; ++j) to[j] = begin + j < i ? 0.0f : layer.x.get(from + j);
      }
    }
  }
}

template <class W>
void store(const Layer<W>& layer, int64_t row, int64_t output, float sum) {
  const float scale = layer.scales.data == nullptr ? 1.0f : layer.scales.get(output);
  const float bias = layer.bias.data == nullptr ? 0.0f : layer.bias.get(output);
  layer.y.set(row * layer.out + output, sum * scale + bias);
}

// Outputs [begin, end) of up to R rows; layers have O outputs and more.
template <class W, int R, int O>
void outputs_of(const Layer<W>& layer, int64_t first, int64_t count, float* rows, int64_t begin, int64_t end) {
  const Weights<W>& w = layer.weights;
  pack(layer, first, count, R, rows);
  // Parts of equal length, as sums are added up after each.
  constexpr int64_t kUnit = W::kHasGroups ? kLeastGroup : kLine;
  const int64_t parts = (w.in * R + kNear - 1) / kNear, part = ((w.in + parts - 1) / parts + kUnit - 1) / kUnit * kUnit;
  const int64_t together = parts == 1 ? O : kOutputs;
  float sums[kOutputs * R];
  for (int64_t output = begin; output < end; output += together) {
    const int64_t last = std::min(output + together, end);
    std::fill_n(sums, kOutputs * R, 0.0f);
    // The last few are computed with some before them again.
    const auto start = [&](int64_t o) { return std::min(output + o, layer.out - O); };
    for (int64_t from = 0; from < w.in; from += part) {
      for (int64_t o = 0; output + o < last; o += O) {
        tile<W, R, O>(w, rows, start(o), from, std::min(w.in, from + part), together * w.in, sums + o * R);
      }
    }
    for (int64_t one = output; one < last; ++one) {
      const int64_t o = (one - output) / O * O, place = o + one - start(o);
      for (int64_t r = 0; r < count; ++r) store(layer, first + r, one, sums[place * R + r]);
    }
  }
}

// The fewer rows, the more outputs at a time: memory is slow to answer, and is to be asked for much at once.
template <class W, int R>
void some_rows(const Layer<W>& layer, int64_t first, int64_t count, int64_t begin, int64_t end) {
  thread_local Scratch scratch;
  const int64_t padded = (layer.weights.in + kLanes - 1) / kLanes * kLanes;
  outputs_of<W, R, std::min(kSums / R, kMostOutputs)>(layer, first, count, scratch.numbers(padded * R), begin, end);
}

template <class W>
void stretch(int64_t begin, int64_t end, void* context) {
  const Layer<W>& layer = *static_cast<const Layer<W>*>(context);
  begin *= kOutputs, end = std::min(layer.out, end * kOutputs);
  const int64_t blocks = (layer.rows + kMostRows - 1) / kMostRows, block = (layer.rows + blocks - 1) / blocks;
  for (int64_t first = 0; first < layer.rows; first += block) {
    const int64_t count = std::min(block, layer.rows - first);
    if (count == 1) some_rows<W, 1>(layer, first, count, begin, end);
    else if (count == 2) some_rows<W, 2>(layer, first, count, begin, end);
    else if (count <= 4) some_rows<W, 4>(layer, first, count, begin, end);
#if defined(__AVX512F__) || defined(__aarch64__)
    else some_rows<W, 8>(layer, first, count, begin, end);
#endif
  }
}

template <class W>
void run(Layer<W>& layer) {
  const int64_t units = (layer.out + kOutputs - 1) / kOutputs;
  const int64_t bytes = kOutputs * layer.weights.in * int64_t{sizeof(typename W::Stored)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_parallel_for(0, units, std::max<int64_t>(1, kWorthAThread / bytes), stretch<W>, &layer));
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

// Of the dtype of `like`, without values.
Tensor empty(const Tensor& like, const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0; stride *= shape[d]) strides[d] = stride;
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(),
                                                         strides.data(), dtype, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

template <class W>
Tensor linear(const Tensor& input, const Tensor& weight, const Numbers& scales, const std::optional<Tensor>& bias,
              Weights<W> weights) {
  const auto sizes = input.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && !shape.empty() && shape.back() == weight.size(1),
                  "few_rows_linear: x is [..., in], and a weight [out, in] without gaps");
  STD_TORCH_CHECK(weight.size(0) >= kMostOutputs && weight.size(1) >= kLanes, "few_rows_linear: a weight is at least [",
                  kMostOutputs, ", ", kLanes, "]");
  Tensor x = input;
  if (!x.is_contiguous()) {
    x = empty(input, shape);
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(x.get(), input.get(), 0));
  }
  weights.data = static_cast<const typename W::Stored*>(weight.data_ptr());
  weights.in = weight.size(1);
  shape.back() = weight.size(0);
  int64_t rows = 1;
  for (size_t d = 0; d + 1 < shape.size(); ++d) rows *= shape[d];
  const Tensor y = empty(input, shape);
  Layer<W> layer{weights, weight.size(0), rows, numbers(x), scales, one_each(bias, weight.size(0)), numbers(y)};
  if (rows > 0) run(layer);
  return y;
}

Tensor few_rows_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  if (weight.scalar_type() == ScalarType::Float) return linear<Float32>(x, weight, {}, bias, {});
  STD_TORCH_CHECK(weight.scalar_type() == ScalarType::BFloat16, "few_rows_linear: weights in float32 or bfloat16");
  return linear<BFloat16>(x, weight, {}, bias, {});
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
  library.def(
      "few_rows_linear_int8(Tensor x, Tensor weight, Tensor scale, Tensor? zero_point=None, Tensor? bias=None) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(exportable_cache, CPU, library) {
  library.impl("few_rows_linear", TORCH_BOX(&few_rows_linear));
  library.impl("few_rows_linear_int8", TORCH_BOX(&few_rows_linear_int8));
}
