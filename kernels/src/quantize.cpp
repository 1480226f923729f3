// Quantization of rows, compiled for every instruction set and chosen at run time.
#include "quantize.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "linear_tasks.h"

#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quantize.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace exportable_cache::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using V = hn::Vec<F>;
using I32 = hn::RebindToSigned<F>;
using VI32 = hn::Vec<I32>;

constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(F()));

// Zeros after the last value.
HWY_INLINE V load(const float* numbers, int64_t count) {
  if (count >= kLanes) return hn::LoadU(F(), numbers);
  HWY_ALIGN float padded[kLanes] = {};
  std::memcpy(padded, numbers, sizeof(float) * count);
  return hn::Load(F(), padded);
}

// Stores as many bytes as there are values.
template <class T>
HWY_INLINE void store(VI32 numbers, T* to, int64_t count) {
  const hn::Rebind<T, F> bytes;
  const auto narrow = hn::DemoteTo(bytes, numbers);
  if (count >= kLanes) return hn::StoreU(narrow, bytes, to);
  HWY_ALIGN T padded[kLanes];
  hn::Store(narrow, bytes, padded);
  std::memcpy(to, padded, count);
}

// Adding this number leaves the bits of the nearest integer.
HWY_INLINE VI32 nearest(V numbers) {
  const V shift = hn::Set(F(), 12582912.0f);
  const I32 whole;
  return hn::Sub(hn::BitCast(whole, hn::Add(numbers, shift)), hn::BitCast(whole, shift));
}

HWY_INLINE float scale_of(const float* row, int64_t dim, float most) {
  const F d;
  V top = hn::Zero(d), odd = hn::Zero(d);
  for (int64_t i = 0; i < dim; i += kLanes) {
    const V x = load(row + i, dim - i);
    top = hn::Max(top, hn::Abs(x));
    // Stays zero if no value is NaN or infinite.
    odd = hn::MulAdd(x, hn::Zero(d), odd);
  }
  const float greatest = hn::GetLane(hn::MaxOfLanes(d, top));
  // A row of zeros has a scale as well, so that nothing is divided by zero.
  return std::max(greatest, std::numeric_limits<float>::min()) / most + hn::GetLane(hn::SumOfLanes(d, odd));
}

void quantize_some(const QuantizedRows& q, int64_t first, int64_t last) {
  const I32 whole;
  for (int64_t row = first; row < last; ++row) {
    const float* const from = q.source + row * q.dim;
    const bool is_packed = q.dtype == Dtype::kInt4;
    const float scale = q.scales[row] = scale_of(from, q.dim, is_packed ? 7.0f : 127.0f);
    const V by = hn::Set(F(), scale);
    if (!is_packed) {
      int8_t* const to = static_cast<int8_t*>(q.numbers) + row * q.dim;
      for (int64_t i = 0; i < q.dim; i += kLanes)
        store(nearest(hn::Div(load(from + i, q.dim - i), by)), to + i, q.dim - i);
      continue;
    }
    const int64_t half = q.dim / 2;
    uint8_t* const to = static_cast<uint8_t*>(q.numbers) + row * half;
    for (int64_t i = 0; i < half; i += kLanes) {
      const VI32 low = nearest(hn::Div(load(from + i, half - i), by));
      const VI32 high = nearest(hn::Div(load(from + half + i, half - i), by));
      store(hn::Add(hn::Add(low, hn::ShiftLeft<4>(high)), hn::Set(whole, 8 + 16 * 8)), to + i, half - i);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace exportable_cache::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace exportable_cache::kernels {
HWY_EXPORT(quantize_some);

namespace {

struct Work {
  const QuantizedRows& quantized;
  int64_t rows_of_task;
};

void quantize_one(void* context, size_t index) {
  const Work& work = *static_cast<Work*>(context);
  const int64_t first = static_cast<int64_t>(index) * work.rows_of_task;
  HWY_DYNAMIC_DISPATCH(quantize_some)
  (work.quantized, first, std::min(first + work.rows_of_task, work.quantized.rows));
}

}  // namespace

void quantize_rows(const QuantizedRows& quantized, const Threads& threads) {
  if (quantized.rows == 0) return;
  const int64_t wanted = static_cast<int64_t>(threads.count) * kTasksOfThread;
  const Work work{quantized, (quantized.rows + wanted - 1) / wanted};
  const int64_t count = (quantized.rows + work.rows_of_task - 1) / work.rows_of_task;
  run_tasks(threads, count, quantize_one, const_cast<Work*>(&work), quantized.rows * quantized.dim > kWorthAThread);
}

}  // namespace exportable_cache::kernels
#endif  // HWY_ONCE
