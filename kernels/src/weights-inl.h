// Scores of a block to weights, for the current target: an online softmax (https://arxiv.org/abs/1805.02867).
#if defined(EXPORTABLE_CACHE_WEIGHTS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef EXPORTABLE_CACHE_WEIGHTS_INL_H
#undef EXPORTABLE_CACHE_WEIGHTS_INL_H
#else
#define EXPORTABLE_CACHE_WEIGHTS_INL_H
#endif

#include <cmath>
#include <cstring>
#include <limits>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "piece.h"
#include "rows-inl.h"
#include "sequence.h"

HWY_BEFORE_NAMESPACE();
namespace exportable_cache::kernels {
namespace HWY_NAMESPACE {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// exp(x) for x <= 0, to 2e-7, and zero far below. Highway's function is for all x, in more steps (1.06 times the time of a
// prompt's attention).
HWY_INLINE V exp_of_low(V x) {
  const F d;
  const hn::RebindToSigned<F> whole;
  // Adding this number leaves the bits of the nearest integer.
  const V shift = hn::Set(d, 12582912.0f);
  const V two_to = hn::Max(hn::Mul(x, hn::Set(d, 1.44269504f)), hn::Set(d, -127.0f));
  const V shifted = hn::Add(two_to, shift);
  const V rest = hn::Sub(two_to, hn::Sub(shifted, shift));
  V power = hn::Set(d, 1.5353362e-4f);
  power = hn::MulAdd(power, rest, hn::Set(d, 1.3398874e-3f));
  power = hn::MulAdd(power, rest, hn::Set(d, 9.6184374e-3f));
  power = hn::MulAdd(power, rest, hn::Set(d, 5.5503325e-2f));
  power = hn::MulAdd(power, rest, hn::Set(d, 0.24022648f));
  power = hn::MulAdd(power, rest, hn::Set(d, 0.6931472f));
  power = hn::MulAdd(power, rest, hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(whole, shifted));
  const V result = hn::BitCast(d, hn::Add(hn::BitCast(whole, power), exponent));
  // The maximum, without losing a NaN as some processors do.
  return hn::IfThenElse(hn::IsNaN(x), x, result);
}

// The maximum of a row's scores and `top`; scores of unseen keys become minus infinity.
HWY_INLINE float greatest_of(float* scores, Range seen, float top) {
  const F d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t t = 0; t < seen.begin; ++t) scores[t] = kNothing;
  for (int64_t t = seen.end; t < kBlock; ++t) scores[t] = kNothing;
  V most = hn::Set(d, top);
  for (int64_t t = 0; t < kBlock; t += lanes) most = hn::Max(most, hn::Load(d, scores + t));
  return hn::GetLane(hn::MaxOfLanes(d, most));
}

// Converts the scores of one row to weights relative to the maximum so far, stored by `store(slot, weights)`. Earlier sums are
// scaled if it has grown.
template <class Store>
HWY_INLINE void weigh(const float* scores, float greatest, float* top, float* total, float* sums, int64_t dim,
                      const Store& store) {
  const F d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  if (greatest == kNothing) {
    // On some processors, a comparison with NaN is true.
    V odd = hn::Zero(d);
    for (int64_t t = 0; t < kBlock; t += lanes) {
      const V x = hn::Load(d, scores + t);
      odd = hn::IfThenElse(hn::IsNaN(x), x, odd);
    }
    *total += hn::GetLane(hn::SumOfLanes(d, odd));
    for (int64_t t = 0; t < kBlock; t += lanes) store(t, hn::Zero(d));
    return;
  }
  const V above = hn::Set(d, greatest);
  V sum = hn::Zero(d);
  for (int64_t t = 0; t < kBlock; t += lanes) {
    const V weight = exp_of_low(hn::Sub(hn::Load(d, scores + t), above));
    store(t, weight);
    sum = hn::Add(sum, weight);
  }
  const float added = hn::GetLane(hn::SumOfLanes(d, sum));
  if (greatest == *top) {
    *total += added;
    return;
  }
  const float shrink = std::exp(*top - greatest);
  *total = *total * shrink + added;
  *top = greatest;
  const V by = hn::Set(d, shrink);
  for (int64_t i = 0; i < dim; i += lanes) hn::Store(hn::Mul(hn::Load(d, sums + i), by), d, sums + i);
}

// factors[t * stride] for every slot of a block.
HWY_INLINE void scale_slots(float* scores, const float* factors, int64_t stride, int64_t n) {
  const F d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t t = 0;
  if (stride == 1) {
    for (; t + lanes <= n; t += lanes) {
      hn::Store(hn::Mul(hn::Load(d, scores + t), hn::LoadU(d, factors + t)), d, scores + t);
    }
  }
  for (; t < n; ++t) scores[t] *= factors[t * stride];
}

HWY_INLINE void add_bias(float* scores, const float* bias, Range seen) {
  for (int64_t t = seen.begin; t < seen.end; ++t) scores[t] += bias[t];
}

// For a whole block: values after its last score are ignored.
HWY_INLINE void cap(float* scores, float softcap) {
  const F d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const V most = hn::Set(d, softcap), by = hn::Set(d, 1.0f / softcap);
  for (int64_t t = 0; t < kBlock; t += lanes) {
    const V x = hn::Load(d, scores + t);
    // Highway's Tanh may lose a NaN.
    const V capped = hn::Mul(hn::Tanh(d, hn::Mul(x, by)), most);
    hn::Store(hn::IfThenElse(hn::IsNaN(x), x, capped), d, scores + t);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace exportable_cache::kernels
HWY_AFTER_NAMESPACE();
#endif  // EXPORTABLE_CACHE_WEIGHTS_INL_H
