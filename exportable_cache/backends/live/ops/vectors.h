// Shared code of the kernels that are compiled on the user's machine: vector extensions of the compiler, reductions,
// bfloat16, scratch memory per thread, and tensors of torch's stable ABI.
#pragma once

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
#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // torch 2.11
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

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
// A cache line in bytes.
constexpr int kLine = 64;
// Number of bytes to read that justifies another thread.
constexpr int64_t kWorthAThread = 1 << 16;

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

// Types of stored numbers, and how a vector of them is converted to float32.
struct Float32 {
  using Stored = float;
  EC_INLINE static Vector vector(const float* p) { return loaded<Vector>(p); }
};

struct BFloat16 {
  using Stored = uint16_t;
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
#if EC_SHUFFLES && defined(__AVX512F__)
#define EC_SIXTEENS 1
#else
#define EC_SIXTEENS 0
#endif

// Sums of every fourth lane.
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

#if EC_SHUFFLES
// Sums of each four lanes of four vectors.
EC_INLINE Vector quarters_of(Vector a, Vector b, Vector c, Vector d) {
  constexpr int n = kLanes;
  const Vector ab = EC_PICK(a, b, 0, n, 1, n + 1) + EC_PICK(a, b, 2, n + 2, 3, n + 3);
  const Vector cd = EC_PICK(c, d, 0, n, 1, n + 1) + EC_PICK(c, d, 2, n + 2, 3, n + 3);
  return EC_PICK(ab, cd, 0, 1, n, n + 1) + EC_PICK(ab, cd, 2, 3, n + 2, n + 3);
}
#endif

#if EC_SIXTEENS
// Sums of every fourth lane of four vectors.
EC_INLINE Vector totals_of_quarters(Vector a, Vector b, Vector c, Vector d) {
  const Vector ab = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
  const Vector cd = _mm512_shuffle_f32x4(c, d, 0x44) + _mm512_shuffle_f32x4(c, d, 0xee);
  return _mm512_shuffle_f32x4(ab, cd, 0x88) + _mm512_shuffle_f32x4(ab, cd, 0xdd);
}
#endif

// Sums of four vectors.
EC_INLINE Quad totals(Vector a, Vector b, Vector c, Vector d) {
#if EC_SHUFFLES
  return quarters(quarters_of(a, b, c, d));
#else
  return Quad{total(a), total(b), total(c), total(d)};
#endif
}

// Scratch memory of a thread, kept for its next call.
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

// Returns an uninitialized tensor with the dtype of `like`.
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

// Returns a contiguous tensor with the same values.
Tensor without_gaps(const Tensor& x) {
  if (x.is_contiguous()) return x;
  const auto sizes = x.sizes();
  const Tensor copy = empty(x, std::vector<int64_t>(sizes.begin(), sizes.end()));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(copy.get(), x.get(), 0));
  return copy;
}

}  // namespace
